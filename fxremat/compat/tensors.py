"""Storages, and tensors that have sizes and devices but no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import detect_fake_mode, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def storage_watch(tensor: torch.Tensor) -> tuple[int, Callable[[], bool]]:
    """A number for the storage of ``tensor``, and what says if that is gone; unique while kept."""
    reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata), reference.expired


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that live and share one storage."""
    return storage_watch(tensor)[0]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen(op, args, kwargs, result)`` after each op.

    An op that runs with the random state of its first run is seen as the op that it is. Where only
    data would tell what the result is, ``expected`` gives it; None: it is not known.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        seen: Callable[[Any, Any, Any, Any], None],
        expected: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.expected = seen, expected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.higher_order.graphsafe_run_with_rng_state:
            func, *args = args
            kwargs = {name: value for name, value in kwargs.items() if name != "rng_state"}
        try:
            result = func(*args, **(kwargs or {}))
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = self.expected()
            if result is None:
                raise
        self.seen(func, args, kwargs or {}, result)
        return result


@contextmanager
def without_memory() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, tensors have sizes and devices but no memory; yields what makes one of a real one."""
    with unset_fake_temporarily():
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            yield mode.from_tensor


@contextmanager
def fake_tensors(seen: Callable[[Any], None] | None = None) -> Iterator[None]:
    """Inside, tensors have sizes and devices but no memory; models of them can be traced.

    ``seen`` is told what each op gives. Unlike in another mode, compiled parts stay compiled.
    """

    class Seeing(FakeTensorMode):  # type: ignore[no-untyped-call]
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            result = super().dispatch(*args, **kwargs)
            if seen is not None:
                seen(result)
            return result

    mode: Any = Seeing(allow_non_fake_inputs=True)
    try:
        with swappable(mode), mode:
            yield
    finally:
        seen = None  # torch may hold on to the class of a mode


def swappable(mode: Any) -> AbstractContextManager[object]:
    """Inside, ``model.to(dtype)`` can swap parameters without memory of this mode for new ones.

    The mode holds weak references, which swap_tensors refuses; it can do without them.
    """
    swap: Any = torch.utils.swap_tensors

    def swap_fake(one: torch.Tensor, other: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    return mock.patch.object(torch.utils, "swap_tensors", swap_fake)


def fake_mode_of(graph: fx.Graph) -> AbstractContextManager[Any]:
    """The mode that the fake tensors of the graph's inputs belong to, to make more of them."""
    values = (n.meta.get("val") for n in graph.find_nodes(op="placeholder", sort=False))
    one = next((value for value in values if isinstance(value, FakeTensor)), None)
    mode = detect_fake_mode([one])  # asked for each node that is added: they all share it
    return nullcontext() if mode is None else mode


outside_fake_mode = unset_fake_temporarily
"""Tensors made inside are real, also in the middle of a compilation."""


@contextmanager
def apart_from_tracing() -> Iterator[None]:
    """Inside, tensors are real, and nothing that is being compiled around it has a say."""
    with unset_fake_temporarily(), tracing(None):
        yield


def on_host_without_memory(model: Any, given: Any) -> AbstractContextManager[Any]:
    """`on_device_without_memory` for the CPU, wherever the tensors lie."""
    return on_device_without_memory(model, given, torch.device("cpu"))


@contextmanager
def on_device_without_memory(
    model: Any, given: Any, device: torch.device | None = None
) -> Iterator[Any]:
    """Inside `fake_tensors`: yields ``given`` with tensors on the device that have no memory.

    So are parameters and buffers of ``model`` until the end; what is sharded over ranks is whole,
    and FSDP2 does not gather it. Without a ``device`` each is where it lies.
    """
    known: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.device if device is None else device
        if is_fake(tensor) and tensor.device.type == where.type:
            return tensor
        if id(tensor) not in known:
            like = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=where
            )
            if isinstance(tensor, torch.nn.Parameter):
                known[id(tensor)] = torch.nn.Parameter(like, tensor.requires_grad)
            else:
                known[id(tensor)] = like.requires_grad_(tensor.requires_grad)
        return known[id(tensor)]

    with ExitStack() as stack:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = vars(module)[name]
                others = {key: hook for key, hook in hooks.items() if not _gathers(hook)}
                if len(others) < len(hooks):
                    stack.enter_context(mock.patch.object(module, name, type(hooks)(others)))
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in tables:
                stand_ins = {name: stand_in(x) for name, x in held.items() if x is not None}
                stack.enter_context(mock.patch.dict(held, stand_ins))
        yield pytree.tree_map_only(torch.Tensor, stand_in, given)


def _gathers(hook: Any) -> bool:
    """Whether a hook of a module is FSDP2's: it would take what has no memory for its own."""
    return str(getattr(hook, "__module__", None)).startswith("torch.distributed.fsdp")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes but no memory."""
    return isinstance(tensor, FakeTensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd sees a tensor as a part of another one, or as that in another shape."""
    return tensor._is_view()


def is_dtensor(tensor: object) -> bool:
    """Whether it is a tensor, and a part of one that ranks share."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor what lies on this rank; any other tensor itself."""
    one: Any = tensor
    local: torch.Tensor = one.to_local() if is_dtensor(tensor) else tensor
    return local


def places_in_joint(inputs: Iterable[object]) -> list[range]:
    """Of each input of a graph, which inputs of its joint graph stand for it.

    A tensor of a subclass becomes its parts there, and the mesh of a DTensor is one of these.
    """
    places, begin = list[range](), 0
    for value in inputs:
        places.append(range(begin, begin + _parts_in_joint(value)))
        begin = places[-1].stop
    return places


def _parts_in_joint(value: object) -> int:
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or not isinstance(value, torch.Tensor):
        return 1
    return sum(_parts_in_joint(getattr(value, name)) for name in flatten()[0])


_BY_ROWS = "crow_indices", "col_indices", "values"
_BY_COLUMNS = "ccol_indices", "row_indices", "values"
SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}
"""Layouts of tensors without a storage of their own, and what gives the parts that have one."""


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """A tensor itself, or the parts of one that is sparse or of a subclass; else nothing."""
    if not isinstance(value, torch.Tensor):
        return
    if value.layout in SPARSE:
        yield from (getattr(value.detach(), name)() for name in SPARSE[value.layout])
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        yield value
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(value, name))


_guards: Any = torch._C._dynamo.guards

Empty = Callable[[Any, Any, torch.dtype], torch.Tensor]

EMPTY: dict[str, Empty] = {
    "cpu": _guards._empty_strided_cpu,
    "cuda": _guards._empty_strided_cuda,
}
"""What generated code allocates with, by the type of the device: size, stride and dtype."""

reinterpret: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = _guards._reinterpret_tensor
"""Another tensor on the storage of the first, with a version counter of its own."""

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""How many hold a storage, by its number: tensors, and its object in Python."""


def storage_number(storage: torch.UntypedStorage) -> int:
    """The number by which `storage_uses` knows a storage."""
    return int(storage._cdata)


@contextmanager
def _plain() -> Iterator[None]:
    """Tensors made inside are plain ones, whatever the user has switched on."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
    ):
        yield


def new_block(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes of memory in one piece."""
    with _plain():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def tensor_over(
    block: torch.Tensor, begin: int, end: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor on a storage of exactly these bytes of ``block``, kept alive and never resized."""
    package: Any = torch
    with _plain():
        made: torch.Tensor = package.from_dlpack(block[begin:end]).view(dtype or torch.uint8)
        return made
