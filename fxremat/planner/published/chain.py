"""Chains of blocks: a forward part cut where one value crosses, its backward, and what they take.

The forward part ends at the *turn*. It is cut between two ops wherever at most one evictable
value is written before and read after, within the forward part. Each backward op then belongs
to one block, in the reverse order of the blocks, such that it reads that block's values: Rotor's
heterogeneous chains (Beaumont et al., "Optimal checkpointing for heterogeneous chains",
arXiv 1911.13214, section 3), found in a graph of ops.

Real graphs keep to this nearly. A value that the backward of another block reads, too, is not
the chain's to free: it is *fixed*, held from its write to its last read. Where such reads come
before the backward of its own block, it is fixed so long only (`Block.early`).

An option of a block is the steps of its backward: its ops, and between them forward ops that run
again. Everything else follows from it: what must be held from the forward until then, and which
forward ops make that. The options generalise Rotor's single one, "store all" (Zhao et al.,
"Rockmate", ICML 2023, section 3: schedules of a block as options of the chain).

Bytes are of two kinds. Before the turn and while a block's backward runs it is known which
fixed values are there, so bytes are absolute. Forward ops that run again after the turn do so in
front of some block's backward, so their bytes are counted without the fixed values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import sub

import numpy as np

from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.indexed_problem import INPUT, IndexedProblem, live_bytes
from fxremat.planner.published.parts import Part, Steps, backwards, read_later
from fxremat.planner.solvers import ProblemRefused


class NotAChain(ProblemRefused, ValueError):
    """The problem is no chain of forward and backward blocks."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the problem is not a chain of blocks: {reason}. "
            "Use the solver 'auto' or 'hrockmate', which take any problem."
        )


@dataclass(frozen=True)
class Block(Part):
    """A forward segment and the backward ops that read its values, or no such ops.

    ``enters`` is the value that crosses into it, ``leaves`` the one that crosses out; None where
    nothing evictable does. ``local`` are the evictable values that it writes, ``leaves`` among
    them. ``early`` are local values that earlier backward ops read as well.
    """

    chain: Chain
    enters: int | None
    leaves: int | None
    early: frozenset[int]

    @property
    def marks(self) -> tuple[Set[int], ...]:
        """What enters and what leaves differ from other values."""
        return self.local, self.reach - self.local, self.left

    def stays(self, value: int) -> bool:
        """Whether the value is fixed and there after the block, too."""
        spans = self.chain.spans
        return value in spans and spans[value][1] > self.backward.stop - 1

    @cached_property
    def left(self) -> frozenset[int]:
        """The value that leaves, if any."""
        return frozenset() if self.leaves is None else frozenset((self.leaves,))

    @cached_property
    def reach(self) -> frozenset[int]:
        """What a schedule of the block may hold: its own values and the one that enters."""
        return self.local if self.enters is None else self.local | {self.enters}


def find_chain(problem: Problem) -> Chain:
    """The chain of the most trusted turn; raises `NotAChain` where there is none."""
    model = IndexedProblem(problem)
    failures = [NotAChain(f"it has {model.n} ops")]
    for turn in turns(model):
        try:
            chain = Chain(model, turn, _cuts(model, turn))
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
    cuts = ((*_readers_across(model, cut), 1) for cut in range(1, model.n))
    gain = live_bytes(cuts, model.n)
    return gain.index(max(gain))


def _readers_across(model: IndexedProblem, cut: int) -> tuple[int, int]:
    """The ops from ``cut`` on at which one evictable value from before is read, and then two."""
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
    ops = range(turn + 1)
    return {value: op for op in ops for value in model.reads[op] if model.evictable(value)}


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
        if len(crossing[cut]) <= 1 and seen.isdisjoint(crossing[cut]):
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


def block_of_each_op(model: IndexedProblem, turn: int, starts: Sequence[int]) -> list[int]:
    """The block of each op, where these are the first ops of the blocks of the forward part.

    That of the backward ops never rises, with the fewest bytes read out of place: of values that
    the forward of the block neither reads nor writes. Where several will do an op stays with the
    higher block, so that the next is needed late.
    """
    forward = (np.searchsorted(starts, np.arange(turn + 1), side="right") - 1).tolist()
    near: dict[int, set[int]] = {}
    for op, block in enumerate(forward):
        for value in (*model.reads[op], *model.writes[op]):
            if model.evictable(value):
                near.setdefault(value, set()).add(block)
    costs = np.zeros((model.n - turn - 1, len(starts)))
    from_above = np.zeros(len(starts))
    for cost, reads in zip(costs, model.reads[turn + 1 :], strict=True):
        for value in reads:
            for block in near.get(value, ()):
                cost[block] -= model.bytes[value]
        cost += from_above
        from_above = np.minimum.accumulate(cost[::-1])[::-1]
    backward, block = list[int](), 0
    for cost in costs[::-1]:
        block = len(starts) - 1 - int(cost[block:][::-1].argmin())
        backward.append(block)
    return [*forward, *backward[::-1]]


class Chain:
    """Blocks in forward order.

    ``cuts`` are the first ops of all blocks but the first. ``spans`` gives for every fixed value
    the ops, first and last, between which it is held. ``fixed[t]`` are the bytes of fixed values
    while op ``t`` runs for the first time, ``before[t]`` just before that or at the end.
    """

    def __init__(self, model: IndexedProblem, turn: int, cuts: Sequence[int]) -> None:
        """Cut a problem there; raises `NotAChain` where its backward does not follow the cuts."""
        self.model, self.turn, self.cuts = model, turn, cuts
        starts, first_op = (0, *cuts), turn + 1
        block_of = block_of_each_op(model, turn, starts)
        owners = block_of[first_op:]
        home = {
            value: block_of[op]
            for value, op in enumerate(model.writer)
            if op <= turn and model.evictable(value)
        }
        reads = enumerate(model.reads[first_op:])
        read = {owners[k] for k, values in reads if not home.keys().isdisjoint(values)}
        if not read or (len(read) < 2 and model.n > constants.FEW_OPS):
            raise NotAChain("its backward ops read the values of one forward segment only")
        last = last_reads(model, turn).items()
        enters = [next((v for v, op in last if model.writer[v] < s <= op), None) for s in starts]
        sizes = Counter(owners)
        stops = accumulate((sizes[k] for k in reversed(range(len(starts)))), initial=first_op)
        backward = [range(start, stop) for start, stop in pairwise(stops)][::-1]
        fixed, early = _out_of_place(model, home, enters, owners, backward)
        through = [None if value in fixed else value for value in (*enters, None)]
        local: list[set[int]] = [set() for _ in starts]
        for value in home.keys() - fixed:
            local[home[value]].add(value)
        self.blocks = tuple(
            Block(
                model,
                range(start, stop),
                backward[k],
                frozenset(local[k]),
                self,
                through[k],
                through[k + 1],
                frozenset(local[k] & early),
            )
            for k, (start, stop) in enumerate(pairwise((*starts, first_op)))
        )
        self.spans = _spans(model, self.blocks)
        count, size, spans = model.n + 1, model.bytes, self.spans.items()
        held = ((max(start, 0), stop + 1, size[v]) for v, (start, stop) in spans)
        new = ((start, start + 1, size[v]) for v, (start, _) in spans if start != INPUT)
        live = live_bytes([(0, count, model.problem.resident_bytes), *held], count)
        self.fixed, self.before = live[:-1], list(map(sub, live, live_bytes(new, count)))

    @property
    def store_all(self) -> list[list[Steps]]:
        """Rotor's only option of each block: nothing in it runs again."""
        return [[tuple(block.backward)] for block in self.blocks]


def _refuse_one_large(model: IndexedProblem, blocks: Sequence[Block]) -> None:
    sizes = [len(block.forward) + len(block.backward) for block in blocks]
    size, large = max(sizes), blocks[sizes.index(max(sizes))]
    if size > max(constants.FEW_OPS, model.n // 2):
        op, last = model.problem.ops[large.forward[0]].name, model.problem.ops[large.forward[-1]]
        raise NotAChain(f"one block, from {op} to {last.name}, has {size} of its {model.n} ops")


def _out_of_place(
    model: IndexedProblem, home: Mapping[int, int], enters: Sequence[int | None],
    owners: Sequence[int], backward: Sequence[range],
) -> tuple[set[int], set[int]]:  # fmt: skip
    """Values that the chain may not free at all, and those not before their backward."""
    first_op, sizes = model.n - len(owners), model.bytes
    saved, fixed, early = set[int](), set[int](), set[int]()
    for op, block in enumerate(owners, first_op):
        for value in home.keys() & model.reads[op]:
            saved.add(value)
            if block != home[value] and value != enters[block]:
                (early if op < backward[home[value]].start else fixed).add(value)
    wrong = fixed | early
    if model.size_of(wrong) > model.size_of(saved) / 2:
        name = model.value_names[max(wrong, key=lambda v: (sizes[v], v))]
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


# -- what the options of a block take --------------------------------------------------------


@dataclass(frozen=True)
class BlockRun:
    """Ops in order, and their bytes at the worst step.

    ``apart`` is without the value that enters the block, for when something else holds that;
    ``whole`` is with it, freed after its last read.
    """

    steps: tuple[int, ...]
    time: float
    apart: int
    whole: int


class OptionCost:
    """One option of one block.

    ``held`` are the bytes between forward and backward without the value that enters,
    ``held_first`` the same before the turn. ``needs_enters`` says whether the backward reads the
    value that enters, ``holds_leaves`` whether ``held`` counts the value that leaves. ``first``
    is the forward before the turn, ``again`` after it, ``last`` where no later block follows.
    """

    def __init__(self, block: Block, option: Steps) -> None:
        saved = read_later(block.model, option) & block.reach
        inside = saved & block.local
        self.held = block.model.size_of(inside)
        self.held_first = block.model.size_of(inside | block.early)
        self.needs_enters = bool(saved - inside)
        self.holds_leaves = bool(saved & block.left)
        self.first = _run(block, block.forward, inside | block.left | block.early)
        self.again = _again(block, inside | block.left)
        self.last = _again(block, inside)
        self.backward = _run(block, option, frozenset())


class BlockCost:
    """A block: bytes of the value that enters, and of the fixed values in front of its backward.

    ``unsaved`` is the forward that holds only the value that leaves, and what stays until the turn
    whatever the block holds.
    """

    def __init__(self, block: Block, options: Iterable[Steps]) -> None:
        self.enters = 0 if block.enters is None else block.model.bytes[block.enters]
        self.gap = block.chain.before[block.backward.start]
        self.unsaved = OptionCost(block, ())
        self.options = [OptionCost(block, option) for option in options]


def _again(block: Block, wanted: frozenset[int]) -> BlockRun:
    steps = block.model.makers(block.forward, wanted, block.local)
    return _run(block, steps, wanted, positioned=False)


def _run(
    block: Block, steps: Iterable[int], keep: frozenset[int], positioned: bool = True
) -> BlockRun:
    ops = tuple(steps)
    base = _base(block, ops) if positioned else [(0, False)] * len(ops)
    apart, whole = (_worst(block.chain, ops, its, keep, base) for its in (block.local, block.reach))
    return BlockRun(ops, block.model.time_of(ops), apart, whole)


Base = tuple[int, bool]
"""Bytes of the fixed values at a step, and whether its op runs there for the first time."""


def _base(block: Block, steps: Sequence[int]) -> list[Base]:
    """The base of each step, the last first; forward ops of a backward run before its next op."""
    backward, chain = bool(steps) and steps[-1] in block.backward, block.chain
    out: list[Base] = []
    ahead = chain.before[block.backward.start]
    for op in reversed(steps):
        if backward and op in block.forward:
            out.append((ahead, False))
        else:
            out.append((chain.fixed[op], True))
            ahead = chain.before[op]
    return out


def _worst(
    chain: Chain, steps: Steps, values: frozenset[int], keep: frozenset[int], base: Sequence[Base]
) -> int:
    """Bytes at the worst step: the given values, the workspace and the base."""
    model, spans, worst = chain.model, chain.spans, 0
    back = backwards(model, steps, values, keep)
    for (op, alive, gone), (fixed, first) in zip(back, base, strict=True):
        if model.inplace[op]:
            begins, ends = set(values.intersection(model.writes[op])), set(gone)
            if first:  # fixed values begin and end at first runs only
                begins.update(spans.keys() & model.writes[op])
                ends.update(v for v in model.reads[op] if v in spans and spans[v][1] == op)
            alive -= model.overtaken(op, ends, begins)
        worst = max(worst, fixed + alive)
    return worst
