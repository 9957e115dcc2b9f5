"""The layout of a step: which buffers of generated code lie in the arena, and where.

All runs of a step share one arena. Time is the sequence of their events:

    run 0 forward   + a  + saved  - a       a       [0, 2)
    run 1 forward   + b  - b                saved   [1, 6)   until its own run frees it
    run 1 backward  + gradient              gradient of a parameter: until the step ends
    run 0 backward  + c  - saved  - c

Outside of the arena lie what library calls return and their scratch, results that the caller gets,
and gradients of inputs that are no parameters: nobody knows how long these live. A result that is
known to be given to the next graph, which saves it, and to nobody else is placed on a GPU: its
bytes are given to others where no half begins while it may be held.

The arena is held for the whole step. What lies outside comes in addition, at its own peak: on a
GPU in a private pool, whose first segment is chosen by replay, and what is least in all is taken.
On a CPU nothing is fragmented outside, and so much is placed that the total stays within the peak
of what is alive.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from fxremat.core.constants import FIRST_SEGMENTS, LITTLE_UNUSED, PARTS_OUTSIDE
from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Outside, RunEvents
from fxremat.core.layout import Buffer, CodeBuffer, HalfLayout, Placement, RunLayout, StepLayout
from fxremat.core.step import Order
from fxremat.memory.allocator import replay
from fxremat.memory.allocator_settings import (
    SEGMENT_STEP_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_up,
)
from fxremat.memory.composed_steps import composed, loop_of, seconds, staying, with_second_gradients
from fxremat.planner.addresses import PartialArena, place

OWN_POOL, ARENA = 1, 2
"""Streams that stand for the graphs' own pool, and for what lies in the arena."""
POOLS = 0, OWN_POOL
"""Those of the allocator: the pool that all share, and the graphs' own."""

Block = tuple[int, str]
"""The number of a run, and the name of one of its blocks."""

ALIGNMENT_BYTES = {"cuda": 512, "cpu": 64}
"""Of offsets, as torch's allocators give them: the blocks of CUDACachingAllocator and `gAlignment`
of c10/core/alignment.h. Inductor's kernels rely on less: Triton's on 16 bytes."""


@dataclass(frozen=True)
class Arranged:
    """The layout of a step, and the names of the blocks of each run that are placed.

    ``reserved_bytes`` are those of the arena and the private pool on a GPU.
    """

    layout: StepLayout
    placed: tuple[frozenset[str], ...]
    reserved_bytes: int = 0


def arrange(
    runs: Sequence[RunEvents],
    order: Order,
    device: str,
    *,
    settings: AllocatorSettings | None = None,
    outside: Sequence[Outside] = (),
) -> Arranged:
    """Places what the code of these runs asks for, where they go forward and backward in order.

    ``device`` is its type, such as "cuda"; there a private pool with these ``settings`` has what
    lies outside. What never runs is not placed. What is known of several runs to happen ``outside``
    says who holds what one gives to another.
    """
    asked = runs
    if device != "cpu":  # there what lies outside costs nothing but its bytes
        runs = [replace(x, backward=tuple(with_second_gradients(x.backward, x))) for x in runs]
    lives = _lives(runs, order, ALIGNMENT_BYTES[device])
    own = {(run, name) for run, one in enumerate(runs) for name in may_be_placed(one)}
    passed = {} if device == "cpu" else _lives_of_passed(lives, runs, order, outside)
    lives |= passed
    own |= passed.keys()
    stay = {(run, name) for run, one in enumerate(runs) for name in staying(one)} & lives.keys()
    if device == "cpu":
        own -= stay
    else:
        ends = max((life.end for life in lives.values()), default=0)
        lives |= {block: replace(lives[block], begin=0, end=ends) for block in stay}
    placeable = {block: life for block, life in lives.items() if block in own and life.size_bytes}
    rest = [life for block, life in lives.items() if block not in placeable]

    def arranged(placement: Placement) -> Arranged:
        found = placement.offset_bytes
        offsets = {block: found[one.name] for block, one in placeable.items() if one.name in found}
        layouts = tuple(_run_layout(run, one, offsets) for run, one in enumerate(runs))
        names = (frozenset(name for k, name in offsets if k == run) for run in range(len(runs)))
        return Arranged(StepLayout(layouts, placement.arena_bytes), tuple(names))

    unit, best = 1 if device == "cpu" else ALIGNMENT_BYTES[device], list[Arranged]()
    arena = PartialArena([*placeable.values()], rest, unit)
    if device == "cpu":
        return arranged(_within_peak(arena))
    for placement in _placements(arena):
        one = arranged(placement)
        if len(runs) > 1 and outside:
            events, second = asked_of_pools(asked, one.placed, outside)
            loop = loop_of(on_streams((OWN_POOL,), events), second)
        else:
            pairs = ((k, *pair) for k, x in enumerate(runs) for pair in seconds(x).items())
            second = {_name(k, first): _name(k, other) for k, first, other in pairs}
            step = ((k, e) for k, e in in_sequence(runs, order) if e.name not in one.placed[k])
            loop = loop_of([replace(e, name=_name(k, e.name)) for k, e in step], second)
        segment, reserved = least_pool(loop, settings)
        layout = replace(one.layout, pool_bytes=segment)
        best.append(replace(one, layout=layout, reserved_bytes=layout.arena_bytes + reserved))
        if best[-1].reserved_bytes <= (1 + LITTLE_UNUSED) * arena.peak_bytes + SMALL_SEGMENT_BYTES:
            break
    return min(best, key=lambda one: one.reserved_bytes)


def _lives_of_passed(
    lives: Mapping[Block, Buffer], runs: Sequence[RunEvents], order: Order,
    outside: Sequence[Outside],
) -> dict[Block, Buffer]:  # fmt: skip
    """Results that only runs hold, if code asks for them: until the half that they die in ends."""
    ended, clock = dict[tuple[int, str], int](), 0
    for run, phase in order:
        clock += sum(1 for _ in in_sequence(runs, [(run, phase)]))
        ended[run, phase] = clock
    return {
        (run, name): replace(
            lives[run, name],
            end=max(ended.get((one, "backward"), sys.maxsize) for one in holders),
        )
        for (run, name), holders in passed_on(runs, outside).items()
        if name in code_blocks(runs[run])
    }


def asked_of_pools(
    runs: Sequence[RunEvents], placed: Sequence[Collection[str]], outside: Sequence[Outside]
) -> tuple[list[Event], dict[str, str]]:
    """What a step asks of the pools, beside what is ``placed`` of each run.

    With that, the second gradient beside each one that stays, by their names.
    """
    marked = [_marked(run, names) for run, names in zip(runs, placed, strict=True)]
    events, second = composed(outside, marked.__getitem__)
    return on_streams(POOLS, events), second


def _marked(run: RunEvents, placed: Collection[str]) -> RunEvents:
    """The run, whose blocks say whether they lie in the arena or in the graphs' own pool."""
    backward = with_second_gradients(run.backward, run)
    return replace(run, forward=where(run.forward, placed), backward=where(backward, placed))


def where(events: Iterable[Event], placed: Collection[str]) -> tuple[Event, ...]:
    """Events of a run, with the streams that stand for the places of their blocks."""
    return tuple(
        replace(event, stream=ARENA if event.name in placed else OWN_POOL)
        if isinstance(event, Allocate) and not is_resident(event)
        else event
        for event in events
    )


def on_streams(streams: Collection[int], events: Sequence[Event]) -> list[Event]:
    """The events of blocks that lie in the places for which these streams stand."""
    asked = (event for event in events if isinstance(event, Allocate))
    names = {one.name for one in asked if one.stream in streams}
    return [event for event in events if event.name in names]


def is_resident(event: Event) -> TypeGuard[Allocate]:
    """Whether it is there all the time: its name is no number."""
    return isinstance(event, Allocate) and not event.name.isdigit()


def _placements(arena: PartialArena) -> Iterator[Placement]:
    """All in the arena; then, if others need memory, with larger and larger parts kept outside."""
    yield place(arena.buffers)
    if arena.least_outside > LITTLE_UNUSED * arena.peak_bytes or arena.unit == 1:
        for part in PARTS_OUTSIDE:
            yield arena.place(part)


def _within_peak(arena: PartialArena) -> Placement:
    """As much as keeps the arena and all outside of it within the peak of what is alive."""
    for placement in _placements(arena):
        if arena.total_bytes(placement) <= arena.peak_bytes:
            return placement
    return Placement({}, 0)


def least_pool(
    events: Sequence[Event], settings: AllocatorSettings | None = None
) -> tuple[int, int]:
    """The first segment of a private pool, 0 for none, and what it reserves, with the least."""
    usage = replay(events, settings)
    best = usage.peak_reserved_bytes, 0
    for factor in FIRST_SEGMENTS if events else ():
        segment = round_up(int(factor * usage.peak_allocated_bytes), SEGMENT_STEP_BYTES)
        first = (Allocate("first", segment), Free("first"))
        best = min(best, (replay([*first, *events], settings).peak_reserved_bytes, segment))
    return best[1], best[0]


def _name(run: int, block: str) -> str:
    """No two runs share it."""
    return f"{run}:{block}"


def may_be_placed(run: RunEvents) -> frozenset[str]:
    """The blocks that the code of a run asks for itself, and whose end is known."""
    gradients_of_own = {one.gradient for one in run.inputs if one.own}
    given = {*run.results, *gradients_of_own, *dict(run.incoming)}
    return frozenset(name for name in code_blocks(run) - given if name is not None)


def code_blocks(run: RunEvents) -> frozenset[str | None]:
    """The blocks that the code of a run asks for itself."""
    return frozenset(one.block for one in (*run.forward_buffers, *run.backward_buffers))


def passed_on(runs: Sequence[RunEvents], outside: Sequence[Outside]) -> dict[Block, set[int]]:
    """Results that only runs hold when the first backward begins; and those runs.

    Each of them is given to a run that saves it.
    """
    made, holders = dict[str, Block](), dict[Block, set[int]]()
    for event in outside:
        match event:
            case Forward(run, inputs, results):
                for name, given in zip(inputs, runs[run].inputs, strict=False):
                    if name in made and given.again:
                        holders.setdefault(made[name], set()).add(run)
                names = dict.fromkeys(runs[run].results)
                made |= {x.name: (run, name) for x, name in zip(results, names, strict=False)}
            case Free(name):
                made.pop(name, None)
            case Backward():
                break
    alone = {block: runs_of for block, runs_of in holders.items() if block not in made.values()}
    return {
        (run, name): more | ({run} if name in runs[run].again else set())
        for (run, name), more in alone.items()
    }


def in_sequence(runs: Sequence[RunEvents], order: Order) -> Iterator[tuple[int, Event]]:
    """The events of the whole step, each with its run; incoming gradients are allocated, too."""
    for run, phase in order:
        one = runs[run]
        if phase == "forward":
            yield from ((run, event) for event in one.forward)
        else:
            yield from ((run, Allocate(name, nbytes)) for name, nbytes in one.incoming)
            yield from ((run, event) for event in one.backward)


def _lives(runs: Sequence[RunEvents], order: Order, alignment: int) -> dict[Block, Buffer]:
    """When each block of the step is alive; what is not freed is there to the end."""
    begun, freed, clock = dict[Block, tuple[int, int]](), dict[Block, int](), 0
    for clock, (run, event) in enumerate(in_sequence(runs, order)):
        match event:
            case Allocate(name, nbytes):
                if (run, name) in begun:
                    raise ValueError(f"run {run} allocates {name!r} twice; blocks have one name")
                begun[run, name] = clock, nbytes
            case Free(name):
                freed[run, name] = clock
    return {
        block: Buffer(_name(*block), begin, freed.get(block, clock + 1), nbytes, alignment)
        for block, (begin, nbytes) in begun.items()
    }


def _run_layout(run: int, events: RunEvents, offsets: Mapping[Block, int]) -> RunLayout:
    mine = {name: offset for (k, name), offset in offsets.items() if k == run}
    return RunLayout(
        _half_layout(events.forward_buffers, events.forward, mine),
        _half_layout(events.backward_buffers, events.backward, mine),
    )


def _half_layout(
    buffers: tuple[CodeBuffer, ...], events: Sequence[Event], offsets: Mapping[str, int]
) -> HalfLayout:
    freed = {event.name for event in events if isinstance(event, Free)}
    found = tuple(None if one.block is None else offsets.get(one.block) for one in buffers)
    outlive = frozenset(
        k
        for k, (one, offset) in enumerate(zip(buffers, found, strict=True))
        if offset is not None and one.block not in freed
    )
    return HalfLayout(buffers, found, outlive)
