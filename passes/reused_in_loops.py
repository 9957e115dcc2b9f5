"""Which elementwise results Inductor keeps between two loops that it cannot fuse.

A loop that needs the result of a reduction can only follow it. Where both read an elementwise
result, it is computed twice, or written by the first of them. Inductor writes it if several nodes
read it and it is dear: it takes more than a few reads, or, on the CPU, a heavy function::

    sigmoid_grad   = f(x, grad, ...)                         6 reads
    sum_1          = sum(sigmoid_grad, [2, 3])               the first loop
    sum_2          = sum(sum_1.view(groups), -1)             sums of sums: nothing can follow it
    grad_x         = sigmoid_grad * a - sum_2 * b            the second loop

A reduction over the last dimensions can share its outer loop with what follows, as in a softmax
or a layer norm: there, nothing is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.compat.sizes import size_bound
from fxremat.passes.joint_graph import is_tensor, is_view
from fxremat.passes.nodes import packet_of

_ATEN = torch.ops.aten
HEAVY = frozenset(
    {_ATEN.exp, _ATEN.log, _ATEN.log10, _ATEN.log1p, _ATEN.log2, _ATEN.sigmoid, _ATEN.tanh}
)
"""What Inductor does not compute twice on the CPU."""
MOST_READS = 4
"""What Inductor reads again rather than write a result (``realize_reads_threshold``)."""


@dataclass(frozen=True)
class _Inlined:
    """What a loop does that computes a result: what it reads, and whether it is heavy."""

    reads: frozenset[fx.Node] = frozenset()
    heavy: bool = False

    def is_dear(self, node: fx.Node) -> bool:
        """Whether Inductor writes such a result where several nodes read it."""
        on_cpu = node.meta["val"].device.type == "cpu"
        return len(node.users) > 1 and ((self.heavy and on_cpu) or len(self.reads) > MOST_READS)


@dataclass
class ReusedInLoops:
    """The rule above; ``group_of`` names the fusion group of a node, None of what is no loop's.

    ``written`` is what is written anyhow, ``is_reduction`` says of which loops that is the end.
    """

    nodes: Collection[fx.Node]
    written: Collection[fx.Node]
    group_of: Mapping[fx.Node, object]
    is_reduction: Callable[[fx.Node], bool]
    inlined: dict[fx.Node, _Inlined] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    """How many reductions, that nothing can share a loop with, come before a node in its group."""
    widest: dict[fx.Node, int] = field(default_factory=dict)
    """The most elements of what a node is computed from in its group."""

    def find(self) -> set[fx.Node]:
        for node in self.nodes:
            if self._is_in_loop(node):
                self._read(node)
        kept = set[fx.Node]()
        stages: dict[fx.Node, set[int]] = {}
        for node in reversed(self.nodes):  # type: ignore[call-overload]
            if not self._is_in_loop(node):
                continue
            stages[node] = self._stages_of_users(node, stages, kept)
            dear = node in self.inlined and self.inlined[node].is_dear(node)
            if dear and len(stages[node]) > 1:
                kept.add(node)
        return kept

    def _is_in_loop(self, node: fx.Node) -> bool:
        return node.op == "call_function" and self.group_of.get(node) is not None

    def _made_in(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a loop reads to compute the node; where it reads a view, what that is of."""
        for source in node.all_input_nodes:
            yield from self._made_in(source) if is_view(source) else (source,)

    def _read(self, node: fx.Node) -> None:
        reads, heavy = set[fx.Node](), packet_of(node) in HEAVY
        stage, widest = 0, _numel(node)
        for source in self._made_in(node):
            if not is_tensor(source):
                continue
            loop = source.all_input_nodes[0] if source.target is operator.getitem else source
            if self.group_of.get(loop) == self.group_of[node] and loop in self.stage:
                stage = max(stage, self.stage[loop] + self._parts(loop))
                widest = max(widest, self.widest[loop])
            known = self.inlined.get(source)
            if known is None or source in self.written:
                reads.add(source)
            else:
                reads |= known.reads
                heavy = heavy or known.heavy
        self.stage[node], self.widest[node] = stage, widest
        if not self.is_reduction(node):
            self.inlined[node] = _Inlined(frozenset(reads), heavy)

    def _parts(self, node: fx.Node) -> bool:
        """Whether what reads the node cannot be in the loop that computes it."""
        if not self.is_reduction(node):
            return False
        source = next((i for i in node.all_input_nodes if is_tensor(i)), None)
        if source is None:
            return False
        shape = [size_bound(size) for size in source.meta["val"].shape]
        of_sums = prod(shape) < self.widest[node]
        return of_sums or not _is_of_last_dimensions(node, shape)

    def _stages_of_users(
        self, node: fx.Node, stages: Mapping[fx.Node, set[int]], kept: Collection[fx.Node]
    ) -> set[int]:
        found = set[int]()
        stack = list(node.users)
        while stack:
            user = stack.pop()
            if is_view(user):
                stack.extend(user.users)
            elif self.group_of.get(user) != self.group_of[node]:
                continue
            elif user in self.written or user in kept or self.is_reduction(user):
                found.add(self.stage[user])
            else:
                found |= stages.get(user, set())
        return found


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):  # a reduction with several results
        return 0
    return prod(size_bound(size) for size in value.shape)


def _is_of_last_dimensions(node: fx.Node, shape: list[int]) -> bool:
    """Whether a reduction leaves rows: what is reduced comes last, and there is more than one."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or given == []:
        return False
    dims = {d % len(shape) for d in (given if isinstance(given, (list, tuple)) else [given])}
    last = [d for d in range(len(shape)) if shape[d] > 1 or d in dims][-len(dims) :]
    rows = prod(size for d, size in enumerate(shape) if d not in dims)
    return set(last) == dims and rows > 1
