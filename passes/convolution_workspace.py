"""Convolutions, forward and backward, in less workspace: in parts, or by another algorithm.

    x, w ── convolution ── y                        before: workspace for all images
    x, w ── convolution of n images at a time ── y  after: for n of them

Each site is a call in one of these forms; the operators are those of
`fxremat.runtime.convolutions`. MONeT (arXiv 2010.14501, section 4.3) chooses among all of cuDNN's
algorithms by time and workspace. torch lets nobody name one, so the choice is among parts of the
batch, and on CUDA among the algorithms that cuDNN's flags ask for; the workspace of every one is
measured. Results agree up to rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.rule import Rule, Site, StandIns, add_call, fake
from fxremat.runtime import convolutions

_ATEN = torch.ops.aten
_FORMS: dict[object, Any] = {
    _ATEN.convolution.default: convolutions.CONVOLUTION,
    _ATEN.convolution_backward.default: convolutions.CONVOLUTION_BACKWARD,
}
PARTS = (4, 16)
"""Into how many parts a batch may go: fewer forms to choose from than there are images."""


@dataclass(frozen=True)
class _InLess:
    """A call of a convolution, ``images`` at a time, by an algorithm."""

    call: fx.Node
    images: int
    algorithm: str

    def insert(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        """The operator beside the call, and an item beside each of the call's."""
        old = copies[self.call]
        with graph.inserting_before(old.next):
            args = (*old.args, self.images, self.algorithm)
            new = add_call(graph, _FORMS[self.call.target], args, old)
            if self.call.target is _ATEN.convolution.default:
                return {old: new}
            items = [copies[user] for user in self.call.users]
            return {
                item: add_call(graph, operator.getitem, (new, item.args[1]), item) for item in items
            }


def _ways(call: fx.Node) -> Iterator[tuple[int, str]]:
    """Images at a time, and the algorithm."""
    given = fake(call.args[call.target is _ATEN.convolution_backward.default])  # type: ignore[arg-type]
    count = given.shape[0]
    for images in dict.fromkeys(-(-count // parts) for parts in PARTS):
        if images < count:
            yield images, ""
    if given.device.type == "cuda":
        yield count, "native"
        if call.target is _ATEN.convolution_backward.default:
            yield count, "deterministic"


def _is_known(call: fx.Node) -> bool:
    """Whether all sizes are numbers, there is an image, and every result is an item."""
    if not all(user.target is operator.getitem for user in call.users) and (
        call.target is _ATEN.convolution_backward.default
    ):
        return False
    tensors = [fake(node) for node in call.all_input_nodes]
    sizes = [size for tensor in tensors for size in tensor.shape]
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _find(joint: JointGraph) -> Iterator[Site]:
    for node in joint.module.graph.nodes:
        if node.target in _FORMS and _is_known(node):
            for images, algorithm in _ways(node):
                form = _InLess(node, images, algorithm)
                how = f"{algorithm or 'parts'}_{images}"
                name = f"convolution_workspace:{node.name}:{how}"
                yield Site("convolution_workspace", name, form.insert, spares=node)


RULES = (
    Rule(
        "convolution_workspace",
        "convolution: a few images at a time, or by another algorithm, in less workspace",
        _find,
    ),
)
