"""Bytes of the storages that tensors have on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxremat.compat.backward import saved_by
from fxremat.compat.tensors import is_fake, plain_tensors
from fxremat.runtime.host_memory import is_on

Storages = dict[int, int]
"""Bytes by address."""


def storages_of(values: Iterable[object], device: torch.device) -> Storages:
    """The storages that the tensors among ``values`` have on the device."""
    sizes: Storages = {}
    for value in values:
        for tensor in plain_tensors(value):
            if not is_fake(tensor) and is_on(tensor, device):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def with_gradients(values: Iterable[object], device: torch.device) -> Storages:
    """The same with the storages of the gradients that leaves among them have."""
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    gradients = [one.grad for one in tensors if one.is_leaf]
    return storages_of([*tensors, *gradients], device)


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
