"""Storages, and tensors that have sizes and devices but no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode


def storage_watch(tensor: torch.Tensor) -> tuple[int, Callable[[], bool]]:
    """A number for the storage of ``tensor``, unique as long as the second is kept.

    The second says whether the storage is gone.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata), reference.expired


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that live and share one storage."""
    return storage_watch(tensor)[0]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen(op, args, kwargs, result)`` after each op."""

    def __init__(self, seen: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, result)
        return result


@contextmanager
def without_memory() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, tensors have sizes and devices but no memory; yields what makes one of a real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    with unset_fake_temporarily():
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            yield mode.from_tensor


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have sizes and devices but no memory; models of them can be traced."""
    from unittest import mock

    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    swap: Any = torch.utils.swap_tensors

    def swap_fake(one: torch.Tensor, other: torch.Tensor) -> None:
        # The mode holds weak references, which swap_tensors refuses; it can do without them.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    # ``model.to(dtype)`` swaps fake parameters for new ones.
    with mode, mock.patch.object(torch.utils, "swap_tensors", swap_fake):
        yield


def fake_mode_of(graph: fx.Graph) -> AbstractContextManager[Any]:
    """The mode that the fake tensors of the graph's inputs belong to, to make more of them."""
    from torch._guards import detect_fake_mode

    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(values)
    return nullcontext() if mode is None else mode


@contextmanager
def outside_fake_mode() -> Iterator[None]:
    """Tensors made inside are real, also in the middle of a compilation."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield
