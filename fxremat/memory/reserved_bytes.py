"""What the graphs of a step reserve on CUDA: their arena, and the pools of what it cannot hold.

What generated code asks for itself lies in the arena (`fxremat.memory.layout`). What library calls
return, and results, come from a pool that nobody else allocates in; inputs and what is held beside
the graphs come from the pool that all share. The allocator's model never gives the blocks of one
stream to another, so the graphs' own pool is a stream of its own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Outside, RunEvents
from fxremat.core.layout import OwnPools, StepLayout
from fxremat.core.step import Order
from fxremat.memory.allocator import Usage, replay
from fxremat.memory.allocator_settings import SEGMENT_STEP_BYTES, AllocatorSettings, round_up
from fxremat.memory.composed_steps import loop_of, seconds, with_second_gradients
from fxremat.memory.layout import (
    OWN_POOL,
    POOLS,
    arrange,
    asked_of_pools,
    is_resident,
    on_streams,
    where,
)


@dataclass(frozen=True)
class CommonPool:
    """What the pool that all share reserves on CUDA, beside graphs whose memory lies elsewhere.

    In the first step of a loop it is asked, in this order, for

        inputs
        cuBLAS's workspaces of both threads      when graphs are compiled
        what tuning writes over                  and frees again
        the optimizer's states                   for one weight after the other
        what a step of the optimizer makes       and frees again

    Segments that the allocator has taken stay, so what it reserves then is what it reserves ever
    after.

    The ``weights`` are those that are trained. Optimizers hold ``states`` for them that are not
    there yet, and make ``step`` bytes more while they step. So much is reserved for ``others``.
    """

    inputs: Sequence[int]
    others: int = 0
    workspaces: Sequence[int] = ()
    tuning: int = 0
    weights: Sequence[int] = ()
    states: int = 0
    step: int = 0

    def reserved(self, settings: AllocatorSettings) -> int:
        """The most that is reserved."""
        return self.others + replay(list(self._events()), settings).peak_reserved_bytes

    def _events(self) -> Iterator[Event]:
        names = count()

        def held(sizes: Iterable[int]) -> list[Allocate]:
            return [Allocate(f"{next(names)}", nbytes) for nbytes in sizes]

        yield from held([*self.inputs, *self.workspaces])
        yield from (tuning := held([self.tuning]))
        yield from (Free(one.name) for one in tuning)
        yield from held(self._like_weights(self.states))
        yield from (step := held(self._like_weights(self.step)))
        yield from (Free(one.name) for one in step)

    def _like_weights(self, nbytes: int) -> list[int]:
        """So many bytes in blocks as large as the weights, as often as that goes; else in one."""
        whole = sum(self.weights)
        times, rest = divmod(nbytes, whole) if whole else (0, nbytes)
        return [*(one for one in self.weights for _ in range(times)), rest]


ALONE: Order = ((0, "forward"), (0, "backward"))
"""The order of a step in which one graph runs, and runs once."""


@dataclass(frozen=True)
class Reserved:
    """What is reserved for a step: by the pools, for the arena of the layout, and ``beside``.

    In a loop of such steps the graphs' own pool is ``asked`` for blocks, as `OwnPools` has them.
    """

    pools: Usage
    layout: StepLayout
    beside: int = 0
    asked: tuple[int, ...] = ()

    @property
    def own(self) -> OwnPools:
        """The segment that the allocator takes for the arena, and what the pools have."""
        arena = round_up(self.layout.arena_bytes, SEGMENT_STEP_BYTES)
        pool, first = self.pools.peak_reserved_bytes, self.layout.pool_bytes
        return OwnPools(arena, pool, first, self.asked)

    @property
    def nbytes(self) -> int:
        """All of it, at the peak."""
        return self.own.pool_bytes + self.own.arena_bytes + self.beside


def reserved(
    events: Sequence[Event],
    settings: AllocatorSettings,
    held_bytes: int,
    pool_bytes: int = 0,
    second: Mapping[str, str] = MappingProxyType({}),
) -> Usage:
    """What the pools reserve for two steps, one after the other.

    ``events`` are of one step; what is resident has a name that is no number, and comes first. What
    a step leaves, as gradients, is freed before the next one. ``held_bytes`` lie beside it, in one
    block. The graphs' own pool begins with a segment of ``pool_bytes``. Beside gradients that stay
    there are ``second`` ones, by their names. What the allocator has taken it keeps: it never runs
    out.
    """
    step = [event for event in events if not is_resident(event)]
    resident = [event for event in events if is_resident(event)]
    held = Allocate("held beside", held_bytes)
    return _pools([held, *resident, *loop_of(step, second)], settings, pool_bytes)


def reserved_by_run(
    events: Sequence[Event], run: RunEvents, settings: AllocatorSettings, held_bytes: int
) -> Reserved:
    """What one run of a graph reserves; ``events`` are those of its step, with what is resident.

    Of the pool that all share it is known what that reserves: ``held_bytes`` and what is resident.
    """
    found = arrange([run], ALONE, "cuda", settings=settings)
    there = (one for one in with_second_gradients(events, run) if not is_resident(one))
    beside = held_bytes + sum(event.nbytes for event in events if is_resident(event))
    loop = loop_of(on_streams(POOLS, where(there, found.placed[0])), seconds(run))
    pools = _pools(loop, settings, found.layout.pool_bytes)
    return Reserved(pools, found.layout, beside, _asked(loop))


def keep_too_much(graphs: Sequence[OwnPools], settings: AllocatorSettings) -> bool:
    """Whether graphs that take turns reserve more together than the one that reserves most.

    Their pool keeps the segments that any of them needed, and serves each from those of all.
    """
    turn = [event for k, one in enumerate(graphs) for event in _asks(one, k)]
    first = max(one.first_segment for one in graphs)
    pool = _pools([*turn, *turn, *turn], settings, first).peak_reserved_bytes
    together = pool + max(one.arena_bytes for one in graphs)
    return together > max(one.arena_bytes + one.pool_bytes for one in graphs)


def _pools(events: Iterable[Event], settings: AllocatorSettings, first_segment: int) -> Usage:
    """What is reserved for these events; the graphs' own pool begins with a segment."""
    first = Allocate("first", first_segment, OWN_POOL), Free("first")
    return replay([*first, *events], settings)


def _asked(events: Iterable[Event]) -> tuple[int, ...]:
    """Blocks as `OwnPools` has them."""
    numbers, found, made = dict[str, int](), list[int](), count()
    for event in events:
        if isinstance(event, Allocate):
            numbers[event.name] = next(made)
            found.append(event.nbytes)
        else:
            found.append(-numbers.pop(event.name) - 1)
    return tuple(found)


def _asks(one: OwnPools, number: int) -> Iterator[Event]:
    """The events again; the ``number`` tells the graph from others."""
    made = count()
    for n in one.asked:
        if n < 0:
            yield Free(f"{number}:{-n - 1}")
        else:
            yield Allocate(f"{number}:{next(made)}", n, OWN_POOL)


def reserved_by_step(
    runs: Sequence[RunEvents], outside: Sequence[Outside], settings: AllocatorSettings
) -> Reserved:
    """What a step of several runs reserves; ``outside`` are the events between them."""
    found = arrange(runs, order_of(outside), "cuda", settings=settings, outside=outside)
    events, second = asked_of_pools(runs, found.placed, outside)
    pools = reserved(events, settings, 0, found.layout.pool_bytes, second)
    return Reserved(pools, found.layout)


def order_of(outside: Iterable[Outside]) -> Order:
    """Which run goes forward or backward, one after the other."""
    return [
        (event.run, "forward" if isinstance(event, Forward) else "backward")
        for event in outside
        if isinstance(event, (Forward, Backward))
    ]
