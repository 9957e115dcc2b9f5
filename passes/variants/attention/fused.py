"""Attention written by hand, by the fused kernels of the device.

    q, k ── bmm ── mul ── S ── softmax ── P ── bmm ── o                     before: S and P,
    do, v ── bmm ── dP ── ... ── dS ── bmm ── dq, dk;  P, do ── bmm ── dv   dP and dS are [T, S]

    q, k, v ── attention ── o, l                                            after
    do, q, k, v, o, l ── attention_backward ── dq, dk, dv

What is attention says `attention_match`: softmax(a Q K^T + masks) V, and its backward for any G in
place of the gradient of the output. So results are the same up to rounding; where scores were
rounded to 16 bits between the calls, the kernel rounds less. Rows in which all keys are masked out
give what they gave, or else the lossy rule is needed (`attention_bias`). Inductor replaces common
spellings by the same kernels before it partitions; this finds the rest, and all where it does not
run.

Every kernel that takes the operands is a site of its own. It reads and writes without copies where
it can (`attention_places`).

The kernels for CUDA are offered by what torch says that they take, and never ran: see
`attention_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call, fake, shape_of
from fxremat.passes.variants.attention.bias import Bias, Heads, Rows, plan_bias, where
from fxremat.passes.variants.attention.kernels import KERNELS, AttentionKernel, Inputs, Kept
from fxremat.passes.variants.attention.layout import origin
from fxremat.passes.variants.attention.match import Attention, find_attention
from fxremat.passes.variants.attention.operands import Operand, Result, operand, result, result_here
from fxremat.passes.variants.rule import Rule, Site, StandIns

_ATEN = torch.ops.aten
Add = Callable[..., fx.Node]
At = Callable[[fx.Node], fx.Node]


def _adder(graph: fx.Graph, like: fx.Node) -> Add:
    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(graph, target, args, like, **kwargs)

    return add


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

    def insert(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        """The forward before the old output, the backward before the first of its products."""
        at, attention = copies.__getitem__, self.attention
        found: StandIns = {}
        with graph.inserting_before(at(attention.output.node)):
            add = _adder(graph, at(attention.output.node))
            forward = self.forward(add, at)
            for name in ("output", "product"):
                one = self.results[name]
                if at(one.node) not in found:
                    found[at(one.node)] = one.insert(add, forward.output)
        if not attention.gradients:
            return found
        late = {at(node) for node in attention.late}
        first = next(node for node in graph.nodes if node in late)
        with graph.inserting_before(first):
            add = _adder(graph, first)
            for name, node in self.backward(add, at, forward).items():
                found[at(self.results[name].node)] = self.results[name].insert(add, node)
        return found

    def forward(self, add: Add, at: At) -> Forward:
        """The kernel, and what it takes."""
        query, key, value = (
            self.operands[name].insert(add, at) for name in ("query", "key", "value")
        )
        made = self.bias.insert(add, at, fake(query).dtype)
        if made.rows.zero is not None:
            query = where(add, made.rows.zero, 0.0, query)
        scale = self.attention.scores.factor
        given = Inputs(query, key, value, made.node, self.bias.is_causal, scale)
        if not self.kernel.takes(given):
            raise NotTaken
        kept = self.kernel.forward(add, given)
        output = kept.output
        if made.rows.lost is not None:
            output = where(add, made.rows.lost, math.nan, output)
        return Forward(given, kept, made.rows, output)

    def backward(self, add: Add, at: At, forward: Forward) -> dict[str, fx.Node]:
        """The gradients that the graph computes."""
        gradient = self.operands["gradient"].insert(add, at)
        if forward.rows.zero is not None and forward.rows.lost is not None:
            gradient = where(add, forward.rows.lost, 0.0, gradient)  # of NaN it may be NaN
        found = self.kernel.backward(add, forward.given, forward.kept, gradient)
        named = dict(zip(("query", "key", "value"), found, strict=True))
        wanted = {name: named[name] for name in self.attention.gradients}
        return _with_rows(add, wanted, forward.rows)


@dataclass(frozen=True)
class Forward:
    """The forward in a graph."""

    given: Inputs
    kept: Kept
    rows: Rows
    output: fx.Node


class NotTaken(Exception):
    """The kernel does not take these operands."""


def _with_rows(add: Add, gradients: dict[str, fx.Node], rows: Rows) -> dict[str, fx.Node]:
    """The gradients as rows without keys leave them."""
    found = dict(gradients)
    if rows.lost is not None:
        heads = add(_ATEN.any.dim, rows.lost, -2, True)
        spoilt = {"value": heads} if rows.zero is not None else {
            "query": rows.lost, "key": heads, "value": heads
        }  # fmt: skip
        for name in found.keys() & spoilt.keys():
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
    found: dict[str, Operand] = {}
    for name, (product, shape) in wanted.items():
        if product is not None:
            one = operand(joint, product, shape)
            if one is None:
                return None
            found[name] = one
    return found


def _try(joint: JointGraph, site: Fused) -> Fused | None:
    """With the places of the results, as found by putting the calls into a graph of their own."""
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()

    def at(node: fx.Node) -> fx.Node:
        if node not in inputs:
            inputs[node] = graph.placeholder(node.name)
            inputs[node].meta["val"] = node.meta["val"]
        return inputs[node]

    attention = site.attention
    add = _adder(graph, attention.output.node)
    try:
        forward = site.forward(add, at)
        made = {"output": forward.output}
        if attention.gradients:
            made |= site.backward(add, at, forward)
    except (NotTaken, RuntimeError, ValueError):
        return None
    products = {"output": attention.output, **attention.gradients}
    batch = attention.sizes[0]
    results: dict[str, Result] = {}
    for name, node in made.items():
        one = result(joint, products[name], fake(node), batch)
        if one is None:
            return None
        results[name] = one
    here = result_here(attention.output, fake(forward.output), batch)
    if here is None:
        return None
    results["product"] = here
    return replace(site, results=results)


def _copied_bytes(site: Fused) -> int:
    copied = [one.node for one in site.operands.values() if one.is_copied]
    read = (one for name, one in site.results.items() if name != "product")
    copied += [one.node for one in read if one.order is not None]
    return sum(fake(node).nbytes for node in copied)


def _plan(
    joint: JointGraph, attention: Attention, kernel: AttentionKernel, is_inexact: bool
) -> Fused | None:
    """The way with the fewest copies."""
    found: list[Fused] = []
    for heads in _heads(attention):
        bias = plan_bias(attention.scores, heads)
        if bias is None or bias.is_inexact is not is_inexact:
            continue
        operands = _operands(joint, attention, heads)
        site = None if operands is None else _try(joint, Fused(attention, kernel, bias, operands))
        found += [] if site is None else [site]
    return min(found, key=_copied_bytes, default=None)


def _find(rule: str, is_inexact: bool, joint: JointGraph) -> Iterator[Site]:
    for attention in find_attention(joint):
        device = fake(attention.probabilities).device.type
        for kernel in (kernel for kernel in KERNELS if kernel.device == device):
            site = _plan(joint, attention, kernel, is_inexact)
            if site is not None:
                yield Site(
                    rule, f"{rule} {attention.probabilities.name} {kernel.name}", site.insert
                )


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
