"""The first steps are measured: what no plan has seen is named when it breaks the budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import fxremat
from fxremat.compat.measuring import HostRecording
from fxremat.errors import BudgetExceeded
from fxremat.memory import watched_steps
from fxremat.memory.watched_steps import WATCHED_STEPS, StepWatch
from fxremat.sizes import MIB
from fxremat.step import scope
from fxremat.step.promise import Observed
from tests.end_to_end import QUICK, Steps, warned
from tests.graphs import Net
from tests.small import Block

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORDS = 4000


pytestmark = pytest.mark.usefixtures("fresh_budgets")


class Case(Steps):
    """Blocks, with a head and a loss that are not compiled; or a hook that keeps what it gets."""

    def __init__(self, *, loss_outside: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(64) for _ in range(4)))
        self.head = nn.Linear(64, WORDS)
        self.x, self.target = torch.randn(1024, 64), torch.randint(WORDS, (1024,))
        self.models, self.given = (self.model, self.head), (self.x, self.target)
        self.loss_outside = loss_outside
        self.call: Callable[..., Any] = self.model

    def compile(self, **options: Any) -> None:
        torch._dynamo.reset()
        scope.forget()
        how: dict[str, Any] = {"backend": "fxremat", "options": {**QUICK, **options}}
        for block in self.model if self.loss_outside else ():
            block.compile(**how)
        if not self.loss_outside:
            self.call = torch.compile(self.whole, **how)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    def run(self) -> None:
        result: Any = self.call(self.x)
        if self.loss_outside:
            result = F.cross_entropy(self.head(result), self.target)
        result.backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def said(self, steps: int = 4) -> list[BudgetExceeded]:
        """The warnings of so many steps."""
        with warned(BudgetExceeded) as said:
            self.steps(steps)
        return said


def test_a_loss_outside_is_planned_for_once_it_was_seen() -> None:
    """It is said once; from then on the budget is kept, and in the next run from the first step."""
    case, budget = Case(loss_outside=True), 56 * MIB
    case.compile(memory_budget=budget)
    assert case.said(3) == []  # in two of them something is compiled
    (found,) = case.said(1)
    assert found.again
    assert "next step is planned for this" in str(found)
    assert case.peak_bytes() <= budget
    case.compile(memory_budget=budget)
    assert case.said() == []
    assert case.peak_bytes() <= budget


def test_states_of_optimizers_are_part_of_what_a_step_was_seen_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, resident = Case(loss_outside=False), list[int]()
    monkeypatch.setattr(StepWatch, "begin", lambda self, nbytes, _: resident.append(nbytes))
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-6)
    case.compile(memory_budget=64 * MIB)
    for _ in range(3):
        case.step()
        optimizer.step()
    states = sum(x.nbytes for one in optimizer.state.values() for x in one.values())
    assert states > MIB // 2
    assert [n - resident[0] for n in resident] == [0, states, states]


def test_what_runs_outside_is_refused_where_no_plan_leaves_so_much() -> None:
    """It was measured, and the number that is named is kept. With a reserve for it from the start,
    and as much more, nothing is said."""
    case, budget = Case(loss_outside=True), 48 * MIB
    case.compile(memory_budget=budget)
    with warned(BudgetExceeded) as said, pytest.raises(fxremat.InfeasibleBudget) as refused:
        case.steps(14)
    assert said[0].budget_bytes == budget
    assert all(one.again for one in said)
    named = refused.value.minimum_bytes
    assert named is not None
    measured = said[0].taken_bytes  # with the head and the target, which no graph is given
    assert budget < named < measured
    case.compile(memory_budget=named)
    case.said(12)
    assert case.peak_bytes() <= named
    enough = measured + 2 * MIB
    case.compile(memory_budget=enough, reserve=min(said[0].outside_bytes, enough - 8 * MIB))
    assert case.said(5) == []
    assert case.peak_bytes() <= enough


def test_tensors_that_a_hook_keeps_are_named() -> None:
    """While the step runs, that is; what is kept between steps is no part of them."""
    case, kept = Case(loss_outside=False), list[torch.Tensor]()
    case.compile(memory_budget="1GiB")
    case.step()
    plain = case.peak_bytes()

    def told(*, inside: bool) -> list[BudgetExceeded]:
        case.compile(memory_budget=plain)
        with warned(BudgetExceeded) as said:
            for _ in range(4):
                if not inside:
                    kept.append(torch.ones(2 * MIB))
                case.model.zero_grad(set_to_none=True)
                loss = case.call(case.x)
                if inside:
                    loss.register_hook(lambda _: kept.append(torch.ones(2 * MIB)))
                loss.backward()
        return said

    assert told(inside=False) == []
    found = told(inside=True)[0]
    assert found.taken_bytes - plain >= 4 * MIB


@pytest.mark.parametrize("part", ["all of it", "a part"])
def test_a_step_under_the_profiler_is_not_looked_at(part: str) -> None:
    """Nor is the profiler, which begins in its middle, disturbed."""
    watch = StepWatch(CPU, 2 * MIB, False, lambda: 0)

    def step() -> BudgetExceeded | None:
        if part == "a part":
            watch.begin(0)
        with torch.profiler.profile(profile_memory=True) as prof:
            if part == "all of it":
                watch.begin(0)
            torch.ones(4 * MIB)
        assert any(each.key == "aten::ones" for each in prof.key_averages())
        return watch.end("graph 0", 0, 0)

    watch.begin(0)
    assert watch.end("graph 0", 0, 0) is None  # nobody knows what was compiled before
    for _ in range(WATCHED_STEPS):
        assert step() is None
    assert watch.looked_at == 0
    assert not watch.is_over


def test_only_steps_in_which_nothing_is_compiled_count() -> None:
    count = [0]
    watch = StepWatch(CPU, 100 * MIB, False, lambda: count[0])

    def step(nbytes: int) -> BudgetExceeded | None:
        watch.begin(60 * MIB)
        torch.empty(nbytes, dtype=torch.uint8)
        return watch.end("graph 0", 10 * MIB, 5 * MIB)

    assert step(90 * MIB) is None  # nobody knows what was compiled before
    count[0] += 1
    assert step(90 * MIB) is None
    count[0] += 1
    assert step(90 * MIB) is None
    assert step(90 * MIB) is None  # what it freed of before is not known
    assert not watch.is_over
    found = step(90 * MIB)
    assert found is not None
    assert found.taken_bytes == 150 * MIB
    assert found.outside_bytes == 85 * MIB
    assert found.counted_bytes == 5 * MIB
    assert watch.is_over


def test_a_step_whose_backward_never_comes_is_not_recorded_for_ever() -> None:
    case = Case(loss_outside=False)
    case.compile(memory_budget="1GiB")
    case.step()
    loss: Any = case.call(case.x)
    assert not HostRecording.is_possible()
    del loss
    assert HostRecording.is_possible()


def test_what_a_step_frees_of_the_step_before_is_not_counted_twice() -> None:
    """As the gradients are where a loop drops them between its forward and its backward."""
    watch, kept = StepWatch(CPU, 100 * MIB, False, lambda: 0), list[torch.Tensor]()
    watch.begin(0)
    for _ in range(3):
        watch.begin(60 * MIB)
        kept[:] = []
        kept.append(torch.empty(40 * MIB, dtype=torch.uint8))
        assert watch.end("graph 0", 10 * MIB, 5 * MIB) is None
    assert watch.is_over


def test_a_step_without_a_backward_is_forgotten() -> None:
    watch = StepWatch(CPU, 100, False, lambda: 0)
    assert watch.end("graph 0", 0, 0) is None
    for _ in range(watched_steps.MOST_STEPS + 1):
        watch.begin(0)
    assert watch.is_over
    watch.abandon()


@pytest.mark.parametrize("reserved", [True, False])
def test_on_cuda_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch, reserved: bool) -> None:
    """Only what this step raised counts: before, something else may have had more."""
    most = {True: 90, False: 70}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: most[True])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: most[False])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    watch = StepWatch(CUDA, 80, reserved, lambda: 0)
    watch.begin(0)
    assert watch.end("graph 0", 20, 5) is None
    watch.begin(0)
    most.update({True: 120, False: 110})
    found = watch.end("graph 0", 20, 5)
    assert found is not None
    assert found.taken_bytes == most[reserved]
    assert found.outside_bytes == 5 + most[reserved] - 30 - 20


def test_what_a_loop_leaves_of_its_promise_is_used_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, when the optimizer has its states; and in the next run, if as much is counted."""
    case = Case(loss_outside=False)
    case.compile()
    for _ in range(2):
        case.step()
    optimizer = torch.optim.SGD(case.model.parameters(), 1e-4, momentum=0.9)
    states = sum(one.nbytes for one in case.model.parameters())
    budget = int(0.7 * case.peak_bytes()) + states
    case.compile(memory_budget=budget, optimizer=weakref.ref(optimizer))
    for _ in range(4):
        case.step()
    ((graph,),) = (list(one.graphs) for one in scope._SCOPES.values())
    first = fxremat.reports()[-1]
    assert first.time_overhead > 0
    watch = scope.scope_of(CPU, budget).watch
    assert watch is not None
    assert watch.is_over
    promised = first.predicted_peak_bytes
    watch.device, watch.reserved = CUDA, True  # the figures of a card
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: promised - states)
    case.step()
    assert len(fxremat.reports()) == 1  # the states may still come
    optimizer.step()
    case.step()
    second = fxremat.reports()[-1]
    assert len(fxremat.reports()) == 2
    assert second.held_bytes == first.held_bytes - states
    assert second.time_overhead < first.time_overhead
    watch.looked_at = WATCHED_STEPS
    case.step()
    assert len(fxremat.reports()) == 2
    limit = graph.request.budget.limit
    for counted, held in ((graph.observed.counted, -states), (0, 0)):
        again = Observed(graph.observed.signature, limit, str(CPU))
        again.recall(counted)
        assert again.held == held


class Triplet(Steps):
    """A model that runs three times in a step, whose loss is outside."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(64) for _ in range(3)), nn.Linear(64, 32))
        self.models = (self.model,)
        self.given = [torch.randn(2048, 64) for _ in range(3)]
        self.call: Callable[..., Any] = self.model
        self.whole: nn.Module = self.model

    def compile(self, budget: int) -> None:
        torch._dynamo.reset()
        scope.forget()
        options = {**QUICK, "memory_budget": budget}
        self.call = torch.compile(self.whole, backend="fxremat", options=options)

    def run(self) -> None:
        loss: Any = F.triplet_margin_loss(*map(self.call, self.given))
        loss.backward()

    def refused(self) -> int | None:
        """The least that an error names in the first steps."""
        try:
            for _ in range(10):
                self.step()
        except (BackendCompilerFailed, fxremat.InfeasibleBudget) as error:
            found: Any = getattr(error, "inner_exception", error)
            return int(found.minimum_bytes)
        return None


@pytest.mark.filterwarnings("ignore::fxremat.PromiseBroken", "ignore::fxremat.BudgetExceeded")
def test_a_budget_that_is_exceeded_again_ends_in_an_error_that_names_one_that_is_kept() -> None:
    """It is not exceeded for ever: what is named tells of one run, two, four, and of the loss."""
    case, named = Triplet(), [MIB]
    case.compile(MIB)
    while (least := case.refused()) is not None:
        named.append(least)
        case.compile(least)
    assert case.peak_bytes() <= named[-1]
    assert len(named) <= 5


class TwoLosses(Triplet):
    """Two losses of one run, whose backwards come one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 64)])
        self.models, self.given = (self.model, self.heads), self.given[:1]
        self.words = torch.randint(10, (2048,))
        self.whole = Net(self.losses, model=self.model, heads=self.heads)

    def losses(self, net: Any, x: torch.Tensor) -> Any:
        made = net.model(x)
        first, second = (head(made) for head in net.heads)
        return F.cross_entropy(first, self.words), F.mse_loss(second, x)

    def run(self) -> None:
        first, second = self.call(self.given[0])
        first.backward(retain_graph=True)
        second.backward()


@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_what_a_retained_graph_keeps_is_planned_for_once_it_was_seen() -> None:
    case = TwoLosses()
    case.call = torch.compile(case.whole)
    for _ in range(2):
        case.step()
    budget = case.peak_bytes() * 60 // 100
    case.compile(budget)
    assert case.refused() is None
    assert case.peak_bytes() <= budget
