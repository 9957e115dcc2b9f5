"""Convolutions, forward and backward, in less workspace: in parts, or by another algorithm.

    x, w ── convolution ── y                        before: workspace for all images
    x, w ── convolution of n images at a time ── y  after: for n of them

Each site is a call in one of these forms; the operators are those of
`fxremat.runtime.chunks.convolutions`. MONeT (arXiv 2010.14501)
chooses among all of cuDNN's algorithms by time and workspace. torch lets nobody name one, so the
choice is among parts of the batch, and on CUDA among the algorithms that cuDNN's flags ask for; the
workspace of every one is measured.
Results agree up to rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxremat.core.constants import IMAGE_PARTS
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call, fake
from fxremat.passes.variants.rule import Rule, Site, StandIns
from fxremat.runtime.chunks import convolutions

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class _InLess:
    """A call of a convolution, ``images`` at a time, by an algorithm."""

    call: fx.Node
    images: int
    algorithm: str

    def insert(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        old = copies[self.call]
        args = (*old.args, self.images, self.algorithm)
        with graph.inserting_before(old.next):
            if self.call.target is _FORWARD:
                return {old: add_call(graph, convolutions.CONVOLUTION, args, old)}
            new = add_call(graph, convolutions.CONVOLUTION_BACKWARD, args, old)
            items = [copies[user] for user in self.call.users]
            return {
                item: add_call(graph, operator.getitem, (new, item.args[1]), item) for item in items
            }


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


def _is_known(call: fx.Node) -> bool:
    """Whether all sizes are numbers above 0, and all results of a backward are items of it."""
    if call.target is _BACKWARD and any(user.target is not operator.getitem for user in call.users):
        return False
    sizes = [size for node in call.all_input_nodes for size in fake(node).shape]
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _find(joint: JointGraph) -> Iterator[Site]:
    for node in joint.module.graph.nodes:
        if node.target not in (_FORWARD, _BACKWARD) or not _is_known(node):
            continue
        for images, algorithm in _ways(node):
            form = _InLess(node, images, algorithm)
            name = f"convolution_workspace:{node.name}:{algorithm or f'{images}_images'}"
            yield Site("convolution_workspace", name, form.insert, spares=node)


RULES = (
    Rule(
        "convolution_workspace",
        "convolution: a few images at a time, or by another algorithm, in less workspace",
        _find,
    ),
)
