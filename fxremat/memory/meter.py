"""Counts the bytes of tensors that have no memory, while code runs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from fxremat.compat.tensors import storage_key
from fxremat.core.events import Allocate, Free


@dataclass
class MeteredStorage:
    """A storage that counts until it is gone; ``name`` is that of its allocation."""

    nbytes: int
    is_gone: Callable[[], bool]
    name: str


Storage = TypeVar("Storage", bound=MeteredStorage)


@dataclass
class Meter(Generic[Storage]):
    """Counts storages from when they are added until they are gone.

    ``live`` has those that are there by their keys (`compat.tensors.storage_key`), ``events`` what
    was asked of an allocator so far, ``current`` and ``peak`` the bytes that are live now and that
    were live at most.
    """

    live: dict[int, Storage] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    current: int = 0
    peak: int = 0
    allocations: int = 0

    def allocate(self, nbytes: int, kind: str = "") -> str:
        """Note that so many bytes are allocated; returns the name of the allocation."""
        name = f"{kind}{self.allocations}"
        self.allocations += 1
        self.events.append(Allocate(name, nbytes))
        return name

    def add(self, key: int, storage: Storage) -> None:
        """Count a storage from now on; its allocation has been noted."""
        self.live[key] = storage
        self.current += storage.nbytes
        self.peak = max(self.peak, self.current)

    def free(self, storage: Storage) -> None:
        """Count a storage no longer."""
        self.current -= storage.nbytes
        self.events.append(Free(storage.name))

    def sweep(self) -> None:
        """Count what is gone no longer."""
        for key in [key for key, storage in self.live.items() if storage.is_gone()]:
            self.free(self.live.pop(key))

    def names(self, values: Iterable[Any]) -> list[str | None]:
        """The names of their allocations; None for what has none or is no tensor."""
        keys = [storage_key(x) if isinstance(x, torch.Tensor) else None for x in values]
        found = [None if key is None else self.live.get(key) for key in keys]
        return [None if one is None else one.name for one in found]
