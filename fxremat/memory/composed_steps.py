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
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Outside, RunEvents
from fxremat.core.step import NOTHING_HELD, Order, is_number


def staying(run: RunEvents) -> frozenset[str]:
    """The gradients of a run that live on under the next forward.

    Where a loop accumulates gradients, or drops them late, autograd adds new ones to those that are
    there. Until it has, both are alive.
    """
    names = (one.gradient for one in run.inputs if run.gradients_stay and not one.own)
    return frozenset(name for name in names if name is not None)


def seconds(run: RunEvents) -> dict[str, str]:
    """Names, which no block of the run has, for second ones of the gradients that stay."""
    return {name: f"{10**9 + k}" for k, name in enumerate(sorted(staying(run)))}


def with_second_gradients(events: Iterable[Event], run: RunEvents) -> Iterator[Event]:
    """The events of a backward in which the gradients of an earlier one are there still.

    Those have their places, so that each new one lies outside, too, until autograd has added it.
    """
    second = seconds(run)
    for event in events:
        yield event
        if isinstance(event, Allocate) and event.name in second:
            yield Allocate(second[event.name], event.nbytes)


def loop_of(step: Sequence[Event], second: Mapping[str, str]) -> list[Event]:
    """What a pool is asked for in a loop of these steps, at whose ends all is freed.

    Where gradients stay (``second`` has the names of those that are added to them), they come from
    an earlier plan, so that the first step begins with them. Then a step begins without any, and
    the next one adds to those that it leaves.
    """
    there = [event for event in step if isinstance(event, Allocate) and event.name in second]
    ends, adds = [Free(one.name) for one in there], _step_without(step, second)
    begins = _step_without(step, set(second.values()), stays=second)
    return [*there, *adds, *ends, *begins, *adds, *ends] if there else [*adds, *adds]


def _step_without(
    step: Sequence[Event], missing: Collection[str], stays: Collection[str] = ()
) -> list[Event]:
    """The events but those of what is ``missing``; in the end all is freed that does not stay."""
    left, found = dict[str, None](), [event for event in step if event.name not in missing]
    for event in found:
        if isinstance(event, Allocate):
            left[event.name] = None
        else:
            del left[event.name]
    return [*found, *(Free(name) for name in left if name not in stays)]


def composed(
    outside: Iterable[Outside], version_of: Callable[[int], RunEvents]
) -> tuple[tuple[Event, ...], dict[str, str]]:
    """The events of a step; ``version_of`` gives what each run takes.

    With them, the second gradient beside each one that stays (`seconds`), by their names. Raises
    `ValueError` for a block that is used or freed outside and is not there.
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
    return tuple(composer.events), composer.second


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
    second: dict[str, str] = field(default_factory=dict)

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
            else:
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
        for name in marker.incoming if marker.passed else ():
            self.let_go(self.outside.pop(name))
        self.play(version.backward, own)
        names = dict.fromkeys(one.gradient for one in version.inputs)
        self.hand_over(marker.gradients, [own[n] for n in names if n is not None])
        self.second |= {own[name]: own[other] for name, other in seconds(version).items()}
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
    held: Mapping[int, int] = NOTHING_HELD,
) -> Iterator[Outside]:  # fmt: skip
    """A step in which nothing is known but the order of runs, and who holds their results.

    ``held_bytes`` are there all the time. Each run is given what one before it gave, where that is
    as large; so are the gradients. Results of the runs in ``kept`` are held until these go
    backward, so many bytes of each as ``held`` has for it to the end, and others as long as a run
    that comes may be given them. Gradients of inputs that no run has of its own stay.
    """
    yield Allocate("held", held_bytes)
    names, results = (f"{k}" for k in itertools.count()), dict[int, list[Allocate]]()
    gradients, stay = list[Allocate](), list[Allocate]()
    of_loss: list[Allocate] = []
    for k, (run, phase) in enumerate(order):
        version, sizes = runs[run], runs[run].sizes()
        there = [one for other in reversed(results) for one in results[other]]
        if phase == "forward":
            given = yield from _found([x.nbytes for x in version.inputs if x.own], there, names)
            own = iter(given)
            inputs = [next(own).name if one.own else "held" for one in version.inputs]
            results[run] = [Allocate(next(names), sizes[n]) for n in dict.fromkeys(version.results)]
            yield Forward(run, tuple(inputs), tuple(results[run]))
            stay += _smallest(results[run], held.get(run, 0))
            yield from (Free(one.name) for one in given if one not in there)
            yield from _let_go(results, kept, stay, _wanted_from(runs, order[k + 1 :]), given)
        else:
            incoming = yield from _found([n for _, n in version.incoming], gradients, names)
            of_own = {one.gradient: one.own for one in version.inputs if one.gradient is not None}
            new = {name: Allocate(next(names), sizes[name]) for name in of_own}
            coming = tuple(one.name for one in incoming)
            if k > 0 and order[k - 1][1] == "forward":  # who goes backward holds it to the end
                yield from (Free(one.name) for one in of_loss)
                of_loss = incoming if is_number(sum(one.nbytes for one in incoming)) else []
            yield Backward(run, coming, tuple(new.values()), passed=incoming is not of_loss)
            gradients = [one for one in gradients if one not in incoming]
            gradients += [one for name, one in new.items() if of_own[name]]
            made = results.get(run, [])
            yield from (Free(one.name) for one in made if one not in stay)
            results[run] = [one for one in made if one in stay]


def _smallest(results: Iterable[Allocate], most_bytes: int) -> list[Allocate]:
    """The smallest of them, of so many bytes together."""
    found, left = list[Allocate](), most_bytes
    for one in sorted(results, key=lambda one: one.nbytes):
        left -= one.nbytes
        found += [one] if left >= 0 else []
    return found


def _wanted_from(runs: Sequence[RunEvents], order: Order) -> set[int]:
    """Sizes of what runs that come before the next backward are given."""
    coming = itertools.takewhile(lambda one: one[1] == "forward", order)
    return {one.nbytes for run, _ in coming for one in runs[run].inputs if one.own}


def _let_go(
    results: dict[int, list[Allocate]],
    keep: Collection[int],
    stay: Collection[Allocate],
    wanted: Collection[int],
    given: Collection[Allocate],
) -> Iterator[Free]:
    """Free results that a run was ``given``, and those of a size that no run wants any more.

    Those of the runs in ``keep`` are held, and those that ``stay``.
    """
    for run in [one for one in results if one not in keep]:
        free = [one for one in results[run] if one not in stay]
        gone = [one for one in free if one in given or one.nbytes not in wanted]
        results[run] = [one for one in results[run] if one not in gone]
        yield from (Free(one.name) for one in gone)


def _found(
    wanted: Sequence[int], there: Sequence[Allocate], names: Iterator[str]
) -> Generator[Outside, None, list[Allocate]]:
    """For each size one that is there, or a new one."""
    given = []
    for size, at in zip(wanted, paired(wanted, [one.nbytes for one in there]), strict=True):
        given.append(Allocate(next(names), size) if at is None else there[at])
        if at is None:
            yield given[-1]
    return given


def _next(
    wanted: Sequence[int], made: Sequence[Allocate], names: Iterator[str]
) -> Generator[Outside, None, list[Allocate]]:
    """What the next run is given: what was made where it is as large; what is left is freed."""
    taken = {*paired(wanted, [one.nbytes for one in made])}
    yield from (Free(one.name) for k, one in enumerate(made) if k not in taken)
    return (yield from _found(wanted, made, names))
