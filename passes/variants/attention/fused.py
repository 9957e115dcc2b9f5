"""Attention written by hand, by the fused kernels of the device.

    q, k ── bmm ── mul ── S ── softmax ── P ── bmm ── o                     before: S and P,
    do, v ── bmm ── dP ── ... ── dS ── bmm ── dq, dk;  P, do ── bmm ── dv   dP and dS are [T, S]

    q, k, v ── attention ── o, l                                            after
    do, q, k, v, o, l ── attention_backward ── dq, dk, dv

`match` says what is attention. Results are the same up to rounding. Rows in which all keys are
masked out give what they gave, or else the lossy rule is needed (`bias`). Every kernel that takes
the operands is a site of its own, with the fewest copies (`layout`).

All kernels take [B, H, T, D] in any order of memory that has D last, and give the output with what
their backward wants besides. What they take is what torch checks where it chooses among them
(`aten/src/ATen/native/transformers/`: `sdp_utils_cpp.cpp`, `cuda/sdp_utils.cpp`). Those for CUDA
were looked at in graphs of fake tensors only, and never ran on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import Add, Lookup, adder, fake, items, shape_of
from fxremat.passes.variants.attention.bias import Bias, Heads, Rows, plan_bias, where
from fxremat.passes.variants.attention.layout import Operand, Result, operand, origin, result
from fxremat.passes.variants.attention.match import Attention, find_attention
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target

_ATEN = torch.ops.aten
_NAMES = "query", "key", "value"


# --- one site ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """Attention by a kernel; ``results`` by the names of the gradients, and "output".

    Whatever stands in for the output, there is something for its "product" too, if only so that
    other forms of it cannot be taken as well.
    """

    attention: Attention
    kernel: AttentionKernel
    bias: Bias
    operands: Mapping[str, Operand]
    results: Mapping[str, Result] = field(default_factory=dict)

    def insert(self, into: Target) -> StandIns:
        """The forward before the old output, the backward before the first of its products."""
        place = into(self.attention.output.node)
        early = into.before(place)
        late = into.before(min(map(into, self.attention.late), default=place))
        calls = self.calls(early, late, into)
        output, found = next(calls)["output"], StandIns()
        for name in ("output", "product"):
            one = self.results[name]
            if one.node not in found:
                found[one.node] = one.insert(early, output)
        for name, node in next(calls, {}).items():
            one = self.results[name]
            found[one.node] = one.insert(late, node)
        return found

    def calls(self, early: Add, late: Add, at: Lookup) -> Iterator[dict[str, fx.Node]]:
        """Adds the forward and gives the output; asked again, the backward and the gradients."""
        query, key, value = (self.operands[name].insert(early, at) for name in _NAMES)
        mask, rows = self.bias.insert(early, at, fake(query).dtype)
        if rows.zero is not None:
            query = where(early, rows.zero, 0.0, query)
        scale = self.attention.scores.factor
        given = Inputs(query, key, value, mask, self.bias.is_causal, scale)
        if not self.kernel.takes(given):
            raise ValueError("the kernel does not take these operands")
        output, *_ = kept = self.kernel.forward(early, given)
        if rows.lost is not None:
            output = where(early, rows.lost, math.nan, output)
        yield {"output": output}
        if not self.attention.gradients:
            return
        gradient = self.operands["gradient"].insert(late, at)
        if rows.zero is not None and rows.lost is not None:
            gradient = where(late, rows.lost, 0.0, gradient)  # of NaN it may be NaN
        call = self.kernel.backward(late, given, kept, gradient)
        named = dict(zip(_NAMES, items(late, call, 0, 1, 2), strict=True))
        yield _with_rows(late, {name: named[name] for name in self.attention.gradients}, rows)


def _with_rows(add: Add, gradients: dict[str, fx.Node], rows: Rows) -> dict[str, fx.Node]:
    """The gradients as rows without keys leave them."""
    found = dict(gradients)
    if rows.lost is not None:
        heads = add(_ATEN.any.dim, rows.lost, -2, True)
        spoilt = {"query": rows.lost, "key": heads, "value": heads}
        for name in _NAMES if rows.zero is None else ("value",):
            if name in found:
                found[name] = where(add, spoilt[name], math.nan, found[name])
    if rows.zero is not None and "query" in found:
        found["query"] = where(add, rows.zero, 0.0, found["query"])
    return found


# --- planning ------------------------------------------------------------------------------------


def _heads(attention: Attention) -> list[Heads]:
    """Ways to see the batch of products as batches and heads, those that are in the graph first."""
    batch = attention.sizes[0]
    shape = shape_of(attention.probabilities) or ()
    found = [(shape[0], batch // shape[0])] if len(shape) > 3 else []
    layout = origin(attention.query.node)[1]
    if layout and len(layout[0]) == 2:
        found.append((layout[0][0][0], layout[0][1][0]))
    return list(dict.fromkeys([*found, (batch, 1)]))


def _operands(joint: JointGraph, attention: Attention, heads: Heads) -> dict[str, Operand] | None:
    _, rows, columns, width, wide = attention.sizes
    wanted = {
        "query": (attention.query, (*heads, rows, width)),
        "key": (attention.key, (*heads, columns, width)),
        "value": (attention.value, (*heads, columns, wide)),
        "gradient": (attention.gradient, (*heads, rows, wide)),
    }
    found = {
        name: operand(joint, product, shape)
        for name, (product, shape) in wanted.items()
        if product is not None
    }
    return None if None in found.values() else found  # type: ignore[return-value]


def _try(joint: JointGraph, site: Fused) -> Fused | None:
    """The site with the places of its results, found by trying the calls in another graph."""
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()

    def at(node: fx.Node) -> fx.Node:
        if node not in inputs:
            inputs[node] = graph.placeholder(node.name)
            inputs[node].meta["val"] = node.meta["val"]
        return inputs[node]

    attention = site.attention
    add = adder(graph, attention.output.node)
    try:
        made = dict(pair for part in site.calls(add, add, at) for pair in part.items())
    except (RuntimeError, ValueError):
        return None
    products = {"output": attention.output, **attention.gradients}
    batch = attention.sizes[0]
    results = {
        name: result(joint, products[name], fake(node), batch) for name, node in made.items()
    }
    results["product"] = result(joint, attention.output, fake(made["output"]), batch, most=1)
    return None if None in results.values() else replace(site, results=results)  # type: ignore[arg-type]


def _size_of_copies(site: Fused) -> int:
    copied = [one.node for one in site.operands.values() if one.is_copied]
    read = (one for name, one in site.results.items() if name != "product")
    copied += [one.node for one in read if one.is_copied]
    return sum(fake(node).nbytes for node in copied)


def _plan(
    joint: JointGraph, attention: Attention, kernel: AttentionKernel, is_inexact: bool
) -> Fused | None:
    found: list[Fused | None] = []
    for heads in _heads(attention):
        bias = plan_bias(attention.scores, heads)
        if bias is not None and bias.is_inexact is is_inexact:
            operands = _operands(joint, attention, heads)
            if operands is not None:
                found.append(_try(joint, Fused(attention, kernel, bias, operands)))
    return min(filter(None, found), key=_size_of_copies, default=None)


def _find(rule: str, is_inexact: bool, joint: JointGraph) -> Iterator[Site]:
    for attention in find_attention(joint):
        device = fake(attention.probabilities).device.type
        for kernel in (kernel for kernel in KERNELS if kernel.device == device):
            site = _plan(joint, attention, kernel, is_inexact)
            if site is not None:
                name = f"{rule} {attention.probabilities.name} {kernel.name}"
                yield Site(rule, name, site.insert)


RULES = (
    Rule(
        "fused_attention",
        "attention written by hand, by a fused kernel of the device",
        partial(_find, "fused_attention", False),
    ),
    Rule(
        "masked_attention",
        "the same with any added mask: other weights where it leaves a row without keys",
        partial(_find, "masked_attention", True),
        lossy=True,
    ),
)


# --- calls of kernels -------------------------------------------------------------------------

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Inputs:
    """Query [B, H, T, D], key [B, H, S, D], value [B, H, S, E], what is added, and the scale."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    bias: fx.Node | None
    is_causal: bool
    scale: float

    @property
    def operands(self) -> Nodes:
        return self.query, self.key, self.value

    @property
    def scores(self) -> list[int]:
        return [*fake(self.query).shape[:3], fake(self.key).shape[2]]


def _widths(given: Inputs) -> set[int]:
    return {fake(node).shape[-1] for node in given.operands}


class OnCpu:
    """Flash attention on the CPU: masks may be broadcast, and in float32 for any query."""

    name = device = "cpu"

    def takes(self, given: Inputs) -> bool:
        """One width; the type of the mask is that of the query, or float32."""
        query = fake(given.query)
        types = {query.dtype, torch.float32}
        fits = given.bias is None or fake(given.bias).dtype in types
        return len(_widths(given)) == 1 and fits

    def forward(self, add: Add, given: Inputs) -> Nodes:
        """Output and logarithms."""
        target = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
        named = {"attn_mask": given.bias, "scale": given.scale}
        return items(add, add(target, *given.operands, 0.0, given.is_causal, **named), 0, 1)

    def backward(self, add: Add, given: Inputs, kept: Nodes, gradient: fx.Node) -> fx.Node:
        target = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
        named = {"attn_mask": given.bias, "scale": given.scale}
        return add(target, gradient, *given.operands, *kept, 0.0, given.is_causal, **named)


def _capability() -> tuple[int, int]:
    """The capability of the GPU that is here; without one, of the oldest that has all kernels."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


class FlashOnCuda:
    """FlashAttention-2: no mask but the causal one, 16 bits, widths up to 256."""

    name, device = "flash", "cuda"

    def takes(self, given: Inputs) -> bool:
        """One width, a multiple of 8: others would have to be padded."""
        query, widths = fake(given.query), _widths(given)
        # on these cards flash attention has no backward for widths from 193 to 224
        has_little_shared_memory = (8, 6) <= _capability() <= (8, 9) or _capability()[0] == 12
        return (
            torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
            and _capability() >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and given.bias is None
            and len(widths) == 1
            and all(width % 8 == 0 and width <= 256 for width in widths)
            and not (has_little_shared_memory and any(192 < width <= 224 for width in widths))
        )

    def forward(self, add: Add, given: Inputs) -> Nodes:
        """Output, logarithms, and the state of the generator in two parts."""
        target = _ATEN._scaled_dot_product_flash_attention.default
        call = add(target, *given.operands, 0.0, given.is_causal, scale=given.scale)
        return items(add, call, 0, 1, 6, 7)

    def backward(self, add: Add, given: Inputs, kept: Nodes, gradient: fx.Node) -> fx.Node:
        """Lengths of sequences are given as numbers: all are as long."""
        target = _ATEN._scaled_dot_product_flash_attention_backward.default
        output, logarithms, seed, offset = kept
        lengths = (None, None, *given.scores[2:])
        args = (gradient, *given.operands, output, logarithms, *lengths, 0.0)
        return add(target, *args, given.is_causal, seed, offset, scale=given.scale)


class EfficientOnCuda:
    """Memory-efficient attention: any mask, 32 bits too, keys and values of different widths."""

    name, device = "memory-efficient", "cuda"

    def takes(self, given: Inputs) -> bool:
        """Widths fill 16 bytes (float32: four numbers); rows of a mask are a multiple of 16."""
        query = fake(given.query)
        aligned = 4 if query.dtype == torch.float32 else 8
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
            and _capability() >= (8, 0)
            and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(width % aligned == 0 for width in _widths(given))
            and (given.bias is None or fake(given.bias).dtype == query.dtype)
            and (given.bias is None or fake(given.bias).shape[3] == given.scores[3])
            and (given.bias is None or given.scores[3] % 16 == 0)
        )

    def forward(self, add: Add, given: Inputs) -> Nodes:
        """Output, logarithms, seed and offset; the last is the mask once more, at full size."""
        bias = given.bias
        if bias is not None and list(fake(bias).shape) != given.scores:
            bias = add(_ATEN.expand.default, bias, given.scores)
        target = _ATEN._scaled_dot_product_efficient_attention.default
        args = (*given.operands, bias, True, 0.0, given.is_causal)
        found = items(add, add(target, *args, scale=given.scale), 0, 1, 2, 3)
        return found if bias is None else (*found, bias)

    def backward(self, add: Add, given: Inputs, kept: Nodes, gradient: fx.Node) -> fx.Node:
        target = _ATEN._scaled_dot_product_efficient_attention_backward.default
        mask = kept[4] if len(kept) > 4 else None
        wanted = [True, True, True, False]
        args = (gradient, *given.operands, mask, *kept[:4], 0.0, wanted, given.is_causal)
        return add(target, *args, scale=given.scale)


AttentionKernel = OnCpu | FlashOnCuda | EfficientOnCuda
"""It says whether it takes inputs, and puts the forward, and the backward, into a graph."""
KERNELS: tuple[AttentionKernel, ...] = (OnCpu(), FlashOnCuda(), EfficientOnCuda())
