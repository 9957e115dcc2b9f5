"""Time of an op by roofline: the larger of compute and memory traffic, plus a launch.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model" (2009).

What a collective sends over the link between ranks is by Patarasuk, Yuan: "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009), section 3: to gather what n ranks have,
or to sum it into a part for each, every one of them sends (n-1)/n of the whole; to sum it for all,
twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxremat.compat.ranks import (
    gathers,
    moves_between_ranks,
    number_of_ranks,
    sums_for_all_ranks,
    sums_into_parts,
    sums_over_ranks,
)
from fxremat.compat.sizes import size_bound
from fxremat.cost.device import DeviceSpec
from fxremat.passes.memory_estimation import nbytes


def _shape(value: Any) -> Any:
    """Shapes as plain integers, the way the flop formulas expect their arguments."""
    if isinstance(value, torch.Tensor):
        return torch.Size(map(size_bound, value.shape))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_shape, value))
    return value


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    """Two batched matmuls: queries with keys, scores with values."""
    *batch, length, width = query
    return float(2 * prod(batch) * length * key[-2] * (width + value[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> float:
    return 2.5 * _attention(query, key, value)  # five matmuls where the forward has two


def _grouped(one: Any, other: Any, *_: Any, **__: Any) -> float:
    """Matmuls of groups of rows, of columns or of what is summed over: each number once."""
    groups = one[0] if len(one) == len(other) == 3 else 1
    return float(2 * groups * one[-2] * one[-1] * other[-1])


GROUPED_PRODUCTS = frozenset(
    {"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "grouped_outer"}
)
"""Products of groups that end at ``offs``: torch's, that of transformers, and its gradient."""
# Fused attention kernels, and products of experts, that torch's own table of formulas leaves out.
_EXTRA_FORMULAS: dict[str, Callable[..., float]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    **dict.fromkeys(GROUPED_PRODUCTS, _grouped),
}


def packet_name(target: object) -> str:
    """Of an operator, without its overload; "" of what is none."""
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of the call that a node stands for; 0 if it only moves memory."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet) or _EXTRA_FORMULAS.get(packet_name(node.target))
    if formula is None or "val" not in node.meta:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    named = {name: _shape(value) for name, value in kwargs.items()}
    try:
        return float(formula(*_shape(args), **named, out_val=_shape(node.meta["val"])))
    except (TypeError, ValueError, AssertionError, RuntimeError, IndexError):
        return 0.0  # a formula that does not know this overload: traffic alone is counted


def roofline_us(
    nodes: Iterable[fx.Node], traffic: int, dtype: torch.dtype, spec: DeviceSpec
) -> float:
    """Microseconds that ``nodes`` take as one kernel which moves ``traffic`` bytes."""
    compute_s = sum(
        flops_of(node) / spec.flops(dtype, is_convolution="convolution" in str(node.target))
        for node in nodes
    )
    return spec.launch_us + 1e6 * max(compute_s, traffic / spec.bytes_per_s)


def sent_by(node: fx.Node) -> int:
    """Bytes that a rank sends in the collective that a node starts; 0 for other nodes."""
    if not (moves_between_ranks(node) or sums_over_ranks(node)):
        return 0
    given = _bytes([one.meta.get("val") for one in node.all_input_nodes])
    whole, ranks = max(_bytes(node.meta.get("val")), given), number_of_ranks(node)
    sent = whole if ranks is None else whole * (ranks - 1) // ranks
    return 2 * sent if sums_for_all_ranks(node) else sent


def scratch_of(target: object, args: Sequence[Any]) -> int:
    """What gloo allocates inside of a collective on the CPU, by its arguments.

    It gathers into a list of results, and copies them; it sums into a copy of what it is given.
    NCCL has buffers that torch's allocator does not know.
    """
    if gathers(target):
        given = _bytes(args)
        whole = given * next(one for one in args if isinstance(one, int))
        return whole + (given if isinstance(args[0], (tuple, list)) else 0)
    return _bytes(args) if sums_into_parts(target) else 0


def _bytes(values: Any) -> int:
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
    return sum(map(nbytes, tensors))
