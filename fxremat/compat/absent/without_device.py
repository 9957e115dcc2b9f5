"""Eager training code on tensors without memory, on a CUDA device that need not be here.

Autograd in C++ asks the device of each tensor which streams to wait for, and fails where torch has
no such device. Inside of `without_device` C++ is told that tensors lie on the CPU whenever autograd
may be at work, and Python sees the device that they are on. So real loops run as on the device:
what optimizers choose by device (``foreach``, ``fused``) is chosen as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fxremat.compat.absent.pretending import CUDA, always, fake_cuda
from fxremat.compat.tensors import swappable

READ: tuple[type[Exception], ...] = (DataDependentOutputException,)
"""Raised where values are read that tensors without memory do not have."""
_HERE = torch.device("cpu")
_ATEN = torch.ops.aten
Seen = Callable[[Any, Any, Any, Any], None]
"""Called with an op, its arguments and keywords, and what it gave."""


@contextmanager
def without_device(seen: Seen, empty_cache: Callable[[], None]) -> Iterator[None]:
    """Inside, tensors have no memory, and may lie on ``cuda:0`` whatever this machine has.

    ``seen`` is called after each kernel that would have been launched: what one op does inside,
    and how it is written in terms of others, is not seen. Numbers that Python reads are made
    up (`_number`). ``empty_cache`` stands for torch's.
    """

    class Seeing(FakeTensorMode):  # type: ignore[no-untyped-call]
        depth = 0

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in _READS:
                return _READS[func](args[0])
            self.depth += 1
            try:
                result = super().dispatch(func, types, args, kwargs)
            finally:
                self.depth -= 1
            if not self.depth and func is not torch.ops.prim.device.default:
                seen(func, args, kwargs or {}, result)
            return result

    mode: Any = Seeing(allow_non_fake_inputs=True)
    is_here = torch.accelerator.is_available()  # asked before torch.cuda answers that one is
    with (
        fake_cuda(),
        _foreach_of_fake_tensors(optimizer),
        _foreach_of_fake_tensors(_foreach_utils),
        mock.patch.multiple(torch.cuda, **_ANSWERS, empty_cache=empty_cache),
        nullcontext() if is_here else _autograd_on_host(),
        swappable(mode),
        mode,
    ):
        yield


_ANSWERS: dict[str, Any] = {
    "is_available": always(True),
    "device_count": always(1),
    "is_current_stream_capturing": always(False),
    **dict.fromkeys(
        (
            "current_device", "synchronize", "memory_allocated", "memory_reserved",
            "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats",
            "get_rng_state", "set_rng_state",
        ),
        always(0),
    ),
}  # fmt: skip
"""What `torch.cuda` says inside."""


def _number(tensor: torch.Tensor) -> bool | int | float:
    """Of the device 0, as where no gradient overflowed; of the host 1, as for counts of steps."""
    number = int(tensor.device.type == "cpu")
    if tensor.dtype is torch.bool:
        return bool(number)
    return float(number) if tensor.dtype.is_floating_point else number


_READS: dict[Any, Callable[[torch.Tensor], Any]] = {
    _ATEN._local_scalar_dense.default: _number,
    _ATEN.is_nonzero.default: lambda tensor: bool(_number(tensor)),
    _ATEN.equal.default: lambda tensor: True,
}
"""Ops that give a number of the device to Python."""


def _foreach_of_fake_tensors(module: Any) -> AbstractContextManager[object]:
    """Optimizers take their kernels for many tensors at once for these classes of tensors only."""
    types = [*module._foreach_supported_types, FakeTensor]
    return mock.patch.object(module, "_foreach_supported_types", types)


@contextmanager
def _autograd_on_host() -> Iterator[None]:
    """Inside, C++ is told that tensors without memory on CUDA lie here, where autograd may run."""
    asked_device = torch.ops.prim.device.default
    original: Any = FakeTensor.__torch_dispatch__
    moved = FakeTensor.to

    def device_for_cpp(tensor: Any) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        graph = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        return _HERE if graph else tensor.fake_device

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is asked_device:
            return device_for_cpp(args[0])
        return original(func, types, args, kwargs)

    def to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        """Without the device where the tensor is there already: C++ would make a copy."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        dtype = self.dtype if dtype is None else dtype
        if device is not None and device.type == "cuda" and device.index is None:
            device = CUDA
        if device is None or device == self.device:
            keywords = {} if layout is None else {"memory_format": layout}
            return moved(self, dtype, non_blocking, copy, **keywords)
        there = torch.empty_like(self, dtype=dtype, device=device)
        return there.copy_(self, non_blocking)

    patches: dict[str, Any] = {
        "__torch_dispatch__": classmethod(dispatch),
        "to": to,
        "cuda": lambda self, *_, **__: to(self, CUDA),
        "cpu": lambda self, *_, **__: to(self, _HERE),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
    }
    handlers = {asked_device: lambda args: device_for_cpp(args[0])}
    with (
        mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, handlers),
        mock.patch.multiple(FakeTensor, create=True, **patches),
    ):
        yield
