"""Parts that share a budget in reserved bytes: what the allocator takes for the whole step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxremat
from fxremat.compat.absent.pretending import fake_cuda
from fxremat.compile.request import Budget, Request
from fxremat.core.events import Allocate, Backward, Event, Forward, Free, Given, Outside, RunEvents
from fxremat.core.step import Interface, StepPoint, Version
from fxremat.cost import device
from fxremat.cost.device import card_named
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.options import parse_options
from fxremat.sizes import MIB
from fxremat.step.context import ModelContext, Surroundings
from fxremat.step.description import StepDescription
from fxremat.step.graph import CompiledVersion, Role
from fxremat.step.promise import RunVersions
from fxremat.step.recorder import StepRecorder
from fxremat.step.runs import GraphInStep
from fxremat.step.scope import BudgetScope
from fxremat.step.versions import Offer, Part
from tests.small import Chain
from tests.test_memory_composed_steps import part_of

HERE = torch.device("cpu")
RUNS = 4
WIDE, LARGE = 20 * MIB, 150 * MIB
"""What a block gives to the next, and what the loss works on."""


def events_of(saved: tuple[int, ...], again: int) -> RunEvents:
    """A block that saves blocks of so many MiB, each between others, or computes as many again."""
    names = iter(f"{k}" for k in range(100))
    halves: tuple[list[Event], list[Event]] = [], []

    def make(half: int, nbytes: int) -> str:
        halves[half].append(Allocate(next(names), nbytes))
        return halves[half][-1].name

    kept = []
    for nbytes in saved:
        other = make(0, 17 * MIB)
        kept.append(make(0, nbytes * MIB))
        halves[0].append(Free(other))
    result, incoming = make(0, WIDE), next(names)
    others = [make(1, 30 * MIB) for _ in range(again)]
    gradients = make(1, WIDE), make(1, 4 * MIB)
    halves[1].extend(Free(name) for name in (*kept, *others))
    return RunEvents(
        tuple(halves[0]),
        tuple(halves[1]),
        (
            Given(WIDE, own=True, again=bool(again), gradient=gradients[0]),
            Given(4 * MIB, gradient=gradients[1]),
        ),
        (result,),
        (),
        ((incoming, WIDE),),
    )


def offer(time_us: float, saved: tuple[int, ...], again: int) -> Offer:
    """Of what a dry run counted, without what was seen then."""
    version = replace(part_of(events_of(saved, again)).offers[0].version, time_us=time_us)
    return Offer(version, max(version.forward_bytes, version.backward_bytes), 0)


WAYS = {(31, 30, 33): 0, (31,): 2, (7,): 3}
"""What is saved, and how many blocks are computed again: from the fastest to the least."""
OFFERS = tuple(offer(100.0 + 10 * n, saved, n) for n, (saved, _) in enumerate(WAYS.items()))
PART = replace(part_of(events_of((), 0)), offers=OFFERS)


def outside_of(runs: int) -> Iterator[Outside]:
    """An embedding, blocks, and a loss of three large values."""
    yield Allocate("weights", 40 * MIB)
    yield Allocate("0", WIDE)
    for run in range(runs):
        yield Forward(run, (f"{run}", "weights"), (Allocate(f"{run + 1}", WIDE),))
        yield Free(f"{run}")
    for k in range(3):
        yield Allocate(f"{100 + k}", LARGE)
    yield from (Free(f"{100 + k}") for k in range(3))
    yield Allocate(f"{200 + runs}", WIDE)
    yield Free(f"{runs}")
    for run in reversed(range(runs)):
        made = Allocate(f"{200 + run}", WIDE), Allocate(f"{300 + run}", 4 * MIB)
        yield Backward(run, (f"{201 + run}",), made)
        yield Free(f"{201 + run}")
    yield Free("200")


def points_of(outside: Iterator[Outside]) -> tuple[StepPoint, ...]:
    """As the look counts them."""
    live, waiting, most = dict[str, int](), list[int](), 0
    points = []
    for event in outside:
        match event:
            case Allocate(name, nbytes):
                live[name] = nbytes
                most = max(most, sum(live.values()))
            case Free(name):
                del live[name]
            case Forward(run, _, made) | Backward(run, _, made):
                there = sum(live.values())
                points.append(StepPoint(most, tuple(waiting)))
                if isinstance(event, Forward):
                    points.append(StepPoint(there, tuple(waiting), run, "forward"))
                    waiting.append(run)
                else:
                    waiting.remove(run)
                    points.append(StepPoint(there, tuple(waiting), run, "backward"))
                live |= {one.name: one.nbytes for one in made}
                most = sum(live.values())
    return (*points, StepPoint(most, tuple(waiting)))


def graph_of(
    compile_version: Callable[[Request], CompiledVersion],
    plan: Callable[[Request], Any],
    offers: Callable[[Request, int], Part],
) -> Any:
    """What a graph does, as far as it is asked here."""
    options = SimpleNamespace(reserve=None, report=None)
    return SimpleNamespace(compile=compile_version, plan=plan, as_part=offers, options=options)


def in_step(
    graph: Any, request: Request, runs: int, seen: StepDescription | None, index: int = 0
) -> GraphInStep:
    """A graph that runs so many times at once, alone under its budget."""
    where = Surroundings(HERE, ModelContext(runs), BudgetScope(), (0, None))
    return GraphInStep(graph, request, where, Role(seen, index))


@dataclass
class Step:
    """A step whose versions are compiled at once."""

    budget: int
    tuning: int = 10 * MIB
    part_of: tuple[int, ...] = (0,) * RUNS
    compiled: list[Offer] = field(default_factory=list)

    def seen(self) -> StepDescription:
        """As it was looked at."""
        places = tuple(self.part_of[:k].count(own) for k, own in enumerate(self.part_of))
        return StepDescription(
            points_of(outside_of(RUNS)),
            self.part_of,
            places,
            [PART] * len(set(self.part_of)),
            None,
            lambda runs: outside_of(len(runs)),
        )

    def plan(self, request: Request) -> Any:
        """The report of the fastest version within the limits."""
        wanted, between = request.budget.soft_limit, request.budget.between
        assert wanted is not None
        one, (saved, again) = next(
            (one, way)
            for one, way in zip(OFFERS, WAYS.items(), strict=True)
            if one.peak_bytes <= wanted and one.peak_bytes - one.between_bytes <= wanted - between
        )
        figures = {"counted_peak_bytes": one.peak_bytes, "held_bytes": 0, "saved_bytes": 0}
        events = events_of(saved, again)
        return SimpleNamespace(graph=0, as_part=one.version, events=events, **figures)

    def runs(self, seen: StepDescription | None, index: int = 0) -> GraphInStep:
        def compile_version(request: Request) -> CompiledVersion:
            report = self.plan(request)
            self.compiled += [one for one in OFFERS if one.version == report.as_part]
            return CompiledVersion(lambda: report, report)

        allocator = AllocatorSettings()
        request = Request(
            Budget(self.budget, autotune=self.tuning, metric="reserved", allocator=allocator)
        )
        graph = graph_of(compile_version, self.plan, lambda request, count: PART)
        return in_step(graph, request, RUNS, seen, index)


def compiled(step: Step) -> RunVersions:
    """What all runs of its one part take."""
    return step.runs(step.seen()).compiled_for(RUNS)


def reserved_bytes(seen: StepDescription, runs: RunVersions) -> int:
    """What the model of the allocator takes for what was compiled."""
    found = seen.reserved(runs.version_of_run, AllocatorSettings())
    assert found is not None
    return found.nbytes


def test_large_blocks_that_do_not_fit_between_others_are_planned_for() -> None:
    """At what the fastest versions allocate, slower ones are taken: more would be reserved."""
    fastest = Step(4096 * MIB)
    seen = fastest.seen()
    taken = fastest.runs(seen).compiled_for(RUNS)
    allocated = seen.step().peak_bytes([0] * RUNS)
    assert taken.step_peak_bytes > allocated + 8 * MIB
    budget = allocated + 8 * MIB + fastest.tuning
    tight = Step(budget)
    seen = tight.seen()
    runs = tight.runs(seen).compiled_for(RUNS)
    assert runs.version_of_run != (0,) * RUNS or tight.compiled[-1:] != [OFFERS[0]]
    assert reserved_bytes(seen, runs) == runs.step_peak_bytes <= budget - tight.tuning


def test_the_least_that_is_named_is_reserved_and_enough() -> None:
    with pytest.raises(fxremat.InfeasibleBudget, match="without using them") as refused:
        compiled(Step(100 * MIB))
    least = refused.value.minimum_bytes
    assert least is not None
    for budget in (least, least + 50 * MIB):
        step = Step(budget)
        seen = step.seen()
        runs = step.runs(seen).compiled_for(RUNS)
        assert reserved_bytes(seen, runs) <= budget - step.tuning
    with pytest.raises(fxremat.InfeasibleBudget) as again:
        compiled(Step(least - MIB))
    assert again.value.minimum_bytes == least


def test_two_parts_are_known_when_the_last_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """The first one has run by then, and what both reserve together is within the budget."""
    step = Step(1200 * MIB, part_of=(0, 0, 1, 1))
    seen = step.seen()
    step.runs(seen, 0).compiled_for(2)
    assert "allocated, of" in caplog.text
    assert "reserved, of" not in caplog.text
    second = step.runs(seen, 1).compiled_for(2)
    assert "reserved, of" in caplog.text
    assert second.step_peak_bytes <= step.budget - step.tuning
    assert seen.reserved((0,) * RUNS, AllocatorSettings()) is not None


def looked_at() -> StepRecorder:
    """One step of a model, with its events."""
    torch._dynamo.reset()
    model, tokens = Chain(3, 128, words=2000), torch.zeros(8, 512, dtype=torch.long)
    for block in model.blocks:
        block.compile()
    options = {"memory_budget": "1GiB", "solver": "greedy", "variants": "none"}
    look = StepRecorder(
        parse_options(options, device_total_bytes=None), HERE, keeps_events=True, held_bytes=4096
    )
    look.record(model, list(model.blocks), ((tokens,), {}))
    return look


def test_events_outside_are_the_points_of_the_look() -> None:
    look = looked_at()
    points = points_of(iter(look.meter.events))
    assert [m for m in points if m.running is not None] == [
        m for m in look.course.points if m.running is not None
    ]
    assert [m.outside_bytes for m in points] == [m.outside_bytes for m in look.course.points]
    assert look.meter.events[0] == Allocate("held", 4096)
    forwards = [event for event in look.meter.events if isinstance(event, Forward)]
    before = [event.results[0].name for event in forwards[:-1]]
    assert all(name in one.inputs for name, one in zip(before, forwards[1:], strict=True))
    backwards = [event for event in look.meter.events if isinstance(event, Backward)]
    assert [event.run for event in backwards] == [2, 1, 0]
    assert all(len(event.incoming) == 1 and len(event.gradients) == 7 for event in backwards)


@contextmanager
def planned_for(name: str) -> Iterator[None]:
    """Graphs that were traced here are planned for a card that is not."""
    token = device.PLANNED_FOR.set(card_named(name))
    try:
        with fake_cuda():
            yield
    finally:
        device.PLANNED_FOR.reset(token)


@pytest.mark.slow
def test_counted_versions_in_a_step_that_was_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """On a card that is not here: requested bytes are those of the points, to the byte."""
    caplog.set_level(logging.INFO, "fxremat")
    look = looked_at()
    with planned_for("H100"):
        seen = look.description()
        graph = look.graphs[0].graph
        assert seen.request is not None
        assert seen.request.budget.metric == "reserved"
        asked = seen.request.with_budget(autotune=0)
        planned = graph_of(
            lambda request: CompiledVersion(lambda: None, graph.plan(request)),
            graph.plan,
            graph.as_part,
        )
        runs = in_step(planned, asked, 3, seen).compiled_for(3)
    assert reserved_bytes(seen, runs) == runs.step_peak_bytes
    assert "reserved, of 1.00 GiB" in caplog.text


@pytest.mark.parametrize(("limit", "least"), [(8, 20), (16, 15), (24, 15)])
def test_a_budget_is_not_refused_that_the_code_keeps(limit: int, least: int) -> None:
    """Of 20 bytes that are planned the code takes 15, as it does within 20 bytes for sure."""
    made: Any = SimpleNamespace(as_part=Version(1.0, 5, 6, 15), events=None)
    step = StepDescription(
        (StepPoint(0, (), 0, "forward"), StepPoint(0, (), 0, "backward")),
        (0,),
        (0,),
        [Part(Interface(0, 0, 0, 0, 0), (Offer(Version(1.0, 5, 6, 20), 20, 0),))],
        planners={0: lambda offer, limit_bytes: made},
    )
    assert step.least(Budget(limit), lambda chosen: None).budget_bytes == least


def test_what_a_refused_version_is_guessed_to_take_is_not_named() -> None:
    """Its search names 30 bytes, its dry run counts 32: the latter is the least."""
    asked = list[Offer]()

    def plan(offer: Offer, limit_bytes: int) -> Any:
        asked.append(offer)
        if len(asked) == 1:
            raise fxremat.InfeasibleBudget(limit_bytes, limit_bytes + 10)
        return SimpleNamespace(as_part=Version(1.0, 10, 12, 32), events=None)

    step = StepDescription(
        (StepPoint(0, (), 0, "forward"), StepPoint(0, (), 0, "backward")),
        (0,),
        (0,),
        [Part(Interface(0, 0, 0, 0, 0), (Offer(Version(1.0, 5, 6, 20), 20, 0),))],
        planners={0: plan},
    )
    least = step.least(Budget(8), lambda chosen: None)
    assert len(asked) == 2
    assert least.budget_bytes == 32
