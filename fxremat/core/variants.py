"""Taking variants: from a problem with several variants of some ops to one with one of each.

What is left is a plain problem: a schedule is one of its steps, and whoever replays or verifies a
plan with variants does so on the problem that is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import Any

from fxremat.core.problem import Change, InvalidProblem, Op, Problem, Variant, validate


def exclude(one: Variant, other: Variant) -> bool:
    """Whether two variants cannot be taken together: they replace the same read or output."""
    mine, theirs = _replaced(one), _replaced(other)
    return bool(mine & theirs)


def _replaced(variant: Variant) -> set[tuple[str, str]]:
    out = {("", old) for old, _ in variant.outputs}
    return out | {(change.op, old) for change in variant.changes for old in change.drops}


def take(problem: Problem, names: Iterable[str]) -> Problem:
    """The problem in which the named variants are taken and no others are left.

    Their ops join, those that they change read something else, and what nobody needs any more is
    gone: ops whose results lead to no output, and values that no op touches. The order is the base
    order; an op of an variant comes right after what it reads if it belongs to the forward,
    else right before the first op that reads it. One of the backward that no op reads, whose
    results are outputs, comes as early as can be where it lets go of more than it writes, else at
    the end. KeyError for a name that there is not;
    `InvalidProblem` where two of them exclude each other.
    """
    by_name = {one.name: one for one in problem.variants}
    taken = [by_name[name] for name in dict.fromkeys(names)]
    for index, one in enumerate(taken):
        for other in taken[:index]:
            if exclude(one, other):
                raise InvalidProblem(f"variants: {one.name!r} and {other.name!r} exclude")
    stand_in = {old: new for one in taken for old, new in one.outputs}
    outputs = tuple(dict.fromkeys(stand_in.get(name, name) for name in problem.outputs))
    new = [op for one in taken for op in one.ops]
    wanted = (*outputs, *problem.host)
    ops = problem.ops
    if taken:
        ops = _needed(problem, _changed(problem.ops, taken), new, wanted)
    touched = {name for op in ops for name in (*op.reads, *op.writes)}
    touched |= {*problem.inputs, *problem.resident, *outputs, *problem.host}
    values = tuple(value for value in problem.values if value.name in touched)
    left = replace(problem, values=values, ops=ops, outputs=outputs, variants=())
    return validate(left) if taken else left


def _changed(ops: Sequence[Op], taken: Sequence[Variant]) -> list[Op]:
    """The ops of the base order, each with all the changes to it."""
    changes: dict[str, list[Change]] = {}
    for one in taken:
        for change in one.changes:
            changes.setdefault(change.op, []).append(change)
    return [_change(op, changes[op.name]) if op.name in changes else op for op in ops]


def _change(op: Op, changes: Iterable[Change]) -> Op:
    for change in changes:
        left = [name for name in op.reads if name not in change.drops]
        reads = tuple(dict.fromkeys([*left, *change.adds]))
        op = replace(
            op,
            reads=reads,
            time_us=max(0.0, op.time_us + change.time_us),
            workspace_bytes=max(0, op.workspace_bytes + change.workspace_bytes),
            inplace=tuple(pair for pair in (*op.inplace, *change.inplace) if pair[0] in reads),
        )
    return op


def _needed(
    problem: Problem, base: Sequence[Op], new: Sequence[Op], outputs: Sequence[str]
) -> tuple[Op, ...]:
    """The ops that lead to an output, or that are there for what they do, in a valid order."""
    everything = [*base, *new]
    writer = {name: op for op in everything for name in op.writes}
    stack = [writer[name] for name in outputs if name in writer]
    stack += [op for op in base if not op.writes]
    found: set[str] = set()
    while stack:
        op = stack.pop()
        if op.name not in found:
            found.add(op.name)
            stack.extend(writer[name] for name in op.reads if name in writer)
    kept = {*problem.inputs, *problem.resident, *outputs}
    order = _ordered(problem, base, new, kept)
    return tuple(op for op in order if op.name in found)


def _ordered(
    problem: Problem, base: Sequence[Op], new: Sequence[Op], kept: Set[str]
) -> tuple[Op, ...]:
    """Base order as far as what is read allows, with the new ops where they belong.

    ``base`` are the ops of the problem, each with its changes. All values but those ``kept`` die
    when nobody reads them any more.
    """
    sizes = problem.bytes_of
    ops = [*base, *new]
    writer = {name: op.name for op in ops for name in op.writes}
    read_anew = [op for op, before in zip(base, problem.ops, strict=True) if op is not before]
    place = {op.name: float(index) for index, op in enumerate(base)}
    last_forward = max((place[op.name] for op in base if op.phase == "forward"), default=-1.0)
    for op in new:
        sources = (place.get(writer[r], 0.0) for r in op.reads if r in writer)
        place[op.name] = max(sources, default=-1.0) + 0.5
    made = {name for op in new for name in op.writes}
    readers_of: dict[str, list[str]] = {}
    later = (*read_anew, *new)
    for op in later:
        for name in made.intersection(op.reads):
            readers_of.setdefault(name, []).append(op.name)
    for op in reversed(new):
        if op.phase != "forward":
            readers = [place[reader] for name in op.writes for reader in readers_of.get(name, ())]
            freed = sum(sizes[name] for name in op.reads if name not in kept)
            held = sum(sizes[name] for name in op.writes)
            if readers:
                place[op.name] = min(readers) - 0.5 / (len(new) + 1)
            elif freed and freed >= held:
                place[op.name] = max(place[op.name], last_forward + 0.5)
            else:
                place[op.name] = float(len(base))
    if any(place[writer[r]] >= place[op.name] for op in later for r in op.reads if r in writer):
        return _sorted(ops, writer, place)
    # Nearly always. This gives the same: of what has one place, that comes first which can.
    ranks: dict[str, tuple[Any, ...]] = {op.name: (place[op.name],) for op in base}
    for number, op in enumerate(sorted(later, key=lambda op: place[op.name])):
        before = [ranks[writer[r]] for r in op.reads if r in writer]
        if before:
            ranks[op.name] = place[op.name], max(before), op.name
        ranks.setdefault(op.name, (place[op.name], (inf, number)))
    return tuple(sorted(ops, key=lambda op: ranks[op.name]))


def _sorted(
    ops: Sequence[Op], writer: Mapping[str, str], place: Mapping[str, float]
) -> tuple[Op, ...]:
    """Topological order in which, of the ops that may come next, that of least place does."""
    by_name = {op.name: op for op in ops}
    waits = {op.name: {writer[r] for r in op.reads if r in writer} for op in ops}
    wanted: dict[str, list[str]] = {}
    for name, sources in waits.items():
        for source in sources:
            wanted.setdefault(source, []).append(name)
    ready = [(place[name], index, name) for index, (name, s) in enumerate(waits.items()) if not s]
    heapq.heapify(ready)
    order: list[Op] = []
    while ready:
        _, _, name = heapq.heappop(ready)
        order.append(by_name[name])
        for reader in wanted.get(name, ()):
            waits[reader].discard(name)
            if not waits[reader]:
                heapq.heappush(ready, (place[reader], len(order), reader))
    if len(order) < len(ops):
        stuck = sorted(name for name, sources in waits.items() if sources)
        raise InvalidProblem(f"variants: ops wait for each other: {stuck[:5]}")
    return tuple(order)


def run_once(problem: Problem) -> Problem:
    """The problem in which no op, of whatever variant, may run again."""
    others = tuple(replace(one, ops=_not_again(one.ops)) for one in problem.variants)
    return replace(problem, ops=_not_again(problem.ops), variants=others)


def _not_again(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(replace(op, repeatable=False) for op in ops)
