"""Convolutions, forward and backward, in less workspace, or with gradients one after the other.

**Less workspace** (`convolution_workspace`): in parts, or by another algorithm.

    x, w ── convolution ── y                        before: workspace for all images
    x, w ── convolution of n images at a time ── y  after: for n of them

The operators are those of `fxremat.runtime.chunks.convolutions`. MONeT (arXiv 2010.14501) chooses
among all of cuDNN's algorithms by time and workspace. torch lets nobody name one, so the choice is
among parts of the batch, and on CUDA among the algorithms that cuDNN's flags ask for; the workspace
of every one is measured.

**The gradient of the weight and that of the input in a call each** (`split_gradients`):
``convolution_backward`` computes both, so what the convolution read, what it gave and both
gradients are in memory together. But they are two computations: the gradient of the input needs no
input, and is a transposed convolution. In two calls, the weight's first, the input goes between.

    g, x, w ── convolution_backward ── dx, dw            before

    g, x ── convolution_backward ── dw                   x may go here
    g, w ── convolution (transposed) ── dx

The kernels are the same two that the one call would run. The one call lays out dx like x, and the
transposed convolution like g: where they differ, dx is copied. All results agree up to rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.core.constants import IMAGE_PARTS
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import fake, laid_out_like
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.runtime.chunks import convolutions

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_INPUT, _WEIGHT = range(2)


def _is_known(call: fx.Node) -> bool:
    """Whether all sizes are numbers above 0, and all results of a backward are items of it."""
    if call.target is _BACKWARD and any(user.target is not operator.getitem for user in call.users):
        return False
    sizes = [size for node in call.all_input_nodes for size in fake(node).shape]
    return all(isinstance(size, int) and size > 0 for size in sizes)


# --- less workspace ------------------------------------------------------------------------------


def _insert_less(call: fx.Node, how: tuple[int, str], into: Target) -> StandIns:
    """The call, so many images at a time, by an algorithm."""
    old, add = into(call), into.behind(into(call))
    if call.target is _FORWARD:
        return {call: add(convolutions.CONVOLUTION, *old.args, *how)}
    new = add(convolutions.CONVOLUTION_BACKWARD, *old.args, *how)
    return {item: add(operator.getitem, new, item.args[1]) for item in call.users}


def _ways(call: fx.Node) -> Iterator[tuple[int, str]]:
    """Images at a time, and the algorithm.

    torch's own gives its result in plain order, cuDNN's where all operands are in it.
    """
    given = fake(call.args[1 if call.target is _BACKWARD else 0])  # type: ignore[arg-type]
    count = given.shape[0]
    for images in dict.fromkeys(-(-count // parts) for parts in IMAGE_PARTS):
        if images < count:
            yield images, ""
    if given.device.type == "cuda":
        if all(fake(node).is_contiguous() for node in call.all_input_nodes):
            yield count, "native"
        if call.target is _BACKWARD:
            yield count, "deterministic"


def _find_less(joint: JointGraph) -> Iterator[Site]:
    for node in joint.module.graph.nodes:
        if node.target not in (_FORWARD, _BACKWARD) or not _is_known(node):
            continue
        for images, algorithm in _ways(node):
            insert = partial(_insert_less, node, (images, algorithm))
            name = f"convolution_workspace:{node.name}:{algorithm or f'{images}_images'}"
            yield Site("convolution_workspace", name, insert, spares=node)


# --- gradients one after the other ---------------------------------------------------------------


def of_input(node: fx.Node) -> tuple[Any, ...]:
    """What follows gradient, weight and bias in the convolution that gives an input's gradient.

    It is transposed where the one of ``node`` (a call of convolution_backward) is not, and not
    where it is. Along each axis the result of a transposed one has
    (o - 1) s - 2 p + d (k - 1) + 1 + output_padding elements.
    """
    args: tuple[Any, ...] = node.args
    shapes = (fake(n).shape[2:] for n in args[:3])
    how = steps, pads, gaps = [[int(value) for value in values] for values in args[4:7]]
    transposed, groups = args[7], args[9]
    short = [
        0 if transposed else size - ((out - 1) * step - 2 * pad + gap * (kernel - 1) + 1)
        for out, size, kernel, step, pad, gap in zip(*shapes, *how, strict=True)
    ]
    return steps, pads, gaps, not transposed, short, groups


def _insert_split(node: fx.Node, used: Mapping[int, fx.Node], into: Target) -> StandIns:
    """``used`` are the results of a backward that are read, by their place."""
    old, add = into(node), into.behind(into(node))
    args: tuple[Any, ...] = old.args
    gradient, weight, mask = args[0], args[2], args[-1]
    call = add(_BACKWARD, *args[:-1], [False, *mask[1:]])
    others = sorted(used.keys() - {_INPUT})
    found = {used[place]: add(operator.getitem, call, place) for place in others}
    made = add(_FORWARD, gradient, weight, None, *of_input(node))
    return {**found, used[_INPUT]: laid_out_like(used[_INPUT], made, add)}


def _find_split(joint: JointGraph) -> Iterator[Site]:
    """Calls that compute the gradients of both input and weight of a plain convolution."""
    for node in joint.module.graph.nodes:
        if node.target is not _BACKWARD:
            continue
        used = {u.args[1]: u for u in node.users if u.target is operator.getitem and u.users}
        transposed, mask = node.args[7], node.args[10]
        both = mask[_INPUT] and mask[_WEIGHT] and {_INPUT, _WEIGHT} <= used.keys()
        sizes = [size for n in node.args[:3] for size in fake(n).shape]
        if both and not transposed and all(isinstance(size, int) for size in sizes):
            insert = partial(_insert_split, node, used)
            yield Site("split_gradients", f"split_gradients:{node.name}", insert)


RULES = SPLIT_GRADIENTS, CONVOLUTION_WORKSPACE = (
    Rule(
        "split_gradients",
        "convolution: the gradients of weight and input one after the other, not in one call",
        _find_split,
    ),
    Rule(
        "convolution_workspace",
        "convolution: a few images at a time, or by another algorithm, in less workspace",
        _find_less,
    ),
)
