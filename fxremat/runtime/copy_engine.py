"""What the two engines have in common: their interface, and transfers that wait for a wait."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Generic, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

Direction = Literal["to_host", "to_device"]
Wait = Literal["wait_host", "wait_device"]
Work = Literal["step"]
"""What the host does beside the device, other than copying."""
T = TypeVar("T")


class Engine(Protocol):
    """Copies between the memory of devices of one type and host memory."""

    def start_to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor in host memory like ``x``, into which a copy of ``x`` is on its way."""

    def start_to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new tensor on ``device`` like ``host``, into which a copy of it is on its way."""

    def wait(self, what: Wait, target: torch.Tensor, device: torch.device) -> None:
        """The computation on ``device`` goes on once the copy into ``target`` has ended."""


class Pending(Generic[T]):
    """Transfers that nobody has waited for yet, by the storage that they write.

    Whoever waits again, as a backward does that runs a second time, finds that it has ended. The
    storage is held weakly and found by identity. If it dies without a wait, its entry goes with
    it, and what comes to lie at the same address later is another storage.
    """

    def __init__(self) -> None:
        self._transfers: MutableMapping[torch.UntypedStorage, T] = WeakKeyDictionary()
        self._ended: MutableMapping[torch.UntypedStorage, None] = WeakKeyDictionary()

    def add(self, target: torch.Tensor, transfer: T) -> None:
        """Remember the transfer that writes ``target``."""
        self._transfers[target.untyped_storage()] = transfer

    def get(self, target: torch.Tensor) -> T | None:
        """The transfer that writes ``target`` if nobody has waited for it."""
        return self._transfers.get(target.untyped_storage())

    def find(self, what: Wait, target: torch.Tensor) -> T | None:
        """As `get`; RuntimeError if there never was one."""
        transfer = self.get(target)
        if transfer is None and target.untyped_storage() not in self._ended:
            raise RuntimeError(
                f"fxremat::{what}: no copy into this tensor {tuple(target.shape)} has been "
                f"started; each copy is started by fxremat::{what.replace('wait', 'to')}, in the "
                "same process"
            )
        return transfer

    def forget(self, target: torch.Tensor) -> None:
        """Somebody has waited for the transfer that writes ``target``."""
        if self._transfers.pop(target.untyped_storage(), None) is not None:
            self._ended[target.untyped_storage()] = None

    def drop(self, target: torch.Tensor) -> None:
        """The transfer that writes ``target`` has failed."""
        self._transfers.pop(target.untyped_storage(), None)
