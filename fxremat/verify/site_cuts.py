"""The part of a graph that a site of a variant is tried on: what is computed, and from what."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.verify.predicates import is_mutating, is_view


@dataclass(frozen=True)
class SiteCut:
    """What computes the stand-ins of one site.

    ``nodes`` are of the graph after, in its order; ``reads`` are nodes there that they read, with
    the node of the graph before that has the same value.
    """

    before: fx.Graph
    stand_ins: Mapping[fx.Node, fx.Node]
    nodes: Sequence[fx.Node]
    reads: Mapping[fx.Node, fx.Node]

    @property
    def wanted(self) -> set[fx.Node]:
        """Nodes of the graph before whose values are compared or read."""
        return {*self.stand_ins.values(), *self.reads.values()}


@dataclass(frozen=True)
class Part:
    """A site with the calls of the graph before that are run, and what these begin with."""

    cut: SiteCut
    computed: tuple[fx.Node, ...]
    frontier: tuple[fx.Node, ...]

    @staticmethod
    def of(cut: SiteCut, steps: int | None) -> Part:
        """It begins so many calls back from what is compared; None: at the inputs of the graph."""
        computed = _computed(cut, steps)
        return Part(cut, tuple(computed), tuple(_frontier(cut, computed)))

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All whose values exist when both sides run."""
        return (*self.computed, *self.frontier, *self.cut.nodes)


def _reach(start: Iterable[fx.Node], next_: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, stack = set[fx.Node](), list(start)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack.extend(next_(node))
    return found


def _inputs(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _computed(cut: SiteCut, steps: int | None) -> list[fx.Node]:
    """The nodes of the graph before that are run: between what is wanted, and some before it."""
    above = _reach(cut.wanted, _inputs)
    if steps is None:
        chosen = above
    else:
        chosen = above & _reach(cut.reads.values(), lambda n: n.users)
        chosen |= cut.wanted
        edge = set(chosen)
        for _ in range(steps):
            edge = {i for n in edge for i in n.all_input_nodes} - chosen
            chosen |= edge
    chosen = _whole(chosen)
    return [n for n in cut.before.nodes if n in chosen and _runs(n)]


def _whole(chosen: set[fx.Node]) -> set[fx.Node]:
    """With the calls whose items or views are among them: those are no random numbers."""
    found, stack = set(chosen), list(chosen)
    while stack:
        node = stack.pop()
        if node.target is operator.getitem or is_view(node):
            for source in node.all_input_nodes:
                if source not in found:
                    found.add(source)
                    stack.append(source)
    return found


def _runs(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_mutating(node)


def _frontier(cut: SiteCut, computed: Sequence[fx.Node]) -> list[fx.Node]:
    runs = set(computed)
    read = {i for n in computed for i in n.all_input_nodes} | cut.wanted
    return [n for n in cut.before.nodes if n in read and n not in runs]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, which may have several or none."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def digest(cut: SiteCut) -> str:
    """The same for sites that compute the same on values of the same form."""
    known: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        return f"%{known.setdefault(node, len(known))}"

    def form(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)}{value.stride()}{value.dtype}"
        return type(value).__name__

    lines = []
    near = Part.of(cut, 2)
    for node in (*near.frontier, *near.computed):
        what = (
            ""
            if node in near.frontier
            else f"{node.target}{fx.map_arg((node.args, node.kwargs), name)}"
        )
        lines.append(f"{name(node)} {what} {pytree.tree_map(form, node.meta.get('val'))}")
    for new, old in cut.reads.items():
        lines.append(f"{name(new)} is {name(old)}")
    for node in cut.nodes:
        what = f"{node.target}{fx.map_arg((node.args, node.kwargs), name)}"
        lines.append(f"{name(node)} {what}")
    for new, old in cut.stand_ins.items():
        lines.append(f"{name(new)} for {name(old)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
