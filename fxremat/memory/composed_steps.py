"""What a whole step asks of torch's allocator, where its parts are compiled by themselves.

What runs outside of the parts is seen as events, with a marker where a run of a part goes forward
or backward. What a version of a part does is known from its dry run. Put together, they are the
events of the step:

    outside   + tokens + x  [forward 0: x → y]  - x  [forward 1: y → z]  + loss …
    version                 + a + y - a              + a + z - a
    the step  + tokens + x  + a + y - a         - x  + a + z - a         + loss …

A block of memory is freed when nobody holds it any more: a run holds what it saves, and the outside
what it was given. Blocks that both know are paired by their sizes; where that fails, each has a
block of its own, so that no byte is forgotten. Bytes are as asked for, before any rounding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Outside, RunEvents
from fxremat.core.step import Order


def composed(
    outside: Iterable[Outside], version_of: Callable[[int], RunEvents]
) -> tuple[Event, ...]:
    """The events of a step; ``version_of`` gives what each run takes.

    Raises `ValueError` for a block that is used or freed outside and is not there.
    """
    composer = _Composer()
    for event in outside:
        match event:
            case Allocate():
                composer.give(event)
            case Free(name):
                composer.let_go(composer.block(name))
                del composer.outside[name]
            case Forward():
                composer.forward(event, version_of(event.run))
            case Backward():
                composer.backward(event, version_of(event.run))
    return tuple(composer.events)


def paired(wanted: Sequence[int], offered: Sequence[int]) -> list[int | None]:
    """For each size that is wanted, the place of one that is offered; each is taken once.

    The same place where these are equally many, else the first of the size.
    """
    same = len(wanted) == len(offered)
    found = [k if same and size == offered[k] else None for k, size in enumerate(wanted)]
    taken = {k for k in found if k is not None}
    for k, size in enumerate(wanted):
        if found[k] is None:
            left = (p for p, other in enumerate(offered) if p not in taken and other == size)
            found[k] = next(left, None)
            taken |= {p for p in (found[k],) if p is not None}
    return found


@dataclass
class _Composer:
    """The step up to now: who holds which block."""

    events: list[Event] = field(default_factory=list)
    size_of: dict[str, int] = field(default_factory=dict)
    holders: Counter[str] = field(default_factory=Counter)
    outside: dict[str, str] = field(default_factory=dict)
    """Blocks by the names that the outside has for them."""
    waiting: dict[int, dict[str, str]] = field(default_factory=dict)
    """Of each run that waits: blocks by the names that its version has for them."""

    def allocate(self, nbytes: int, name: str = "0", stream: int = 0) -> str:
        """A block with one holder."""
        block = f"{len(self.events)}" if name.isdigit() else name
        self.events.append(Allocate(block, nbytes, stream))
        self.size_of[block] = nbytes
        self.holders[block] = 1
        return block

    def hold(self, block: str) -> str:
        """One holder more."""
        self.holders[block] += 1
        return block

    def let_go(self, block: str) -> None:
        """One holder less."""
        self.holders[block] -= 1
        if not self.holders[block] and block.isdigit():
            self.events.append(Free(block))

    def block(self, name: str) -> str:
        """That the outside has under a name."""
        if name not in self.outside:
            raise ValueError(f"{name!r} is not there outside of the parts; allocate it before")
        return self.outside[name]

    def give(self, one: Allocate) -> None:
        """The outside allocates."""
        self.outside[one.name] = self.allocate(one.nbytes, one.name)

    def play(self, events: Iterable[Event], own: dict[str, str]) -> None:
        """Events of a version; ``own`` are the blocks that its run holds."""
        for event in events:
            if isinstance(event, Allocate):
                own[event.name] = self.allocate(event.nbytes, stream=event.stream)
            elif isinstance(event, Free):
                self.let_go(own.pop(event.name))

    def hand_over(self, wanted: Sequence[Allocate], blocks: Sequence[str]) -> None:
        """The outside gets what a run gives; of its own what the run does not have so large."""
        found = paired([one.nbytes for one in wanted], [self.size_of[b] for b in blocks])
        for one, place in zip(wanted, found, strict=True):
            if place is None:
                self.give(one)
            else:
                self.outside[one.name] = self.hold(blocks[place])

    def forward(self, marker: Forward, version: RunEvents) -> None:
        """What is read again is held, as are results; the others go to the outside."""
        own = self.waiting[marker.run] = self.held_inputs(marker, version)
        self.play(version.forward, own)
        results = tuple(dict.fromkeys(version.results))
        self.hand_over(marker.results, [own[name] for name in results])
        for name in results:
            if name not in version.again:
                self.let_go(own.pop(name))

    def held_inputs(self, marker: Forward, version: RunEvents) -> dict[str, str]:
        """The inputs that the backward reads again."""
        there = [self.block(name) for name in marker.inputs]
        sizes = [one.nbytes for one in version.inputs]
        found = paired(sizes, [self.size_of[block] for block in there])
        held = dict[str, str]()
        for k, (one, place) in enumerate(zip(version.inputs, found, strict=True)):
            if place is None and len(there) == len(sizes):
                place = k  # part of something larger
            if one.again and place is not None:
                held[f"input {k}"] = self.hold(there[place])
            elif one.again and one.own:
                held[f"input {k}"] = self.allocate(one.nbytes)
        return held

    def backward(self, marker: Backward, version: RunEvents) -> None:
        """In the end the run holds nothing."""
        own = self.waiting.pop(marker.run)
        there = [self.block(name) for name in marker.incoming]
        sizes = [nbytes for _, nbytes in version.incoming]
        found = paired(sizes, [self.size_of[block] for block in there])
        for (name, nbytes), place in zip(version.incoming, found, strict=True):
            own[name] = self.allocate(nbytes) if place is None else self.hold(there[place])
        self.play(version.backward, own)
        names = dict.fromkeys(one.gradient for one in version.inputs)
        self.hand_over(marker.gradients, [own[n] for n in names if n is not None])
        for block in own.values():
            self.let_go(block)


def repeated_outside(
    count: int, version: RunEvents, held_bytes: int, left_bytes: int | None = None
) -> Iterator[Outside]:
    """A step in which nothing is known but that so many runs of a part wait at once.

    Each is given what the last one gave, and the last runs backward first. ``held_bytes`` are there
    all the time, as are inputs that no run has of its own. Of the gradients of these ``left_bytes``
    stay after each run; None: all.
    """
    yield Allocate("held", held_bytes)
    for k, one in enumerate(version.inputs):
        if not one.own:
            yield Allocate(f"input {k}", one.nbytes)
    sizes = version.sizes()
    names = (f"{k}" for k in itertools.count())
    given = [Allocate(next(names), one.nbytes) for one in version.inputs if one.own]
    yield from given
    for run in range(count):
        own = iter(given)
        inputs = [next(own).name if x.own else f"input {k}" for k, x in enumerate(version.inputs)]
        results = [Allocate(next(names), sizes[name]) for name in dict.fromkeys(version.results)]
        yield Forward(run, tuple(inputs), tuple(results))
        yield from (Free(one.name) for one in given)
        given = results
        if run < count - 1:
            given = yield from _next([x.nbytes for x in version.inputs if x.own], results, names)
    wanted = [nbytes for _, nbytes in version.incoming]
    incoming = yield from _next(wanted, [], names)
    yield from (Free(one.name) for one in given)
    gradients = {x.gradient: x.own for x in version.inputs if x.gradient is not None}
    for run in reversed(range(count)):
        made = {name: Allocate(next(names), sizes[name]) for name in gradients}
        yield Backward(run, tuple(one.name for one in incoming), tuple(made.values()))
        yield from (Free(one.name) for one in incoming)
        passed_on = [one for name, one in made.items() if gradients[name]]
        stays = [one for name, one in made.items() if not gradients[name]]
        if left_bytes is not None and left_bytes < sum(one.nbytes for one in stays):
            yield Allocate(next(names), left_bytes)
            yield from (Free(one.name) for one in stays)
        incoming = yield from _next(wanted if run else [], passed_on, names)


def outside_in_order(
    runs: Sequence[RunEvents], order: Order, held_bytes: int, kept: Collection[int] = (),
    held: Collection[int] = (),
) -> Iterator[Outside]:  # fmt: skip
    """A step in which nothing is known but the order of runs, and who holds their results.

    ``held_bytes`` are there all the time. Results of the runs in ``kept`` are held until these go
    backward, those in ``held`` to the end. Gradients of inputs that no run has of its own stay.
    """
    yield Allocate("held", held_bytes)
    names, results = (f"{k}" for k in itertools.count()), dict[int, list[Allocate]]()
    for run, phase in order:
        sizes, version = runs[run].sizes(), runs[run]
        if phase == "forward":
            given = dict.fromkeys(version.results) if run in {*kept, *held} else {}
            results[run] = [Allocate(next(names), sizes[name]) for name in given]
            yield Forward(run, (), tuple(results[run]))
            continue
        stay = dict.fromkeys(x.gradient for x in version.inputs if not x.own)
        yield Backward(
            run, (), tuple(Allocate(next(names), sizes[one]) for one in stay if one is not None)
        )
        if run not in held:
            yield from (Free(one.name) for one in results.pop(run, []))


def _next(
    wanted: Sequence[int], made: Sequence[Allocate], names: Iterator[str]
) -> Generator[Outside, None, list[Allocate]]:
    """What the next run is given: what was made where it is as large; what is left is freed."""
    found = paired(wanted, [one.nbytes for one in made])
    taken = {place for place in found if place is not None}
    yield from (Free(one.name) for k, one in enumerate(made) if k not in taken)
    given = []
    for size, place in zip(wanted, found, strict=True):
        given.append(Allocate(next(names), size) if place is None else made[place])
        if place is None:
            yield given[-1]
    return given
