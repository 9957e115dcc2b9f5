"""Convolutions: the gradient of the weight and that of the input in a call each.

``convolution_backward`` computes both, so what the convolution read, what it gave and both
gradients are in memory together. But they are two computations: the gradient of the input needs no
input, and is a transposed convolution. In two calls, the weight's first, the input goes between.

    g, x, w ── convolution_backward ── dx, dw            before

    g, x ── convolution_backward ── dw                   x may go here
    g, w ── convolution (transposed) ── dx

The kernels are the same two that the one call would run; results agree up to rounding. The one
call lays out dx like x, and the transposed convolution like g: where they differ, dx is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call, adder, fake, laid_out_like
from fxremat.passes.variants.rule import Rule, Site, StandIns


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def of_input(node: fx.Node) -> tuple[Any, ...]:
    """What follows gradient, weight and bias in the convolution that gives an input's gradient.

    It is transposed where the one of ``node`` (a call of convolution_backward) is not, and not
    where it is. Along each axis the result of a transposed one has
    (o - 1) s - 2 p + d (k - 1) + 1 + output_padding elements.
    """
    gradient, given, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    out, size, kernel = ([*fake(n).shape[2:]] for n in (gradient, given, weight))  # type: ignore[arg-type]
    steps, pads, gaps = map(_numbers, (stride, padding, dilation))
    short = [0] * len(size)
    if not transposed:
        short = [
            size[i] - ((out[i] - 1) * steps[i] - 2 * pads[i] + gaps[i] * (kernel[i] - 1) + 1)
            for i in range(len(size))
        ]
    return steps, pads, gaps, not transposed, short, groups


_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_INPUT, _WEIGHT, _BIAS = range(3)


@dataclass(frozen=True)
class _Backward:
    """A call of convolution_backward and its results that are used, by their place."""

    node: fx.Node
    results: Mapping[int, fx.Node]

    def insert(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        old = copies[self.node]
        results = {place: copies[result] for place, result in self.results.items()}
        gradient, given, weight, bias, *how, mask = old.args
        assert isinstance(mask, Sequence)
        found: StandIns = {}
        with graph.inserting_before(old.next):
            wanted = [False, *mask[1:]]
            both = (gradient, given, weight, bias, *how, wanted)
            call = add_call(graph, _CONVOLUTION_BACKWARD, both, old)
            for place in (_WEIGHT, _BIAS):
                if place in results:
                    item = add_call(graph, operator.getitem, (call, place), results[place])
                    found[results[place]] = item
            transposed = (gradient, weight, None, *of_input(self.node))
            made = add_call(graph, _CONVOLUTION, transposed, old)
            found[results[_INPUT]] = laid_out_like(results[_INPUT], made, adder(graph, old))
        return found


def _read_backward(node: fx.Node) -> _Backward | None:
    """The call, if it computes the gradients of both input and weight of a plain convolution."""
    if node.target is not _CONVOLUTION_BACKWARD:
        return None
    transposed, mask = node.args[7], node.args[10]
    assert isinstance(mask, Sequence)
    results = {u.args[1]: u for u in node.users if u.target is operator.getitem and u.users}
    if transposed or not (mask[_INPUT] and mask[_WEIGHT]):
        return None
    if not {_INPUT, _WEIGHT} <= results.keys() or not _has_numbers(node):
        return None
    return _Backward(node, {int(place): u for place, u in results.items()})  # type: ignore[arg-type]


def _has_numbers(node: fx.Node) -> bool:
    tensors = (fake(n) for n in node.args[:3])  # type: ignore[arg-type]
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _find(joint: JointGraph) -> Iterator[Site]:
    for node in joint.module.graph.nodes:
        found = _read_backward(node)
        if found is not None:
            yield Site("split_gradients", f"split_gradients:{node.name}", found.insert)


RULES = (
    Rule(
        "split_gradients",
        "convolution: the gradients of weight and input one after the other, not in one call",
        _find,
    ),
)
