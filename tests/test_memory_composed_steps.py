"""Events of a step, put together from those of its parts and of what is outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocator import most_requested
from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Given, Outside, RunEvents
from fxremat.core.step import ALL_RESULTS, Interface, Order, Version
from fxremat.memory import composed_steps
from fxremat.memory.allocator import replay
from fxremat.memory.composed_steps import outside_in_order, paired, repeated_outside
from fxremat.sizes import MIB
from fxremat.step.description import repeated_step
from fxremat.step.versions import Offer, Part

BLOCK = RunEvents(
    forward=(Allocate("0", 7), Allocate("1", 5), Allocate("2", 10), Free("0")),
    backward=(Allocate("6", 3), Free("1"), Allocate("7", 10), Allocate("8", 2), Free("6")),
    inputs=(Given(10, own=True, gradient="7"), Given(2, gradient="8")),
    results=("2",),
    incoming=(("5", 10),),
)
"""Of 7 bytes in between, 5 that are saved, and its result; with one weight of 2 bytes."""


def composed(
    outside: Iterable[Outside], version_of: Callable[[int], RunEvents]
) -> tuple[Event, ...]:
    """The events of a step alone."""
    return composed_steps.composed(outside, version_of)[0]


def live_after(events: Iterable[Event]) -> list[int]:
    sizes: dict[str, int] = {}
    live: list[int] = []
    for event in events:
        if isinstance(event, Allocate):
            sizes[event.name] = event.nbytes
        elif isinstance(event, Free):
            del sizes[event.name]
        live.append(sum(sizes.values()))
    return live


def test_a_step_by_hand() -> None:
    """Two runs: the result of the first is the input of the second, and no byte is there twice."""
    outside = (
        Allocate("weight", 2),
        Allocate("0", 10),
        Forward(0, ("0", "weight"), (Allocate("1", 10),)),
        Free("0"),
        Forward(1, ("1", "weight"), (Allocate("2", 10),)),
        Free("1"),
        Allocate("3", 10),
        Free("2"),
        Backward(1, ("3",), (Allocate("4", 10), Allocate("5", 2))),
        Free("3"),
        Backward(0, ("4",), (Allocate("6", 10), Allocate("7", 2))),
        Free("4"),
        Free("6"),
    )
    step = composed(outside, lambda run: BLOCK)
    before, first, second = [2, 12], [19, 24, 34, 27, 17], [24, 29, 39, 32, 22]
    loss, last = [32, 22], [25, 20, 30, 32, 29, 19]
    assert live_after(step) == [*before, *first, *second, *loss, *last, 22, 17, 27, 29, 26, 16, 6]


def test_an_input_that_is_read_again_is_held_by_the_run() -> None:
    outside = (
        Allocate("0", 10),
        Forward(0, ("0",), (Allocate("1", 10),)),
        Free("0"),
        Allocate("2", 10),
        Backward(0, ("2",), ()),
    )
    version = replace(BLOCK, inputs=(replace(BLOCK.inputs[0], again=True),))
    held = live_after(composed(outside, lambda run: version))
    plain = live_after(composed(outside, lambda run: BLOCK))
    assert (plain[4:7], held[4:6]) == ([25, 15, 25], [25, 35])
    assert held[-1] == plain[-1] == 20  # the result, and what came in


def test_what_cannot_be_paired_is_there_twice() -> None:
    """Another size, as of a view: each side has a block of its own, and a run's goes with it."""
    outside = (
        Allocate("0", 4),
        Forward(0, (), (Allocate("1", 11),)),
        Allocate("2", 1),
        Backward(0, ("2",), (Allocate("3", 9),)),
    )
    version = replace(BLOCK, inputs=(replace(BLOCK.inputs[0], again=True),))
    step = composed(outside, lambda run: version)
    live = live_after(step)
    assert live[1] == 14  # its input comes first
    assert max(live[:7]) == 4 + 10 + 5 + 10 + 11
    assert live[-1] == 4 + 11 + 1 + 9
    assert sum(isinstance(event, Allocate) for event in step) == 12


def test_a_part_of_something_larger_holds_the_whole() -> None:
    outside = (Allocate("0", 30), Forward(0, ("0",), ()), Free("0"), Backward(0, (), ()))
    version = RunEvents((), (), (Given(10, own=True, again=True),))
    step = composed(outside, lambda run: version)
    assert step == (Allocate("0", 30), Free("0"))


IN_TURN: Order = ((0, "forward"), (1, "forward"), (1, "backward"), (0, "backward"))


def test_a_run_is_given_what_the_one_before_gave() -> None:
    """As by hand, but that nothing is there of the first input, nor of the weight by itself."""
    step = composed(outside_in_order([BLOCK, BLOCK], IN_TURN, 2), lambda run: BLOCK)
    before, first, second = [2, 12], [19, 24, 34, 27, 17], [24, 29, 39, 32, 22, 12]
    loss, last = [22], [25, 20, 30, 32, 29, 19]
    found = live_after(step)
    assert found[: len(before) + 18] == [*before, *first, *second, *loss, *last]
    assert sum(one == Allocate(one.name, 10) for one in step if isinstance(one, Allocate)) == 6


def test_results_are_kept_for_a_later_run_and_by_others() -> None:
    """Of two towers the loss is given both; what others keep is there until their backward."""
    tower = replace(BLOCK, inputs=(Given(2, gradient="8"),), backward=(Free("1"), Allocate("8", 2)))
    loss = RunEvents((), (Allocate("0", 10), Allocate("1", 10)), tuple(
        Given(10, own=True, gradient=name) for name in ("0", "1")
    ))  # fmt: skip
    runs = [tower, tower, loss]
    order: Order = [(k, "forward") for k in range(3)] + [(k, "backward") for k in (2, 1, 0)]
    outside = list(outside_in_order(runs, order, 0))
    [at] = [k for k, event in enumerate(outside) if event == Forward(2, ("1", "0"), ())]
    assert set(outside[at + 1 : at + 3]) == {Free("0"), Free("1")}
    live = live_after(composed(outside, runs.__getitem__))
    held = live_after(
        composed(outside_in_order(runs, order, 0, held={0: ALL_RESULTS}), runs.__getitem__)
    )
    assert held[-1] == live[-1] + 10 == 4 + 10


def test_a_gradient_that_stays_has_a_second_one_beside_it() -> None:
    run = replace(BLOCK, gradients_stay=True)
    with_second = replace(run, backward=(*run.backward, Allocate("1000000000", 2)))
    order: Order = ((0, "forward"), (0, "backward"))
    events, second = composed_steps.composed(
        outside_in_order([run], order, 0), lambda _: with_second
    )
    [(first, other)] = second.items()
    assert {Allocate(first, 2), Allocate(other, 2)} <= {*events}
    assert Free(other) in events  # when autograd has added it
    assert Free(first) not in events


def test_what_was_never_there_is_told_of() -> None:
    with pytest.raises(ValueError, match="'0' is not there"):
        composed([Free("0")], lambda run: BLOCK)


def test_sizes_are_paired_in_their_places_first() -> None:
    assert paired([5, 7, 5], [5, 5, 7]) == [0, 2, 1]
    assert paired([5, 5], [7, 5, 5, 5]) == [1, 2]
    assert paired([5, 6], [5]) == [0, None]


@st.composite
def runs(draw: st.DrawFn) -> RunEvents:
    """A part that gives what it is given: blocks that are saved, and that are not."""
    sizes = st.integers(1, 1000)
    wide, weight = draw(sizes), draw(sizes)
    events: list[Event] = []

    def some(most: int) -> list[str]:
        names = []
        for _ in range(draw(st.integers(0, most))):
            names.append(f"{len(events)}")
            events.append(Allocate(names[-1], draw(sizes)))
        return names

    saved, other = some(3), some(3)
    result = f"{len(events)}"
    events.append(Allocate(result, wide))
    events += [Free(name) for name in other]
    begun = len(events)
    incoming = f"{begun}"
    events.append(Allocate(incoming, wide))  # takes the number
    other, gradients = some(3), []
    for nbytes in (wide, weight):
        if draw(st.booleans()) and saved:
            events.append(Free(saved.pop()))
        gradients.append(f"{len(events)}")
        events.append(Allocate(gradients[-1], nbytes))
    events += [Free(name) for name in (*saved, *other)]
    first, second = gradients
    again = draw(st.booleans())
    return RunEvents(
        tuple(events[:begun]),
        tuple(events[begun + 1 :]),
        (Given(wide, own=True, again=again, gradient=first), Given(weight, gradient=second)),
        (result,),
        (result,) if draw(st.booleans()) else (),
        ((incoming, wide),),
    )


def part_of(run: RunEvents) -> Part:
    """What the figures of a version say of the same."""
    wide, weight = (one.nbytes for one in run.inputs)
    before = live_after(run.forward)
    after = live_after((*run.forward, *run.backward))[len(before) :]
    kept = 0 if run.again else wide
    more = wide if run.inputs[0].again else 0
    version = Version(
        1.0,
        saved_bytes=before[-1] - kept + more,
        forward_bytes=max(before),
        backward_bytes=max(before[-1], *after) - kept + more,
    )
    boundary = Interface(wide + weight, wide, wide, wide, weight)
    return Part(boundary, (Offer(version, 0, 0, events=run),))


@given(runs(), st.integers(1, 4), st.integers(0, 5000), st.none() | st.integers(0, 1000))
def test_the_peak_is_that_of_the_points(
    run: RunEvents, count: int, held: int, left: int | None
) -> None:
    """To the byte; gradients that leave little behind are made before that is there.

    Of a result that is saved, too, there is one: the figures of a version count it twice.
    """
    seen = repeated_step(part_of(run), range(count), held, left)
    expected = seen.step().peak_bytes([0] * count)
    found = composed(repeated_outside(count, run, held, left), lambda _: run)
    usage, requested = replay(found), most_requested(found)
    assert run.again or expected <= requested
    assert requested <= expected + (left or 0)
    blocks = sum(isinstance(event, Allocate) for event in found)
    if usage.peak_reserved_bytes == 2 * MIB:  # of small blocks alone: multiples of 512 bytes
        assert usage.peak_allocated_bytes <= requested + 512 * blocks
