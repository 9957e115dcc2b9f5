"""Eager training code on tensors without memory, on a CUDA device that need not be here.

Autograd in C++ asks the device of each tensor which streams to wait for, and fails where torch has
no such device. Inside of `without_device` C++ is told that tensors lie on the CPU whenever autograd
may be at work, and Python sees the device that they are on. So real loops run as on the device:
what optimizers choose by device (``foreach``, ``fused``) is chosen as there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

from fxremat.compat.absent.pretending import CUDA, always, fake_cuda
from fxremat.compat.tensors import swappable

_LOW = frozenset({
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm",
    "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
})  # fmt: skip
_FLOAT = frozenset({
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "acos", "asin",
    "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "dist", "erfinv", "exp", "expm1", "frobenius_norm", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm",
    "linalg_matrix_sqrth", "log", "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss",
    "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss",
    "nll_loss2d", "nuclear_norm", "pdist", "poisson_nll_loss", "pow", "reciprocal", "renorm",
    "rms_norm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softplus", "tan",
    "triplet_margin_loss", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
})  # fmt: skip
_FLOAT_RESULT = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "norm",
    "prod", "softmax", "sum",
})  # fmt: skip
"""What they sum is float32 where no type is asked for."""
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
})  # fmt: skip
_REFUSED = frozenset({"binary_cross_entropy"})
_KEY = "AutocastCPU"
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def cuda_autocast(supports_bfloat16: bool) -> Iterator[None]:
    """Inside, ``torch.autocast("cuda")`` acts on tensors of the CPU as it would on the device's.

    They are traced on the CPU, where it has no effect. So while it is on, the CPU's autocast is,
    too, with what CUDA's does to each op (`aten/src/ATen/autocast_mode.cpp`): some run in the low
    precision, some in float32, some in the widest type of their operands. Which ops there are at
    all, torch's dispatcher says. Autocast for the CPU has no effect, as on the device.
    """
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def enabled(*given: Any) -> None:
        device, is_on = given if len(given) == 2 else ("cuda", *given)
        if device != "cpu":
            set_enabled(device, is_on)
        if device == "cuda":
            set_enabled("cpu", is_on)

    def dtype(device: str, wanted: torch.dtype) -> None:
        if device != "cpu":
            set_dtype(device, wanted)
        if device == "cuda":
            set_dtype("cpu", wanted)

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        _register(library)
        with (
            mock.patch.multiple(torch, set_autocast_enabled=enabled, set_autocast_dtype=dtype),
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", always(False)),
            mock.patch.object(torch.cuda, "is_bf16_supported", always(supports_bfloat16)),
        ):
            yield
    finally:
        library._destroy()


def _register(library: Any) -> None:
    """CUDA's way for each op in place of the CPU's; none for those that CUDA has none for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("aten::"):
                continue
            kernel = _kernel(name) if has_kernel(name, "AutocastCUDA") else None
            if kernel is None and not has_kernel(name, _KEY):
                continue
            library.impl(
                name.removeprefix("aten::"), kernel or torch.library.fallthrough_kernel, _KEY
            )


def has_kernel(name: str, key: str) -> bool:
    """Whether torch's dispatcher has a kernel of an op for a key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _kernel(name: str) -> Callable[..., Any] | None:
    base, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    if base in _LOW:
        return lambda *args, **kwargs: _in_type(op, _low_type(), args, kwargs)
    if base in _FLOAT:
        return lambda *args, **kwargs: _in_type(op, torch.float32, args, kwargs)
    if base == "norm":
        return lambda *args, **kwargs: _norm(op, args, kwargs)
    if base in _FLOAT_RESULT:
        return lambda *args, **kwargs: _with_float_result(op, args, kwargs)
    if base in _WIDEST:
        return lambda *args, **kwargs: _in_type(op, _widest(args, kwargs), args, kwargs)
    if base in _REFUSED:
        return _refuse
    return None


def _low_type() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


@contextmanager
def low_precision() -> Iterator[Callable[[Tensor], Tensor]]:
    """What an op of low precision does to its operands; inside, autocast is off."""
    is_on, low = torch.is_autocast_enabled("cuda"), _low_type()
    with _off():
        yield lambda x: _cast(x, low) if is_on else x


@contextmanager
def _off() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    ):
        yield


def _in_type(
    op: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    with _off():
        args, kwargs = pytree.tree_map(lambda x: _cast(x, dtype), (args, dict(kwargs)))
        return op(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Numbers that are not of 64 bits, in another type; anything else as it is."""
    return value.to(dtype) if _is_eligible(value) else value


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _with_float_result(op: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    wanted = dict(kwargs)
    if _is_eligible(args[0]) and wanted.get("dtype") is None and not _has_type(op, args):
        wanted["dtype"] = torch.float32
    with _off():
        return op(*args, **wanted)


def _has_type(op: Any, args: Any) -> bool:
    """Whether a type is asked for by position, as in ``softmax(x, 1, torch.float16)``."""
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dtype") if "dtype" in names else len(args)
    return place < len(args) and args[place] is not None


def _norm(op: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Its overloads without a type have one with it."""
    typed = _TYPED_NORMS.get(op._overloadname)
    with _off():
        if typed is None or not _is_eligible(args[0]):
            return op(*args, **kwargs)
        names = [argument.name for argument in op._schema.arguments]
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return typed(**given, dtype=torch.float32)


_TYPED_NORMS = {
    "Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


def _widest(args: Any, kwargs: Mapping[str, Any]) -> torch.dtype:
    """Float32 if an operand is, else the low type."""
    tensors = [x for x in pytree.tree_leaves((args, dict(kwargs))) if _is_eligible(x)]
    is_wide = any(x.dtype not in _HALVES for x in tensors)
    return torch.float32 if is_wide else _low_type()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe under autocast: use binary_cross_entropy_with_logits, "
        "which takes scores in place of probabilities"
    )


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
