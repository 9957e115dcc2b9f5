"""Verifying what prepares the joint graph, with nothing taken from the passes that do it.

These passes work in place. So what a graph is before a pass runs is kept: `BeforePass`. The graph
after it is right if it is the same, or by numbers for what each node computes, as is said in
docs/design/verification.md. What one pass may do beyond that is said by its `Rights`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat.compat.joint_graph import is_tangent, must_be_in_forward, mutated_input_of
from fxremat.errors import VerificationFailed
from fxremat.runtime import accumulated
from fxremat.verify.predicates import (
    computed_from,
    has_effect,
    is_mutating,
    is_put,
    results_of,
    root,
)
from fxremat.verify.sums import ReadSums, SumNumbering


@dataclass(frozen=True)
class Rights:
    """What a pass may do beside what leaves every number as it is."""

    merge: bool = False
    """Equal calls become one, and what nobody needs goes."""
    regroup: bool = False
    """What depends on a tangent is added up in another order."""
    clone: bool = False
    """The old content of inputs that the step writes is cloned; after it no other is read late."""
    give_up: bool = False
    """Calls say where gradients are given up."""


def written_inputs(graph: fx.Graph) -> frozenset[str]:
    """Names of the inputs that the step writes into: in the graph, or by a result, after it."""
    inputs = graph.find_nodes(op="placeholder")
    described = {n.meta["desc"]: n for n in inputs if n.meta.get("desc") is not None}
    targets = [n.args[0] for n in graph.nodes if is_mutating(n)]
    found = {root(target) for target in targets if isinstance(target, fx.Node)}
    for description in graph.output_node().meta.get("desc") or ():
        source = mutated_input_of(description)
        if source in described:
            found.add(described[source])
    return frozenset(node.name for node in found if node.op == "placeholder")


def _state(node: fx.Node) -> tuple[Any, ...]:
    """What a node is, but for what is noted of it; arguments are the other nodes themselves."""
    return node, node.name, node.op, node.target, node.args, node.kwargs


class BeforePass:
    """What was seen of a graph before a pass; `check` verifies the graph after it.

    Most passes change nothing in most graphs. So a graph is read only if it was changed.
    """

    def __init__(
        self, name: str, rights: Rights, graph: fx.Graph, *, num_forward_outputs: int
    ) -> None:
        self.name, self.rights, self.early = name, rights, num_forward_outputs
        self.seen = [(_state(node), dict(node.meta)) for node in graph.nodes]
        self.written = written_inputs(graph)
        self.numbering = SumNumbering(self.written, sums=rights.regroup, clones=rights.clone)

    def _is_as_before(self, graph: fx.Graph) -> bool:
        """Whether nothing is changed, and nothing but changes is to be checked."""
        if self.rights.clone and self.written:
            return False  # a clone may be missing
        return [*map(_state, graph.nodes)] == [state for state, _ in self.seen]

    def _graph_before(self) -> fx.Graph:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for (node, name, op, target, *given), meta in self.seen:
            args, kwargs = fx.map_arg(tuple(given), new.__getitem__)
            new[node] = graph.create_node(op, target, args, kwargs, name)
            new[node].meta = meta
        return graph

    def check(self, graph: fx.Graph) -> None:
        """Raise `VerificationFailed`, with the pass's name, where the graph is not right."""
        if self._is_as_before(graph):
            return
        before = self._graph_before()
        old = self._read(before)
        self._demand(written_inputs(graph) == self.written, "the step writes other inputs")
        new = self._read(graph)
        inputs = ([n.target for n in g.find_nodes(op="placeholder")] for g in (before, graph))
        self._demand(next(inputs) == next(inputs), "the inputs are others")
        needed = self._needed(before, old)
        self._once(old, new, needed)
        self._counts(old, new, needed)
        self._results(
            [_result(result, old) for result in results_of(before)],
            [_result(result, new) for result in results_of(graph)],
        )
        if self.rights.clone:
            self._late_reads(graph, new.late)
        self._given_up(graph, new.late)

    def _demand(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise VerificationFailed(f"pass {self.name}", otherwise)

    def _read(self, graph: fx.Graph) -> ReadSums:
        found = self.numbering.read(graph)
        assert isinstance(found, ReadSums)
        return found

    def _needed(self, graph: fx.Graph, found: ReadSums) -> frozenset[int]:
        """The numbers that a result, a write or an effect depends on, where others may go."""
        ends = [r for r in results_of(graph) if isinstance(r, fx.Node)]
        ends += [n for n in graph.nodes if is_mutating(n) or has_effect(n)]
        needed = computed_from(ends) if self.rights.merge else ()
        return frozenset(found.of[n] for n in needed if n in found.of)

    def _once(self, old: ReadSums, new: ReadSums, needed: frozenset[int]) -> None:
        """Random calls and writes."""
        before, after = (
            [(node.name, found.of[node]) for node in found.fixed] for found in (old, new)
        )
        left = set(after)
        for name, number in before:
            may_go = self.rights.merge and number not in needed
            kept = (name, number) in left
            self._demand(kept or may_go, f"{name}, which must run once, is gone or another")
        added = sorted(left.difference(before))
        self._demand(not added, f"calls that draw or write, and were not there: {added[:5]}")
        order = [one for one in before if one in left]
        self._demand(after == order, "calls that draw or write run in another order")

    def _counts(self, old: ReadSums, new: ReadSums, needed: frozenset[int]) -> None:
        """Calls of other libraries, and what may not run again."""
        for number, name in {**new.opaque, **old.opaque}.items():
            before, after = old.calls[number], new.calls[number]
            least = min(before, number in needed) if self.rights.merge else before
            times = f"{name} runs {after} times, and {before} times before"
            self._demand(least <= after <= before, times)
        for number, name in old.held.items():
            more = number not in old.free and new.calls[number] > old.calls[number]
            self._demand(not more, f"{name}, which may not run again, does")

    def _results(self, old: list[Any], new: list[Any]) -> None:
        self._demand(len(old) == len(new), "there are more results, or fewer")
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            half = "forward" if index < self.early else "backward"
            self._demand(one == other, f"result {index}, of the {half}, is computed differently")

    def _late_reads(self, graph: fx.Graph, after_tangents: set[fx.Node]) -> None:
        """What the backward reads of an input that the step writes."""
        ends = [r for r in results_of(graph)[: self.early] if isinstance(r, fx.Node)]
        ends += [n for n in graph.nodes if must_be_in_forward(n)]
        ends += [n for n in graph.nodes if has_effect(n) and n not in after_tangents]
        early = computed_from(ends)
        for node in graph.nodes:
            if node in early or node.op == "output" or is_mutating(node):
                continue
            for source in map(root, node.all_input_nodes):
                reads = source.op == "placeholder" and source.name in self.written
                self._demand(not reads, f"{node.name} reads {source.name} when it is overwritten")

    def _given_up(self, graph: fx.Graph, after_tangents: set[fx.Node]) -> None:
        calls = graph.find_nodes(op="call_function", target=accumulated)
        if not calls:
            return
        self._demand(self.rights.give_up, f"{calls[0].name} gives a gradient up")
        results = results_of(graph)
        owners = Counter(root(one) for one in results if isinstance(one, fx.Node))
        inputs = [n for n in graph.find_nodes(op="placeholder") if not is_tangent(n)]
        gradient_of = dict(zip(inputs, results[self.early :], strict=False))
        seen = set[fx.Node]()
        for call in calls:
            gradient, weight = call.args[:2]
            assert isinstance(gradient, fx.Node)
            assert isinstance(weight, fx.Node)
            owner = root(gradient)
            own = gradient_of.get(weight) is gradient and weight not in seen
            self._demand(own, f"{call.name} gives up what is not the gradient of {weight.name}")
            alone = owners[owner] == 1 and owner in after_tangents and not is_put(owner)
            self._demand(alone, f"{call.name} gives up memory that others have a part in")
            kept = weight.name not in self.written
            self._demand(kept, f"{call.name} is of {weight.name}, which the step writes")
            seen.add(weight)


def _result(result: Any, found: ReadSums) -> Any:
    """What is returned: its number, the last write into it, and the input whose memory it shows."""
    if not isinstance(result, fx.Node):
        return type(result).__name__, repr(result)
    owner = root(result)
    memory = str(owner.target) if owner.op == "placeholder" else None
    return found.of[result], found.written_into(result), memory
