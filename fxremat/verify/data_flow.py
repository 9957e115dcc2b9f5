"""Verifying a rewritten joint graph by its data flow, with nothing taken from the rewriting.

What makes a graph, or its two halves, right is said in docs/design/verification.md. Every node gets
a number for what it computes; a call that may not run again has one of its own for each node. A
graph input that is written into counts as another argument from then on. Calls that only wait, or
say that something has arrived, compute nothing. A value that has been to host memory and back has
the number it had before.

Forward and backward, as they were cut, are read with the value numbers of the whole graph; what the
backward is given has, by its name, the number that the forward returned it with. Layout and kernels
of a call of ``rows`` are no part of what it computes; its results have to lie as the operator says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from fxremat import runtime
from fxremat.compat.joint_graph import is_tangent
from fxremat.compat.tensors import fake_mode_of
from fxremat.errors import VerificationFailed
from fxremat.runtime import accumulated, arrived, settle
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Ref, parse
from fxremat.verify.predicates import (
    forms_of,
    is_fetch,
    is_mutating,
    is_put,
    is_repeatable,
    is_tensor,
    is_view,
    results_of,
    root,
    with_nodes_as,
)

_MOVES = frozenset({runtime.to_host, runtime.to_device})
_COPY_WAITS = frozenset({runtime.wait_host, runtime.wait_device})
_WAITS = _COPY_WAITS | {settle, arrived, accumulated}


@dataclass
class ReadGraph:
    """What one graph computes: numbers, calls that run only once, and what was last written."""

    of: dict[fx.Node, int] = field(default_factory=dict)
    once: list[str] = field(default_factory=list)
    written: dict[fx.Node, int] = field(default_factory=dict)

    def number(self, result: Any) -> Any:
        """That of a node; what is no node stands for itself."""
        return self.of[result] if isinstance(result, fx.Node) else result

    def written_into(self, node: fx.Node) -> int | None:
        """The last write into the memory that a node shows, None where there was none."""
        return self.written.get(root(node)) if self.written else None


class Numbering:
    """Value numbers, shared by the graphs that are compared."""

    waits: frozenset[Any] = _WAITS
    """Calls that compute nothing, and say that something has arrived."""
    reading: type[ReadGraph] = ReadGraph
    """What a reading gives."""

    def __init__(self, mutated: frozenset[str]) -> None:
        self.mutated = mutated
        self.numbers: dict[Any, int] = {}

    def number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def only_moves(self, node: fx.Node) -> bool:
        """Whether the call gives what it was given, elsewhere."""
        return node.target in _MOVES or is_fetch(node) or is_put(node)

    def may_repeat(self, node: fx.Node, mutated: frozenset[fx.Node]) -> bool:
        """Whether a second call like this one is none too many."""
        return is_repeatable(node, mutated)

    def read(
        self, graph: fx.Graph, given: Mapping[fx.Node, tuple[int, int | None]] | None = None
    ) -> ReadGraph:
        """Number every node; ``given`` are inputs whose number, and last write, are known."""
        found, known = self.reading(), given or {}
        mutated = frozenset(
            n for n in graph.nodes if n.op == "placeholder" and n.name in self.mutated
        )
        for node in graph.nodes:
            if node in known:
                found.of[node], last = known[node]
                if last is not None:
                    found.written[node] = last
            elif node.op in ("placeholder", "get_attr"):
                found.of[node] = self.number((node.op, str(node.target)))
            elif node.target in self.waits:
                found.of[node] = self.number(("wait", node.name))
            elif self.only_moves(node):
                found.of[node] = found.of[node.args[0]]
            elif node.target is operator.getitem and node.args[0].target is ROWS:
                found.of[node] = self.result_of_rows(node.args[0], node.args[1], found)
            elif node.op == "call_function":
                self.call(node, found, mutated)
                if is_mutating(node) and isinstance(node.args[0], fx.Node):
                    found.written[root(node.args[0])] = found.of[node]
        return found

    def result_of_rows(self, call: fx.Node, place: int, found: ReadGraph) -> int:
        """The number of one result of a call of ``rows``, by the instructions that it comes from.

        So it has the same one where the call gives fewer results.
        """
        given: Any = call.args
        rows, whole, text, *sizes = given
        program = parse(text)
        inputs = [self.arguments(one, found) for one in (*rows, *whole)]
        of = [self.number(("input", one)) for one in inputs]

        def numbered(one: Any) -> Any:
            return ("value", of[one.number]) if isinstance(one, Ref) else one

        for one in program.loop:  # each reads what stands before it
            read = map_aggregate((one.args, dict(one.kwargs)), numbered)
            meant = (one.op, repr(read), one.kind, one.row_shape, one.dtype)
            of.append(self.number(("instruction", *meant)))
        ignored: Any = program.ignored
        if ignored is not None:
            ignored = (ignored.label, ignored.number, ignored.inputs, ignored.results[place])
        return self.number((ROWS, of[program.results[place]], *inputs, ignored, *sizes))

    def call(self, node: fx.Node, found: ReadGraph, mutated: frozenset[fx.Node]) -> None:
        args = self.arguments((node.args, _meant(node)), found)
        if is_view(node) or self.may_repeat(node, mutated):
            found.of[node] = self.number((node.target, args))
        else:
            found.once.append(node.name)
            found.of[node] = self.number((node.target, args, node.name))

    def arguments(self, argument: Any, found: ReadGraph) -> Any:
        """What a call is given, with the numbers of nodes in their place."""

        def number(source: fx.Node) -> Any:
            return "node", found.of[source], found.written_into(source)

        return with_nodes_as(argument, number)


def _meant(node: fx.Node) -> dict[str, Any]:
    """The named arguments, but for those that say how ``rows`` runs, not what it gives."""
    how = ("fused", "channels_last") if node.target is ROWS else ()
    return {key: value for key, value in node.kwargs.items() if key not in how}


def check_waits(graph: fx.Graph) -> None:
    """Raise `VerificationFailed` where a transfer is used too early, or a gradient too late.

    Until it is waited for, nothing but a transfer and its wait may use what a transfer fills. From
    where a gradient has arrived on, an optimizer may step: the weight may change, and the
    gradient's memory is not there any more. The latter holds for gradients that are added, too.
    """
    filling, gone = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        read = set(map(root, node.all_input_nodes))
        shows = node.op == "output" or is_view(node)
        if node.target in _COPY_WAITS:
            filling.discard(node.args[0])
        elif node.target not in _MOVES and not shows and (early := filling & read):
            what = f"{node.name} reads {next(iter(early)).name} before it has arrived"
            raise VerificationFailed("transfers", what)
        if node.target is not settle and not shows and (late := gone & read):
            what = f"{node.name} uses {next(iter(late)).name} after it was given away"
            raise VerificationFailed("transfers", what)
        if node.target in _MOVES:
            filling.add(node)
        if node.target is arrived:
            gone.update(node.args[:2])
        if node.target is accumulated:
            gone.add(root(node.args[0]))
    if filling:
        names = sorted(node.name for node in filling)[:5]
        raise VerificationFailed("transfers", f"never waited for: {names}")


def check_data_flow(original: fx.Graph, rewritten: fx.Graph, mutated: Iterable[str]) -> None:
    """Raise `VerificationFailed` unless both graphs compute the same results."""
    numbering = Numbering(frozenset(mutated))
    before, after = numbering.read(original), numbering.read(rewritten)
    _same_calls("run once", before.once, after.once)
    pairs = zip(results_of(original), results_of(rewritten), strict=True)
    for index, (old, new) in enumerate(pairs):
        if before.number(old) != after.number(new):
            raise VerificationFailed("data flow", f"result {index} is computed differently")


def _same_calls(what: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Raise `VerificationFailed` unless the calls that run only once are the same."""
    if sorted(before) != sorted(after):
        changed = sorted({*before} ^ {*after}) or [*after]
        raise VerificationFailed(what, f"calls that must run exactly once: {changed[:5]}")


def _runs(graph: fx.Graph) -> set[str]:
    """Names of the calls that compute a tensor."""
    return {
        n.name
        for n in graph.nodes
        if n.op == "call_function" and (is_tensor(n) or n.target in _WAITS) and not is_view(n)
    }


def check_split(backward: fx.Graph, saved: Iterable[str], forward: fx.Graph) -> None:
    """Raise `VerificationFailed` where the backward reads what was not declared as saved.

    Also where a node of the whole graph is run in both halves: then something that the backward
    reads was not saved, and torch ran it a second time.
    """
    twice = _runs(backward) & _runs(forward)
    if twice:
        raise VerificationFailed("saved values", f"run in both halves: {sorted(twice)[:5]}")
    allowed = set(saved)
    for node in backward.nodes:
        known = "tangents" in node.name or node.name in allowed or not is_tensor(node)
        if node.op == "placeholder" and not known and node.users:
            raise VerificationFailed("saved values", f"the backward reads {node.name}")


def check_halves(
    joint: fx.Graph,
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    num_forward_outputs: int,
    mutated: Iterable[str],
) -> None:
    """Raise `VerificationFailed` unless the halves together compute what the graph does.

    ``joint`` is the graph that was cut; ``mutated`` are names of its inputs that the step writes.
    """
    numbering = Numbering(frozenset(mutated))
    whole = numbering.read(joint)
    first = numbering.read(forward)
    returned = results_of(forward)
    second = numbering.read(backward, _given(forward, returned, backward, first))
    expected = [whole.number(result) for result in results_of(joint)]
    found = [first.number(result) for result in returned[:num_forward_outputs]]
    found += [second.number(result) for result in results_of(backward)]
    if len(expected) != len(found):
        raise VerificationFailed("halves", "there are more results, or fewer")
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            half = "forward" if index < num_forward_outputs else "backward"
            raise VerificationFailed("halves", f"result {index}, of the {half}, is another")
    _same_calls("halves", whole.once, [*first.once, *second.once])
    check_rows(forward)
    check_rows(backward)


def _given(
    forward: fx.Graph, returned: list[Any], backward: fx.Graph, first: ReadGraph
) -> dict[fx.Node, tuple[int, int | None]]:
    """What the backward starts with, and what was last written into it."""
    there = {node.name: node for node in returned if isinstance(node, fx.Node)}
    known = {}
    for node in backward.nodes:
        if node.op != "placeholder" or is_tangent(node):
            continue
        source = there.get(node.name)
        if source is not None:
            known[node] = first.of[source], first.written_into(source)
        elif node.users and is_tensor(node):
            raise VerificationFailed("halves", f"the forward does not return {node.name}")
    return known


def check_rows(graph: fx.Graph) -> None:
    """Raise `VerificationFailed` where results of a call of ``rows`` lie in memory otherwise.

    Its fake kernel is run again on the call as it stands, and compared with what the graph notes.
    """
    for node in graph.find_nodes(op="call_function", target=ROWS):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with fake_mode_of(graph):
            made = ROWS(*args, **kwargs)
        items = [n for n in node.users if n.op == "call_function" and isinstance(n.args[1], int)]
        for one, value in (node, made), *((item, made[item.args[1]]) for item in items):
            if forms_of(one.meta["val"]) != forms_of(value):
                what = f"{one.name} does not lie as its graph says"
                raise VerificationFailed("row programmes", what)
