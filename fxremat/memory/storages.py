"""Bytes of the storages of tensors: real ones on a device, and ones without memory as code runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from fxremat.compat.backward import saved_by
from fxremat.compat.tensors import is_fake, plain_tensors, storage_key
from fxremat.core.events import Allocate, Free
from fxremat.runtime.host_memory import is_host, is_on

Storages = dict[int, int]
"""Bytes by address."""


def storages_of(values: Iterable[object], device: torch.device | None) -> Storages:
    """The storages that the tensors among ``values`` have on the device; None: not in host memory.

    Sparse tensors, and those of subclasses, count with their parts.
    """
    real = (one for value in values for one in plain_tensors(value) if not is_fake(one))
    found = (one for one in real if (not is_host(one) if device is None else is_on(one, device)))
    storages = (one.untyped_storage() for one in found)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def with_gradients(values: Iterable[object], device: torch.device) -> Storages:
    """The same with the storages of the gradients that leaves among them have."""
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    gradients = [one.grad for one in tensors if one.is_leaf]
    return storages_of([*tensors, *gradients], device)


def without(storages: Storages, known: Container[int]) -> Storages:
    """All but those that are known."""
    return {key: size for key, size in storages.items() if key not in known}


def storage_bytes(values: Iterable[object], device: torch.device) -> int:
    """Bytes of the storages that the tensors among ``values`` have on the device."""
    return sum(storages_of(values, device).values())


def saved_storages(node: Any, planned: int, device: torch.device) -> Storages:
    """The storages that a forward has saved, and those of gradients beside what it saved.

    Where one was overwritten since, they are not known, and ``planned`` bytes stand for them.
    """
    try:
        saved = saved_by(node)
    except RuntimeError:
        return {id(node): planned}
    return with_gradients(saved, device)


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
