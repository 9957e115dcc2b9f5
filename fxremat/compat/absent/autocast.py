"""``torch.autocast("cuda")`` for a step that is traced on the CPU, as it acts on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxremat.compat.absent.pretending import always

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

    def of_both(change: Callable[[str, Any], None]) -> Callable[..., None]:
        def changed(*given: Any) -> None:
            device, wanted = given if len(given) == 2 else ("cuda", *given)
            if device != "cpu":
                change(device, wanted)
            if device == "cuda":
                change("cpu", wanted)

        return changed

    names = ("set_autocast_enabled", "set_autocast_dtype")
    setters: Any = {name: of_both(getattr(torch, name)) for name in names}
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        _register(library)
        with (
            mock.patch.multiple(torch, **setters),
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


def _off() -> Any:
    key = getattr(torch._C.DispatchKey, _KEY)
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


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


def _with_float_result(op: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Where no type is asked for; overloads of ``norm`` without a type have one with it."""
    known = op._schema.arguments
    given = {one.name: one.default_value for one in known if one.has_default_value()}
    given |= {**dict(zip((one.name for one in known), args, strict=False)), **kwargs}
    typed = op if any(one.name == "dtype" for one in known) else _TYPED_NORMS.get(op)
    with _off():
        if typed is None or not _is_eligible(args[0]) or given.get("dtype") is not None:
            return op(*args, **kwargs)
        return typed(**{**given, "dtype": torch.float32})


_TYPED_NORMS = {
    torch.ops.aten.norm.Scalar: torch.ops.aten.norm.ScalarOpt_dtype,
    torch.ops.aten.norm.ScalarOpt_dim: torch.ops.aten.norm.ScalarOpt_dim_dtype,
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
