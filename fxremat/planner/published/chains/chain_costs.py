"""What the ways of running a block of a chain take: time, bytes held, bytes at the worst step.

A `BlockOption` says how the backward of a block runs: its ops, and between them forward ops that
run again. Everything else follows from it: what must be held from the forward until then, and which
forward ops make that. The options generalise Rotor's single one, "store all" (Zhao et al.,
"Rockmate", ICML 2023, section 3: schedules of a block as options of the chain).

Bytes are of two kinds. Before the turn and while a block's backward runs it is known which
fixed values are there, so bytes are absolute. Forward ops that run again after the turn do so in
front of some block's backward, so their bytes are counted without the fixed values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fxremat.planner.published.chains.chain import Block, Chain
from fxremat.planner.published.parts import read_later


@dataclass(frozen=True)
class BlockOption:
    """The steps of a block's backward, forward ops that run again among them."""

    backward: tuple[int, ...]


@dataclass(frozen=True)
class BlockRun:
    """A sequence of ops.

    ``apart`` are the bytes of its worst step without the value that enters the block, for when
    something else holds that; ``whole`` are those with it, freed after its last read.
    """

    steps: tuple[int, ...]
    time: float
    apart: int
    whole: int


@dataclass(frozen=True)
class OptionCost:
    """One option of one block.

    ``held`` are the bytes between forward and backward without the value that enters,
    ``held_first`` the same before the turn. ``needs_enters`` says whether the backward reads the
    value that enters, ``holds_leaves`` whether ``held`` counts the value that leaves. ``first``
    is the forward before the turn, ``rerun`` after it, ``last`` where no later block follows.
    """

    held: int
    held_first: int
    needs_enters: bool
    holds_leaves: bool
    first: BlockRun
    again: BlockRun
    last: BlockRun
    backward: BlockRun


@dataclass(frozen=True)
class BlockCost:
    """A block: bytes of the value that enters, the forward that holds only the one that leaves.

    ``early`` are the bytes that stay until the turn whatever the block holds. ``gap`` are those
    of the fixed values in front of the backward.
    """

    enters: int
    early: int
    gap: int
    first_unsaved: BlockRun
    rerun_unsaved: BlockRun
    options: tuple[OptionCost, ...]


def store_all(block: Block) -> BlockOption:
    """Rotor's only option: nothing in the block runs again."""
    return BlockOption(tuple(block.backward))


def block_costs(chain: Chain, options: Sequence[Sequence[BlockOption]]) -> tuple[BlockCost, ...]:
    """The costs of every block's options."""
    return tuple(
        _BlockSums(chain, block).cost(its) for block, its in zip(chain.blocks, options, strict=True)
    )


def option_cost(chain: Chain, block: Block, option: BlockOption) -> OptionCost:
    """The cost of one option."""
    return next(iter(_BlockSums(chain, block).cost((option,)).options))


@dataclass(frozen=True)
class _BlockSums:
    chain: Chain
    block: Block

    def cost(self, options: Iterable[BlockOption]) -> BlockCost:
        block, model = self.block, self.chain.model
        leaves = _some(block.leaves)
        return BlockCost(
            enters=0 if block.enters is None else model.bytes[block.enters],
            early=self._bytes(block.early),
            gap=self.chain.before[block.backward.start],
            first_unsaved=self._run(block.forward, leaves | block.early),
            rerun_unsaved=self._again(leaves),
            options=tuple(self._option(option) for option in options),
        )

    def _option(self, option: BlockOption) -> OptionCost:
        block = self.block
        saved = read_later(self.chain.model, option.backward) & block.reach
        inside = saved & block.local
        leaves = _some(block.leaves)
        return OptionCost(
            held=self._bytes(inside),
            held_first=self._bytes(inside | block.early),
            needs_enters=bool(saved - inside),
            holds_leaves=bool(saved & leaves),
            first=self._run(block.forward, inside | leaves | block.early),
            again=self._again(inside | leaves),
            last=self._again(inside),
            backward=self._run(option.backward, frozenset()),
        )

    def _again(self, wanted: frozenset[int]) -> BlockRun:
        return self._run(makers(self.chain, self.block, wanted), wanted, positioned=False)

    def _run(self, steps: Iterable[int], keep: frozenset[int], positioned: bool = True) -> BlockRun:
        ops = tuple(steps)
        time = sum(self.chain.model.time[op] for op in ops)
        base = _base(self.chain, self.block, ops) if positioned else [(0, False)] * len(ops)
        apart = _worst(self.chain, ops, self.block.local, keep, base)
        whole = _worst(self.chain, ops, self.block.reach, keep, base)
        return BlockRun(ops, time, apart, whole)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.chain.model.bytes[value] for value in values)


def _some(value: int | None) -> frozenset[int]:
    return frozenset() if value is None else frozenset((value,))


def makers(chain: Chain, block: Block, wanted: Collection[int]) -> tuple[int, ...]:
    """The forward ops of the block that make the wanted values from the one that enters."""
    model, missing = chain.model, set(wanted)
    found = []
    for op in reversed(block.forward):
        if not missing.isdisjoint(model.writes[op]):
            found.append(op)
            missing.update(value for value in model.reads[op] if value in block.local)
    return tuple(reversed(found))


Base = tuple[int, bool]
"""Bytes of the fixed values at a step, and whether its op runs there for the first time."""


def _base(chain: Chain, block: Block, steps: Sequence[int]) -> list[Base]:
    """The base of each step; forward ops of a backward run in front of its next op."""
    backward = bool(steps) and steps[-1] in block.backward
    out: list[Base] = []
    ahead = chain.before[block.backward.start]
    for op in reversed(steps):
        if backward and op in block.forward:
            out.append((ahead, False))
        else:
            out.append((chain.fixed[op], True))
            ahead = chain.before[op]
    return out[::-1]


def _worst(
    chain: Chain,
    steps: Sequence[int],
    values: frozenset[int],
    keep: frozenset[int],
    base: Sequence[Base],
) -> int:
    """Bytes at the worst step: the given values, the workspace and the base.

    Backwards: a copy is held while the next that happens to it is a read, as a replay counts it.
    """
    model, sizes = chain.model, chain.model.bytes
    live = set(keep & values)
    total, worst = sum(sizes[value] for value in live), 0
    for op, (fixed, first) in zip(reversed(steps), reversed(base), strict=True):
        writes = values.intersection(model.writes[op])
        reads = values.intersection(model.reads[op])
        gone = (writes | reads) - live
        now = fixed + model.workspace[op] + total + sum(sizes[value] for value in gone)
        if model.inplace[op]:
            now -= _overtaken(chain, op, writes, gone, first)
        worst = max(worst, now)
        total += sum(sizes[v] for v in reads - live) - sum(sizes[v] for v in writes & live)
        live = (live - writes) | reads
    return worst


def _overtaken(chain: Chain, op: int, new: Iterable[int], gone: Iterable[int], first: bool) -> int:
    """Bytes that the op writes in place; fixed values begin and end at first runs only."""
    model, spans = chain.model, chain.spans
    begins, ends = set(new), set(gone)
    if first:
        begins.update(v for v in model.writes[op] if v in spans)
        ends.update(v for v in model.reads[op] if v in spans and spans[v][1] == op)
    saved = 0
    for read, write in model.inplace[op]:
        if read in ends and write in begins:
            ends.remove(read)
            begins.remove(write)
            saved += min(model.bytes[read], model.bytes[write])
    return saved
