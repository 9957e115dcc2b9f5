"""What lies around a part that is compiled: its runs, its arena, and graphs that share a budget."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.core.step import Gathered, Interface, Version, in_order, last_first
from fxremat.memory.arena import Arena
from fxremat.options import Options
from fxremat.planner.step_versions import fastest
from fxremat.step import context, scope
from fxremat.step import scope as scopes
from fxremat.step.description import StepDescription, repeated_step
from fxremat.step.versions import Offer, Part, followed_by
from tests.end_to_end import QUICK
from tests.ranks import Blocks
from tests.small import Block, Stack, seeded
from tests.test_step_watched import Case

pytestmark = pytest.mark.usefixtures("fresh_budgets")

HOST = torch.device("cpu")


def bytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def seen_in(model: nn.Module, parts: list[nn.Module], **given: Any) -> list[context.ModelContext]:
    """What the backend sees around each graph that is compiled."""
    found: list[context.ModelContext] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(context.model_context(Options(**given), HOST))
        return gm

    for part in parts:
        part.compile(backend=backend)
    model(torch.ones(2, 8))
    return found


def test_runs_are_modules_of_the_class_that_are_compiled_by_themselves() -> None:
    """Unless it is said how many there are."""
    model = Blocks(4, 8)
    found = seen_in(model, list(model.blocks)[:3])[0]
    assert found.runs == 3
    assert found.nbytes == bytes_of(model) - bytes_of(model.blocks[0]) + 8
    assert len(found.everything) == len(list(model.parameters())) + 1
    model = Blocks(4, 8)
    assert seen_in(model, list(model.blocks), instances=7)[0].runs == 7


def test_what_is_compiled_as_a_whole_runs_once_and_has_nothing_around() -> None:
    model = Blocks(4, 8)
    found = seen_in(model, [model])[0]
    assert (found.runs, found.nbytes) == (1, 0)
    assert context.model_context(Options(), HOST) == context.ModelContext()  # a function


def test_parts_that_a_graph_break_leads_to_are_counted_too() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Blocks(4, 8)
    model.blocks = nn.ModuleList([Broken(8), Broken(8), Broken(4)])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))  # type: ignore[method-assign]
    assert max(each.runs for each in seen_in(model, [model])) == 2


def test_what_lies_around_is_not_kept_alive() -> None:
    model = Blocks(4, 8)
    found = seen_in(model, list(model.blocks))[0]
    torch._dynamo.reset()
    del model
    gc.collect()
    assert all(tensor() is None for tensor in found.others)


def part_of(given: int) -> Part:
    """It saves 1,000 bytes beside what it is given."""
    version = Version(1.0, 1000, 3000, 5000)
    return Part(Interface(200 + given, given, 50, 50, 20), (Offer(version, 0, 0),))


@pytest.mark.parametrize(("kept", "again"), [(0, 7), (7, 0), (3, 7)])
def test_neighbours_of_a_run_are_gathered_in_the_backward(kept: int, again: int) -> None:
    """Unless all of their parameters stay while they wait; a part of these may."""
    gathered = Gathered(ahead=7, sent=8, kept=kept)
    points = in_order([part_of(0).interface], [0, 0, 0], last_first(3), 100, gathered)
    forward = [107, 107 + kept, 107 + 2 * kept, 207 + 3 * kept]
    backward = [150 + again + 2 * kept, 178 + again + kept, 198]
    assert [point.outside_bytes for point in points] == forward + backward


def test_blocks_that_follow_hold_what_they_are_given() -> None:
    first = part_of(0)
    others = followed_by(first, 50)
    assert others.interface.given == 50
    step = repeated_step(first, range(3), -100, followers_given=50).step()
    assert [point.outside_bytes for point in step.points] == [100, 150, 150, 200, 150, 170, 190]
    last = step.points[4]
    assert step.bytes_at(last, [0, 0, 0]) == 150 + 1000 + 1050 + 5050


def test_micro_batches_may_go_backward_in_turn() -> None:
    """Of two versions the one that saves more may wait while the other runs backward."""
    little, much = Version(2.0, 1000, 3000, 5000), Version(1.0, 4000, 4500, 6000)
    part = Part(Interface(0, 0, 50, 50, 20), (Offer(little, 0, 0), Offer(much, 0, 0)))
    last = repeated_step(part, range(2), 100).step()
    assert last.peak_bytes([0, 1]) == 150 + 1000 + 6000
    assert last.peak_bytes([1, 0]) == 150 + 4000 + 5000
    either = repeated_step(part, range(2), 100, either_order=True).step()
    assert either.peak_bytes([0, 1]) == either.peak_bytes([1, 0]) == 150 + 4000 + 5000
    assert [point.outside_bytes for point in either.points[3:]] == [150, 170, 150, 170]


NONE = Interface(0, 0, 0, 0, 0)
FAST, SMALL = Version(1.0, 700, 700, 700), Version(2.0, 100, 200, 200)
SEEMS, TAKES = Version(1.0, 10, 20, 20), Version(1.0, 10, 400, 400)


def two_parts(other: Part, asked: list[Version]) -> StepDescription:
    """A step of two runs, the second of a part whose dry run says that it ``TAKES`` more."""

    def plan(offer: Offer, limit_bytes: int) -> Any:
        asked.append(offer.version)
        return SimpleNamespace(as_part=TAKES, events=None)

    parts = [Part(NONE, (Offer(FAST, 0, 0), Offer(SMALL, 0, 0))), other]
    points = in_order([NONE, NONE], (0, 1), last_first(2), 0)
    return StepDescription(points, (0, 1), (0, 0), parts, planners={1: plan})


def test_what_others_take_is_counted_before_a_part_takes_the_rest() -> None:
    asked = list[Version]()
    step = two_parts(Part(NONE, (Offer(SEEMS, 0, 0),)), asked)
    assert fastest(step.step(), 1000) == (0, 0)
    step.know_others(0, 1000)
    assert asked == [SEEMS]
    assert fastest(step.step(), 1000) == (1, 0)
    assert step.surely(0, (1, 0), 499) is None


def test_what_others_have_compiled_is_left_to_them() -> None:
    """It is not planned once more, and a part that has the rest leaves it enough."""
    asked, compiled = list[Version](), Offer(Version(3.0, 10, 250, 250), 0, 0, exact=True)
    step = two_parts(Part(NONE, (Offer(SEEMS, 0, 0),), (compiled,)), asked)
    step.know_others(0, 1000)
    assert step.widen(0, (1, 0), 1000)
    assert step.parts[0].offers[1].version.figures[1:] == (750, 1000, 1000)
    assert not asked


@pytest.mark.parametrize(("forward_bytes", "peak_bytes"), [(500, 600), (250, 250)])
def test_both_halves_have_the_limit_of_the_higher_where_the_other_has_room(
    forward_bytes: int, peak_bytes: int
) -> None:
    offer = Offer(Version(1.0, 100, 200, 300), 400, 300)
    most = Version(1.0, 200, forward_bytes, 600)
    assert offer.within(most, 0) == Offer(most, peak_bytes, peak_bytes - 200, tight=True)


# --- arena --------------------------------------------------------------------------------


BUDGET = "6MiB"
OPTIONS: dict[str, Any] = {"executor": "inductor", "memory_budget": BUDGET, "arena": True}


class Trained(Case):
    """Blocks and their loss, compiled within a budget; graphs lie in an arena."""

    def __init__(self) -> None:
        super().__init__(loss_outside=False)
        self.models, self.given = (self.model,), (self.x,)
        self.compile(**OPTIONS)

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.call(self.x)
        return found

    def cloned(self) -> list[Tensor]:
        """The gradients that are there."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    @property
    def arena(self) -> Arena:
        (scope,) = scopes._SCOPES.values()
        assert scope.own.arena is not None
        return scope.own.arena


def test_the_peak_is_as_predicted_with_the_arena_held() -> None:
    trained = Trained()
    trained.step()
    first = trained.cloned()
    for _ in range(3):
        trained.step()
        assert all(map(torch.equal, first, trained.cloned()))
    assert trained.arena.nbytes > 0
    assert (trained.arena.conflicts, trained.arena.differences, trained.arena.missed) == (0, 0, 0)
    (report,) = fxremat.reports()
    peaks = [trained.peak_bytes() for _ in range(3)]
    assert peaks == [report.predicted_peak_bytes] * 3


def test_graphs_of_two_shapes_have_the_arena_in_turn() -> None:
    """Where they would keep too much together, each gives back all that it has to the next."""
    trained = Trained()
    how = {**QUICK, **OPTIONS}
    trained.call = torch.compile(trained.whole, backend="fxremat", options=how, dynamic=False)
    whole, half = trained.x, trained.x[:512].clone()

    def steps(x: Tensor) -> tuple[list[Tensor], int]:
        trained.x = x
        for _ in range(3):
            trained.step()
        return trained.cloned(), trained.arena.nbytes

    found = [steps(x) for x in (whole, half)]
    (scope,) = scopes._SCOPES.values()
    needed = sorted(graph.layout.arena_bytes for graph in scope.graphs)
    assert found[1][1] == needed[1] > needed[0] > 0
    scope.own.in_turn = True
    again = [steps(x) for x in (whole, half)]
    assert sorted(nbytes for _, nbytes in again) == needed
    for (one, _), (other, _) in zip(found, again, strict=True):
        assert all(map(torch.equal, one, other))
    assert (trained.arena.conflicts, trained.arena.missed) == (0, 0)


def test_an_evaluation_has_the_bytes_of_the_arena() -> None:
    """No half keeps the block alive that is given back."""
    trained = Trained()
    for _ in range(3):
        trained.step()
    before, taken = trained.cloned(), trained.arena.nbytes
    block = weakref.ref(trained.arena.block)
    trained.forget_gradients()
    trained.evaluate()
    assert block() is None
    assert trained.arena.nbytes == 0
    peak = trained.peak_bytes(trained.evaluate)
    assert peak <= fxremat.reports()[-1].predicted_peak_bytes
    trained.step()
    assert trained.arena.nbytes == taken
    assert all(map(torch.equal, before, trained.cloned()))
    assert trained.arena.conflicts == 0


def test_gradients_that_live_on_are_planned_for_before_the_forward() -> None:
    """Two micro-batches: the budget is kept from the first iteration on that has both."""
    trained = Trained()

    def iteration() -> None:
        trained.step()
        trained.run()

    iteration()
    reports = fxremat.reports()
    assert len(reports) == 2
    weights = sum(p.nbytes for p in trained.model.parameters())
    assert reports[1].held_bytes - reports[0].held_bytes == weights
    for _ in range(3):
        assert trained.peak_bytes(iteration) <= 6 * 2**20
    assert len(fxremat.reports()) == 2
    doubled = trained.cloned()
    trained.step()
    for one, two in zip(trained.cloned(), doubled, strict=True):
        torch.testing.assert_close(2 * one, two)


# --- scope --------------------------------------------------------------------------------


SHARED = "64MiB"


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fxremat", options={**QUICK, **options})


def test_a_budget_is_the_same_however_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By equal options, in other words, or by the environment; another number is another one."""
    monkeypatch.setenv("FXREMAT_MEMORY_BUDGET", SHARED)
    calls = [
        compiled(nn.Linear(8, 8), memory_budget=SHARED),
        compiled(nn.Linear(8, 9), memory_budget=SHARED),
        compiled(nn.Linear(8, 10), memory_budget=64 * 2**20),
        compiled(nn.Linear(8, 11)),
    ]
    for call in calls:
        call(torch.ones(4, 8)).sum().backward()
    [only] = scope._SCOPES.values()
    assert len(only.graphs) == len(calls)
    assert len(only.given.parameters) == 2 * len(calls)
    compiled(nn.Linear(8, 12), memory_budget="65MiB")(torch.ones(4, 8)).sum().backward()
    assert len(scope._SCOPES) == 2


def test_what_is_gone_counts_no_longer() -> None:
    """A model, what it was given, and a forward that waits, whoever else goes on."""
    model, x = seeded(Stack, 64, 32)
    waiting = compiled(model, memory_budget=SHARED)(x)
    other = nn.Linear(8, 8)
    compiled(other, memory_budget=SHARED)(torch.ones(4, 8)).sum().backward()
    [only] = scope._SCOPES.values()

    def neighbours() -> scope.Neighbours:
        return only.neighbours((0, None), other.parameters(), (), torch.device("cpu"), 1)

    before = neighbours()
    assert before.resident >= sum(weight.nbytes for weight in model.parameters())
    assert before.batch >= x.nbytes
    assert before.waiting > 0
    assert len(only.graphs) == 2
    del waiting
    gc.collect()
    assert not only.waiting
    assert neighbours().waiting == 0
    del model, x
    gc.collect()
    after = neighbours()
    assert (after.resident, after.batch, after.waiting) == (0, 0, 0)
    assert len(only.given.parameters) == 2


def test_graphs_are_gone_with_the_code_that_runs_them() -> None:
    """Dynamo keeps that code longer than its modules; such a graph holds nothing."""
    model, x = seeded(Stack, 64, 32)
    compiled(model, memory_budget=SHARED)(x).sum().backward()
    [only] = scope._SCOPES.values()
    assert only.graphs
    del model, x
    gc.collect()
    assert not only.given.parameters
    assert not only.given.batch
    torch._dynamo.reset()
    gc.collect()
    assert not only.graphs


def test_what_only_garbage_holds_while_it_compiles_is_not_planned_for() -> None:
    """Dynamo leaves cycles behind that hold what the next graph is given until they are collected.

    Nothing is collected where nothing was compiled since a result was made: that takes long.
    """
    at_hand = []
    for keep in (False, True):
        torch._dynamo.reset()
        first, second = (compiled(nn.Linear(8, 8), memory_budget=SHARED) for _ in range(2))
        result = first(torch.ones(4, 8))
        loss, cycle = second(result).sum(), [result]
        cycle.append(cycle)
        at_hand += [result] if keep else []
        del result, cycle
        with mock.patch.object(gc, "collect", side_effect=gc.collect) as collected:
            loss.backward()
        assert collected.call_count == 1
        [only] = scope._SCOPES.values()
        held = [one.held_bytes for one in only.order if one.phase == "forward"]
        assert held == [4 * 8 * 4 if keep else 0, 0]
        scope.forget()
        with mock.patch.object(gc, "collect") as collected:
            compiled(nn.Linear(8, 8), memory_budget=SHARED)(torch.ones(4, 8)).sum().backward()
        assert not collected.called
        scope.forget()
