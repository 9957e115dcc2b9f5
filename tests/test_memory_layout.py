"""Layouts of steps: nothing alive is written over, and totals on a CPU stay within the peak."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.check_addresses import BadPlacement, check_layout
from fxremat.core.events import Allocate, Event, Free, Given, RunEvents
from fxremat.core.layout import CodeBuffer, HalfLayout, RunLayout, StepLayout
from fxremat.core.step import ALL_RESULTS, Order, first_first, last_first
from fxremat.memory.composed_steps import outside_in_order
from fxremat.memory.layout import ALIGNMENT_BYTES, arrange, in_sequence, passed_on
from fxremat.sizes import GIB, MIB

DEVICES = tuple(ALIGNMENT_BYTES)


def code_buffer(block: str | None, nbytes: int) -> CodeBuffer:
    """A call for so many bytes."""
    return CodeBuffer(block, (nbytes,), (1,), "torch.uint8", 1)


def a_run(forward: Sequence[Event], backward: Sequence[Event], *asked: str) -> RunEvents:
    """A run whose code asks itself for the blocks ``asked``."""

    def calls(half: Sequence[Event]) -> tuple[CodeBuffer, ...]:
        made = [e for e in half if isinstance(e, Allocate) and e.name in asked]
        return tuple(code_buffer(e.name, e.nbytes) for e in made)

    return RunEvents(
        tuple(forward),
        tuple(backward),
        forward_buffers=calls(forward),
        backward_buffers=calls(backward),
    )


# -- steps at random -------------------------------------------------------------------------


@dataclass
class _Half:
    """A half that is drawn: its events, and what is alive."""

    draw: st.DrawFn
    events: list[Event] = field(default_factory=list)
    live: list[str] = field(default_factory=list)

    def run(self, prefix: str) -> None:
        """Some allocations, and frees of anything that is alive."""
        for index in range(self.draw(st.integers(0, 6))):
            name = f"{prefix}{index}"
            sizes = st.one_of(st.integers(0, 2_000), st.integers(0, 8).map(lambda k: 512 * k))
            self.events.append(Allocate(name, self.draw(sizes)))
            self.live.append(name)
            while self.live and self.draw(st.integers(0, 2)) == 0:
                self.free(self.draw(st.sampled_from(self.live)))

    def free(self, name: str) -> None:
        self.live.remove(name)
        self.events.append(Free(name))


@st.composite
def run_events(draw: st.DrawFn) -> RunEvents:
    """A run with results, what it saves, gradients of both kinds, and library calls."""
    forward = _Half(draw)
    forward.run("f")
    results = draw(st.sets(st.sampled_from(forward.live))) if forward.live else set[str]()
    backward = _Half(draw, live=[name for name in forward.live if name not in results])
    backward.run("b")
    gradients = [name for name in backward.live if draw(st.booleans())]
    for name in [name for name in backward.live if name not in gradients]:
        backward.free(name)
    made = [e.name for e in (*forward.events, *backward.events) if isinstance(e, Allocate)]
    asked = {name for name in made if draw(st.integers(0, 3))}
    run = a_run(forward.events, backward.events, *asked)
    return replace(
        run,
        inputs=tuple(Given(8, own=draw(st.booleans()), gradient=name) for name in gradients),
        results=tuple(results),
        incoming=tuple((f"i{k}", draw(st.integers(1, 900))) for k in range(len(results))),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[RunEvents], Order]:
    """Runs in one of several orders; some may never go backward, or not run at all."""
    runs = draw(st.lists(run_events(), min_size=1, max_size=3))
    order = draw(st.sampled_from((last_first, first_first)))(len(runs))
    return runs, order[: draw(st.integers(0, len(order)))]


def peak(runs: Sequence[RunEvents], order: Order) -> int:
    """The most bytes alive; incoming gradients are there from the backward on."""
    live, most = dict[tuple[int, str], int](), 0
    for run, event in in_sequence(runs, order):
        if isinstance(event, Allocate):
            live[run, event.name] = event.nbytes
        elif isinstance(event, Free):
            del live[run, event.name]
        most = max(most, sum(live.values()))
    return most


@settings(deadline=None)
@given(steps())
def test_results_that_are_passed_on_are_placed_and_pass_the_verifier(
    step: tuple[list[RunEvents], Order],
) -> None:
    runs, order = step
    runs = [_given_by(before, one) for one, before in zip(runs, [None, *runs], strict=False)]
    outside = list(outside_in_order(runs, order, 0))
    arranged = arrange(runs, order, "cuda", outside=outside)
    passed = passed_on(runs, outside)
    check_layout(runs, order, arranged.layout, ALIGNMENT_BYTES["cuda"], passed)


def _given_by(before: RunEvents | None, run: RunEvents) -> RunEvents:
    """The run, where it is given what another one gave before, and saves it."""
    if before is None:
        return run
    sizes = before.sizes()
    more = (Given(sizes[name], own=True, again=True) for name in before.results)
    return replace(run, inputs=(*run.inputs, *more))


def test_what_the_next_run_saves_lies_in_the_arena() -> None:
    """Its bytes are another's as soon as no half begins while it is held."""
    first = a_run([Allocate("0", MIB)], [Allocate("1", MIB), Free("1")], "0", "1")
    first = replace(first, results=("0",), incoming=(("2", 512),))
    loss = a_run([], [Allocate("0", MIB), Free("0")], "0")
    loss = replace(loss, inputs=(Given(MIB, own=True, again=True),))
    runs, order = [first, loss], last_first(2)
    outside = list(outside_in_order(runs, order, 0))
    assert passed_on(runs, outside) == {(0, "0"): {1}}
    layout = arrange(runs, order, "cuda", outside=outside).layout
    assert layout.arena_bytes == 2 * MIB
    assert layout.runs[0].forward.offsets == layout.runs[0].backward.offsets == (0,)
    assert layout.runs[1].backward.offsets == (MIB,)
    held = list(outside_in_order(runs, order, 0, held={0: ALL_RESULTS}))
    assert not passed_on(runs, held)
    assert arrange(runs, order, "cuda", outside=held).layout.runs[0].forward.offsets == (None,)


@settings(deadline=None)
@given(steps(), st.sampled_from(DEVICES))
def test_layouts_pass_the_verifier(step: tuple[list[RunEvents], Order], device: str) -> None:
    """What is said to be placed is, and what outlives a half is marked."""
    runs, order = step
    arranged = arrange(runs, order, device)
    check_layout(runs, order, arranged.layout, ALIGNMENT_BYTES[device])
    for run, mine, placed in zip(runs, arranged.layout.runs, arranged.placed, strict=True):
        assert mine.forward.buffers == run.forward_buffers
        assert mine.backward.buffers == run.backward_buffers
        found = set()
        for half, events in ((mine.forward, run.forward), (mine.backward, run.backward)):
            freed = {event.name for event in events if isinstance(event, Free)}
            for k, (buffer, offset) in enumerate(zip(half.buffers, half.offsets, strict=True)):
                assert (k in half.outlive) == (offset is not None and buffer.block not in freed)
                if offset is not None:
                    found.add(buffer.block)
        assert found == placed


@settings(deadline=None)
@given(steps())
def test_the_total_on_a_cpu_stays_within_the_peak(step: tuple[list[RunEvents], Order]) -> None:
    runs, order = step
    arranged = arrange(runs, order, "cpu")

    def outside_of(events: Sequence[Event], placed: Collection[str]) -> tuple[Event, ...]:
        return tuple(event for event in events if event.name not in placed)

    pairs = zip(runs, arranged.placed, strict=True)
    outside = [
        replace(one, forward=outside_of(one.forward, x), backward=outside_of(one.backward, x))
        for one, x in pairs
    ]
    assert arranged.layout.arena_bytes + peak(outside, order) <= peak(runs, order)


# -- single cases ----------------------------------------------------------------------------

SAVES = replace(
    a_run(
        [Allocate("a", 2 * GIB), Allocate("saved", GIB), Free("a"), Allocate("loss", 4)],
        [Allocate("b", 2 * GIB), Allocate("grad", GIB), Free("b"), Free("saved"), Allocate("x", 8)],
        *("a", "saved", "loss", "b", "grad", "x"),
    ),
    inputs=(Given(GIB, gradient="grad"), Given(8, own=True, gradient="x")),
    results=("loss",),
    incoming=(("tangent", 4),),
)


def test_two_runs_share_the_arena() -> None:
    """Two values are saved and two gradients stay; there is room for one temporary only."""
    arranged = arrange([SAVES, SAVES], last_first(2), "cuda")
    check_layout([SAVES, SAVES], last_first(2), arranged.layout, 512)
    assert arranged.layout.arena_bytes == 5 * GIB
    saved = [one.forward.offsets[1] for one in arranged.layout.runs]
    assert saved[0] != saved[1]


def test_blocks_of_other_devices_are_not_placed() -> None:
    run = replace(a_run([], []), forward_buffers=(code_buffer(None, 64),))
    arranged = arrange([run], last_first(1), "cuda")
    assert arranged.layout.runs[0].forward.offsets == (None,)
    assert arranged.layout.arena_bytes == 0


def test_all_is_placed_where_the_peaks_are_together() -> None:
    """On a GPU, too, what lies outside is counted: here it needs nothing in addition."""
    events = [Allocate("a", 64 * MIB), Allocate("b", 32 * MIB), Allocate("its", 32 * MIB)]
    run = a_run([*events, Free("its"), Free("b"), Free("a")], [], "a", "b")
    arranged = arrange([run], last_first(1), "cuda")
    assert arranged.placed == (frozenset({"a", "b"}),)
    assert arranged.reserved_bytes == 128 * MIB


def test_a_part_of_the_peak_lies_outside_where_the_peaks_are_apart() -> None:
    """The library needs 32 MiB when the arena has them free: something lies where that will lie."""
    events: list[Event] = [Allocate("a", 64 * MIB), Allocate("b", 32 * MIB), Free("b"), Free("a")]
    events += [Allocate("its", 32 * MIB), Free("its")]
    run = a_run(events, [], "a", "b")
    arranged = arrange([run], last_first(1), "cuda")
    assert arranged.placed != (frozenset({"a", "b"}),)
    assert arranged.reserved_bytes == 96 * MIB


def test_nothing_is_placed_on_a_cpu_where_that_costs_bytes() -> None:
    """The library needs its bytes when the code needs none: the arena would be in addition."""
    run = a_run([Allocate("a", 640), Free("a"), Allocate("b", 640), Free("b")], [], "a")
    assert arrange([run], last_first(1), "cpu").placed == (frozenset(),)


def test_a_small_rest_lies_beside_the_arena_on_a_cpu() -> None:
    """What is alive at the peak takes no whole units: 4 bytes are left to the allocator."""
    run = a_run([Allocate("a", 640), Allocate("b", 4), Free("a"), Free("b")], [], "a", "b")
    arranged = arrange([run], last_first(1), "cpu")
    assert arranged.placed == (frozenset({"a"}),)
    assert arranged.layout.arena_bytes == 640


def test_names_are_unique() -> None:
    run = a_run([Allocate("a", 8), Free("a"), Allocate("a", 8)], [], "a")
    with pytest.raises(ValueError, match="twice"):
        arrange([run], last_first(1), "cuda")


# -- the verifier ----------------------------------------------------------------------------


def laid_out(*places: int | None, arena_bytes: int = 4 * GIB) -> StepLayout:
    """``SAVES`` with its forward at these places."""
    half = HalfLayout(SAVES.forward_buffers, places)
    return StepLayout(
        (RunLayout(half, HalfLayout(SAVES.backward_buffers, (None,) * 3)),), arena_bytes
    )


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (laid_out(0, GIB, None), "overlap"),
        (laid_out(0, 2 * GIB + 1, None), "not aligned"),
        (laid_out(-512, 2 * GIB, None), "below the arena"),
        (laid_out(0, 2 * GIB, None, arena_bytes=3 * GIB - 1), "beyond the arena"),
        (laid_out(0, 2 * GIB, 3 * GIB), "not its own"),
    ],
)
def test_verifier_rejects(layout: StepLayout, kind: str) -> None:
    with pytest.raises(BadPlacement) as raised:
        check_layout([SAVES], last_first(1), layout, 512)
    assert raised.value.kind == kind


def test_verifier_accepts() -> None:
    check_layout([SAVES], last_first(1), laid_out(0, 2 * GIB, None), 512)


def test_verifier_sees_what_another_run_saves() -> None:
    one = laid_out(0, 2 * GIB, None).runs[0]
    with pytest.raises(BadPlacement, match="run 1 places it over what run 0 has"):
        check_layout([SAVES, SAVES], last_first(2), StepLayout((one, one), 4 * GIB), 512)
