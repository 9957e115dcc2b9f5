"""How a copy between a device and host memory is started, and waited for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch

from fxremat.runtime import host_memory
from fxremat.runtime.host_memory import check_copyable, size_of_extent

Direction = Literal["to_host", "to_device"]
Wait = Literal["wait_host", "wait_device"]
T = TypeVar("T")


class Engine(ABC, Generic[T]):
    """Copies between a kind of device and host memory; ``T`` is one on its way.

    Each is known by the storage that it writes, None once somebody has waited for it: whoever waits
    again, as a backward does that runs a second time, finds that it has ended. The storage is held
    weakly and found by identity. What comes to lie at the same address later is another storage.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[torch.UntypedStorage, T | None] = WeakKeyDictionary()

    def start_to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor in host memory like ``x``, into which a copy of ``x`` is on its way."""
        host = self.new_host_tensor(x)
        self._copies[host.untyped_storage()] = self._start("to_host", x, host)
        return host

    def start_to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new tensor on ``device`` like ``host``, into which a copy of it is on its way."""
        check_copyable(host)
        x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        self._copies[x.untyped_storage()] = self._start("to_device", host, x)
        return x

    def wait(self, what: Wait, target: torch.Tensor, device: torch.device) -> None:
        """The computation on ``device`` goes on once the copy into ``target`` has ended.

        RuntimeError if there never was one, or it has failed before.
        """
        storage = target.untyped_storage()
        if storage not in self._copies:
            raise RuntimeError(
                f"fxremat::{what}: no copy into this tensor {tuple(target.shape)} has been "
                f"started; each copy is started by fxremat::{what.replace('wait', 'to')}, in the "
                "same process"
            )
        transfer = self._copies[storage]
        if transfer is not None:
            try:
                self._wait(transfer, device)
            except BaseException:
                self._copies.pop(storage, None)
                raise
            self._copies[storage] = None

    def new_host_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like ``x`` in the host memory that this copies from; its bytes count there."""
        check_copyable(x)
        return host_memory.HOST_MEMORY.allocate(size_of_extent(x), lambda: self._on_host(x))

    @abstractmethod
    def _on_host(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _start(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> T: ...

    @abstractmethod
    def _wait(self, transfer: T, device: torch.device) -> None: ...
