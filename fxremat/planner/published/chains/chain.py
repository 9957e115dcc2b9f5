"""Chains of blocks: a forward part that can be cut where one value crosses, and its backward.

The forward part ends at the *turn*. It is cut between two ops wherever at most one evictable
value is written before and read after, within the forward part. Each backward op then belongs
to one block, in the reverse order of the blocks, such that it reads that block's values: Rotor's
heterogeneous chains (Beaumont et al., "Optimal checkpointing for heterogeneous chains",
arXiv 1911.13214, section 3), found in a graph of ops.

Real graphs keep to this nearly. A value that the backward of another block reads, too, is not
the chain's to free: it is *fixed*, held from its write to its last read. Where such reads come
before the backward of its own block, it is fixed so long only (`Block.early`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.indexed_problem import INPUT, IndexedProblem, build_model
from fxremat.planner.options import ProblemRefused


class NotAChain(ProblemRefused, ValueError):
    """The problem is no chain of forward and backward blocks."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the problem is not a chain of blocks: {reason}. "
            "Use the solver 'auto' or 'hrockmate', which take any problem."
        )


@dataclass(frozen=True)
class Block:
    """A forward segment and the backward ops that read its values, or no such ops.

    ``enters`` is the value that crosses into it, ``leaves`` the one that crosses out; None where
    nothing evictable does. ``local`` are the evictable values that it writes, ``leaves`` among
    them. ``early`` are local values that earlier backward ops read as well.
    """

    forward: range
    backward: range
    enters: int | None
    leaves: int | None
    local: frozenset[int]
    early: frozenset[int]

    @cached_property
    def reach(self) -> frozenset[int]:
        """What a schedule of the block may hold: its own values and the one that enters."""
        return self.local if self.enters is None else self.local | {self.enters}


@dataclass(frozen=True)
class Chain:
    """Blocks in forward order.

    ``cuts`` are the first ops of all blocks but the first. ``spans`` gives for every fixed value
    the ops, first and last, between which it is held. ``fixed[t]`` are the bytes of fixed values
    while op ``t`` runs for the first time, ``before[t]`` just before that or at the end.
    """

    model: IndexedProblem
    turn: int
    cuts: tuple[int, ...]
    blocks: tuple[Block, ...]
    spans: dict[int, tuple[int, int]]
    fixed: tuple[int, ...]
    before: tuple[int, ...]

    def merged(self, cuts: Iterable[int]) -> Chain:
        """The same chain with only some of the cuts."""
        return _build(self.model, self.turn, tuple(cuts))


def find_chain(problem: Problem) -> Chain:
    """The chain of the most trusted turn; raises `NotAChain` where there is none."""
    model = build_model(problem)
    failures = [NotAChain(f"it has {model.n} ops")]
    for turn in turns(model):
        try:
            chain = _build(model, turn, _cuts(model, turn))
            _refuse_one_large(model, chain.blocks)
            return chain
        except NotAChain as failure:
            failures.append(failure)
    raise failures[min(1, len(failures) - 1)]


# -- the turn and the cuts -------------------------------------------------------------------


def turns(model: IndexedProblem) -> tuple[int, ...]:
    """Ops that may be the last of the forward part, the most trusted first."""
    if model.n < 2:
        return ()
    ops = model.problem.ops
    forward = [k for k, op in enumerate(ops) if op.phase == "forward"]
    backward = [k for k, op in enumerate(ops) if op.phase == "backward"]
    again = [k for k, repeatable in enumerate(model.repeatable) if repeatable]
    guess = []
    if forward:
        # Updates of buffers belong to the forward, and may come last of all.
        guess.append(min([forward[-1], *(op - 1 for op in backward[:1] if op > forward[0])]))
    if again and again[-1] < model.n - 1:
        guess.append(again[-1])
    guess.append(_most_cuts(model))
    return tuple(dict.fromkeys(guess))


def _most_cuts(model: IndexedProblem) -> int:
    """The first op up to which the ops can be cut in most places.

    A backward op reads values from long ago, so the cuts before it are lost with it.
    """
    gain = [0] * (model.n + 1)
    for cut in range(1, model.n):
        alone, second = _readers_across(model, cut)
        gain[alone] += 1
        gain[second] -= 1
    return int(np.cumsum(gain)[: model.n].argmax())


def _readers_across(model: IndexedProblem, cut: int) -> tuple[int, int]:
    """The first op from ``cut`` on that reads a evictable value from before, and the first
    that makes these two values."""
    seen: set[int] = set()
    alone = model.n
    for op in range(cut, model.n):
        seen.update(v for v in model.reads[op] if model.writer[v] < cut and model.evictable(v))
        if seen and alone == model.n:
            alone = op
        if len(seen) > 1:
            return alone, op
    return alone, model.n


def last_reads(model: IndexedProblem, turn: int) -> dict[int, int]:
    """The last op of the forward part that reads each evictable value."""
    last: dict[int, int] = {}
    for op in range(turn + 1):
        last.update((value, op) for value in model.reads[op] if model.evictable(value))
    return last


def _cuts(model: IndexedProblem, turn: int) -> list[int]:
    """First ops of blocks: at most one evictable value from before is read from them on.

    Where that is the same value at several cuts the first is taken: what lies between them is
    a side branch, and belongs to the block that the value enters.
    """
    crossing: list[set[int]] = [set() for _ in range(turn + 1)]
    for value, op in last_reads(model, turn).items():
        for cut in range(model.writer[value] + 1, op + 1):
            crossing[cut].add(value)
    found: list[int] = []
    seen: set[int] = set()
    for cut in range(1, turn + 1):
        if len(crossing[cut]) <= 1 and not crossing[cut] & seen:
            found.append(cut)
            seen |= crossing[cut]
    if not found and turn:
        least = min(range(1, turn + 1), key=lambda cut: len(crossing[cut]))
        names = ", ".join(sorted(model.value_names[value] for value in crossing[least])[:4])
        op_name = model.problem.ops[least].name
        raise NotAChain(
            f"several values cross every cut of its forward part ({names} at {op_name})"
        )
    return found


# -- backward ops to blocks ------------------------------------------------------------------


@dataclass(frozen=True)
class _Segments:
    """The forward part, cut: the block that writes each evictable value, what enters each."""

    model: IndexedProblem
    turn: int
    starts: tuple[int, ...]
    home: dict[int, int]
    enters: tuple[int | None, ...]

    def may_read(self, value: int, block: int) -> bool:
        """Whether the value is one that the backward of the block has at hand."""
        return self.home[value] == block or self.enters[block] == value


def _segments(model: IndexedProblem, turn: int, starts: tuple[int, ...]) -> _Segments:
    block = np.searchsorted(starts, np.arange(turn + 1), side="right") - 1
    home = {
        value: int(block[op])
        for value, op in enumerate(model.writer)
        if op <= turn and model.evictable(value)
    }
    last = last_reads(model, turn)
    enters = [
        next((v for v, op in last.items() if model.writer[v] < start <= op), None)
        for start in starts
    ]
    return _Segments(model, turn, starts, home, tuple(enters))


def _owners(parts: _Segments) -> list[int]:
    """The block of each backward op: never rising, with the fewest bytes read out of place.

    Where several will do an op stays with the higher block, so that the next is needed late.
    """
    model, count = parts.model, len(parts.starts)
    entered = {value: block for block, value in enumerate(parts.enters) if value is not None}
    costs: list[npt.NDArray[np.float64]] = []
    for op in range(parts.turn + 1, model.n):
        cost = np.zeros(count)
        for value in model.reads[op]:
            if value in parts.home:
                cost += model.bytes[value]
                cost[parts.home[value]] -= model.bytes[value]
                if value in entered:
                    cost[entered[value]] -= model.bytes[value]
        costs.append(cost)
    return never_rising(costs, count)


def never_rising(costs: Sequence[npt.NDArray[np.float64]], count: int) -> list[int]:
    """One of ``count`` places for each row of costs, never a higher one than before, at least cost.

    Where several will do a row stays with the higher place.
    """
    best: list[npt.NDArray[np.float64]] = []
    from_above = np.zeros(count)
    for cost in costs:
        best.append(cost + from_above)
        from_above = np.minimum.accumulate(best[-1][::-1])[::-1]
    places: list[int] = []
    low = 0
    for row in reversed(best):
        low = count - 1 - int(row[low:][::-1].argmin())
        places.append(low)
    return places[::-1]


def _build(model: IndexedProblem, turn: int, cuts: Sequence[int]) -> Chain:
    parts = _segments(model, turn, (0, *cuts))
    owners = _owners(parts)
    read = {
        block
        for op, block in enumerate(owners, turn + 1)
        if any(value in parts.home for value in model.reads[op])
    }
    if not read or (len(read) < 2 and model.n > constants.FEW_OPS):
        raise NotAChain("its backward ops read the values of one forward segment only")
    return _assemble(parts, owners)


def _assemble(parts: _Segments, owners: Sequence[int]) -> Chain:
    model, count = parts.model, len(parts.starts)
    first_op = parts.turn + 1
    sizes = [owners.count(block) for block in reversed(range(count))]
    stops = list(accumulate(sizes, initial=first_op))
    backward = [range(start, stop) for start, stop in pairwise(stops)][::-1]
    fixed, early = _out_of_place(parts, owners, backward)
    blocks = []
    for block, (start, stop) in enumerate(pairwise((*parts.starts, first_op))):
        local = frozenset(v for v, home in parts.home.items() if home == block) - fixed
        enters = parts.enters[block]
        leaves = parts.enters[block + 1] if block + 1 < count else None
        blocks.append(
            Block(
                forward=range(start, stop),
                backward=backward[block],
                enters=None if enters in fixed else enters,
                leaves=None if leaves in fixed else leaves,
                local=local,
                early=local & early,
            )
        )
    spans = _spans(model, blocks)
    during, before = _profile(model, spans)
    return Chain(model, parts.turn, parts.starts[1:], tuple(blocks), spans, during, before)


def _refuse_one_large(model: IndexedProblem, blocks: Sequence[Block]) -> None:
    large = max(blocks, key=lambda block: len(block.forward) + len(block.backward))
    size = len(large.forward) + len(large.backward)
    if size > max(constants.FEW_OPS, model.n // 2):
        op, last = model.problem.ops[large.forward[0]].name, model.problem.ops[large.forward[-1]]
        raise NotAChain(f"one block, from {op} to {last.name}, has {size} of its {model.n} ops")


def _out_of_place(
    parts: _Segments, owners: Sequence[int], backward: Sequence[range]
) -> tuple[set[int], set[int]]:
    """Values that the chain may not free at all, and those not before their backward."""
    fixed: set[int] = set()
    early: set[int] = set()
    saved: set[int] = set()
    for op, block in enumerate(owners, parts.turn + 1):
        for value in set(parts.model.reads[op]) & parts.home.keys():
            saved.add(value)
            if not parts.may_read(value, block):
                (early if op < backward[parts.home[value]].start else fixed).add(value)
    wrong = fixed | early
    total, sizes = sum(parts.model.bytes[v] for v in saved), parts.model.bytes
    if sum(sizes[v] for v in wrong) > total / 2:
        worst = max(wrong, key=lambda v: (sizes[v], v))
        name = parts.model.value_names[worst]
        raise NotAChain(f"backward ops read {name} and others while another block's turn is on")
    return fixed, early - fixed


# -- what the chain does not free ------------------------------------------------------------


def _spans(model: IndexedProblem, blocks: Sequence[Block]) -> dict[int, tuple[int, int]]:
    """The ops between which each fixed value is held.

    What an op reads that may run again is held until the end of its block's backward.
    """
    local = frozenset().union(*(block.local for block in blocks))
    last = enumerate(zip(model.writer, model.last_reads, strict=True))
    stop = {value: max(0, *its) for value, its in last if value not in local}
    for block in blocks:
        for op in block.forward:
            if block.local.intersection(model.writes[op]):
                for value in stop.keys() & model.reads[op]:
                    stop[value] = max(stop[value], block.backward.stop - 1)
    return {
        value: (model.writer[value], model.n - 1 if model.is_output[value] else last)
        for value, last in stop.items()
    }


def _profile(
    model: IndexedProblem, spans: dict[int, tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of fixed values while each op runs for the first time, and just before."""
    change = [0] * (model.n + 2)
    begins = [0] * model.n
    for value, (start, stop) in spans.items():
        size = model.bytes[value]
        change[max(start, 0)] += size
        change[stop + 1] -= size
        if start != INPUT:
            begins[start] += size
    live = list(accumulate(change[: model.n + 1], initial=model.problem.resident_bytes))[1:]
    before = [now - new for now, new in zip(live, [*begins, 0], strict=True)]
    return tuple(live[: model.n]), tuple(before)
