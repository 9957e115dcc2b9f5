"""Which plans are proposed, which candidate the search ends with, and torch's own partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxremat.compat.joint_graph import extract_forward_backward
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.compile.request import Budget, Policy, Request
from fxremat.compile.search.candidates import Candidate, Evaluation, Order
from fxremat.compile.search.planning import LOCAL_SEARCH, Planning
from fxremat.compile.search.proposals import (
    Proposals,
    UnderAim,
    fastest_under,
    followed,
    least,
    plan_of_torch,
    steps_again,
)
from fxremat.compile.search.search import Search, SearchResult
from fxremat.compile.stage_times import StageTimes
from fxremat.core.check import check
from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.timeline import replay
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.variants import insertion
from tests.chains import blocks, chains, homogeneous
from tests.graphs import Capture, Net, batch, capture, linear
from tests.test_variants_insertion import RULES, seen

PROBLEM = blocks(4)
NEAR_PEAK: Final[Order] = "planned near the peak"
NOTHING = fx.GraphModule({}, fx.Graph())


def draft_of(problem: Problem) -> Draft:
    """A graph of which only the problem is known."""
    estimate = Estimate(problem, cast(Any, None), {}, {}, fused=True)
    return Draft(NOTHING, 0, estimate=estimate)


@cache
def planning(solver: str = "greedy") -> Planning:
    """The planner itself; it answers each question once."""
    return Planning(Request(policy=Policy(solver=solver)), StageTimes())


@dataclass
class Trial:
    """An evaluator whose peaks are made up of the planned ones, and what it has seen."""

    real: Callable[[int, str], int]
    scratch: dict[str, int] = field(default_factory=dict)
    seen: list[Evaluation] = field(default_factory=list)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """What the made-up compiler takes."""
        peak = self.real(candidate.plan.peak_bytes, candidate.order)
        self.seen.append(
            Evaluation(candidate, candidate.draft, peak, DryRun(peak, (), (), self.scratch))
        )
        return self.seen[-1]

    def follow(self, proposals: Proposals) -> list[Evaluation]:
        """Evaluate all that is proposed."""
        return list(followed(proposals, self.evaluate))


@pytest.mark.parametrize("error", [-0.3, -0.07, 0.0, 0.07])
def test_a_constant_error_of_the_planner_is_corrected(error: float) -> None:
    """What is found is near the best, however wrong the planner is by a constant."""
    whole = planning().solve(PROBLEM, None).peak_bytes
    offset, aim = round(error * whole), round(0.8 * whole)
    trial = Trial(lambda planned, order: planned + offset)
    trial.follow(UnderAim(draft_of(PROBLEM), aim, planning()).proposals())
    found = fastest_under(aim, trial.seen)
    best = planning().solve(PROBLEM, aim - offset)
    assert found is not None
    assert found.plan.time_us * (1 - MEASURABLE) <= best.time_us <= found.plan.time_us


@pytest.mark.parametrize(("seed", "floats"), [(4, True), (400, False)])
def test_where_a_mask_of_a_seed_runs_again_so_is_all_that_does(seed: int, floats: bool) -> None:
    """Inductor could make it, and what reads it, far too early."""
    sizes = {"seed": seed, "mask": 100, "dropped": 100, "x": 100, "wide": 900, "g": 1}
    ops = (
        Op("seed", (), ("seed",), 1.0, repeatable=False),
        Op("mask", ("seed",), ("mask",), 1.0),
        Op("drop", ("x", "mask"), ("dropped",), 1.0),
        Op("wide", ("dropped",), ("wide",), 1.0, phase="backward"),
        Op("g", ("x", "mask", "dropped"), ("g",), 1.0, phase="backward"),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    problem = Problem("masks", values, ops, (), ("x",), ("g",))
    steps = ("seed", "mask", "drop", "wide", "mask", "drop", "g")
    line = replay(problem, steps)
    plan = Plan(steps, "by hand", 10_000, line.peak_bytes, line.time_us)
    found = Candidate.near_peak(draft_of(problem), plan, 10_000)
    assert found.held == (frozenset({4, 5}) if floats else frozenset())


def test_what_a_dry_run_shows_of_scratch_memory_is_known_to_later_plans() -> None:
    """An op that needs much more than was known is planned for with that."""
    op = PROBLEM.ops[5]
    trial = Trial(lambda planned, order: planned, scratch={op.name: 500})
    seen = trial.follow(least(draft_of(PROBLEM), planning(LOCAL_SEARCH), []))
    assert seen[0].plan.peak_bytes < 500 <= seen[-1].plan.peak_bytes


def showing(candidate: Candidate, more: dict[str, int]) -> Evaluation:
    """The dry run of a candidate whose ops take more than planned by so many bytes each."""
    problem = candidate.draft.problem
    line = replay(problem, candidate.plan.steps)
    live = [n + more.get(str(s), 0) for s, n in zip(line.steps, line.live_bytes, strict=True)]
    computed = tuple(f"{step}_recompute" for step in line.steps)
    shown = DryRun(max(live), tuple(live), (), {}, computed=computed)
    return Evaluation(candidate, candidate.draft, shown.peak_bytes, shown)


def test_what_is_live_beside_an_op_is_corrected_where_it_is_too_much() -> None:
    """By how much the plan was wrong there; what is within the aim is left as it was."""
    plan = planning().solve(PROBLEM, None)
    candidate = Candidate.planned(draft_of(PROBLEM), plan)
    line = replay(PROBLEM, plan.steps)
    highest = str(line.steps[line.live_bytes.index(plan.peak_bytes)])
    lowest = str(line.steps[line.live_bytes.index(min(line.live_bytes))])
    shown = showing(candidate, {highest: 7, lowest: 1})
    corrections = shown.corrections_above(plan.peak_bytes)
    assert corrections.beside == {highest: 7}
    corrected = corrections.apply_to(PROBLEM)
    assert replay(corrected, plan.steps).peak_bytes == shown.peak_bytes == plan.peak_bytes + 7
    assert shown.corrections_above(plan.peak_bytes + 7).apply_to(PROBLEM) == PROBLEM


@given(st.lists(st.integers(-20, 20), min_size=32, max_size=32), st.floats(0.4, 1.0))
def test_any_errors_of_the_planner(errors: list[int], share: float) -> None:
    """Candidates differ, are few, and one that is under the aim is not left for a slower one."""
    aim = round(share * planning().solve(PROBLEM, None).peak_bytes)
    trial = Trial(lambda planned, order: planned + errors[planned % 32] + (order == NEAR_PEAK))
    trial.follow(UnderAim(draft_of(PROBLEM), aim, planning()).proposals())
    asked = [one.candidate for one in trial.seen]
    planned_only = [one for one in asked if one.order == "planned"]
    assert len({one.key for one in planned_only}) == len(planned_only)
    best = fastest_under(aim, trial.seen)
    for one in trial.seen:
        if best is not None and one.peak_bytes <= aim:
            assert best.plan.time_us <= one.plan.time_us


# --- attempts -----------------------------------------------------------------------------


def found_by(
    trial: Any, budget: int, own: Plan | None = None, wanted: int | None = None
) -> SearchResult:
    """What a search over one graph without variants ends with; torch's partition is made up."""
    request = Request(Budget(budget, soft_limit=wanted), policy=Policy(solver="greedy"))
    graphs: Any = SimpleNamespace(plain=draft_of(PROBLEM), offered=None)
    theirs = None if own is None else Candidate(graphs.plain, own, "torch")
    with mock.patch.object(Search, "_torch", return_value=theirs) as asked:
        found = Search(Planning(request, StageTimes()), trial, graphs).run()
    assert own is None or asked.call_args_list == [mock.call(donated=False)]
    return found


def plan_under(part: float) -> Plan:
    full = planning().solve(PROBLEM, None).peak_bytes
    return planning().solve(PROBLEM, int(part * full))


@pytest.mark.parametrize(
    ("time", "peak", "order"), [(0.99, 0, "torch"), (1.01, 0, NEAR_PEAK), (0.99, 1, NEAR_PEAK)]
)
def test_torchs_partition_is_taken_where_it_is_faster_and_fits(
    time: float, peak: int, order: str
) -> None:
    """Never the one whose buffers are donated: something else fits."""
    best = plan_under(0.7)
    own = replace(best, time_us=time * best.time_us, steps=(*best.steps, best.steps[0]))
    budget = best.peak_bytes
    trial = Trial(lambda planned, order: budget + peak if order == "torch" else planned)
    found = found_by(trial, budget, own)
    assert found.evaluation.candidate.order == order
    assert not found.over


def test_the_least_that_is_named_is_of_candidates_that_no_budget_changes() -> None:
    """Not of those that were made for the budget, though one of them takes less."""
    least = plan_under(0.0).peak_bytes
    budget = int(1.05 * least)

    def real(planned: int, order: str) -> int:
        if order == NEAR_PEAK and planned > least:
            return budget + 1
        return planned + (2000 if order == NEAR_PEAK else 1000)

    trial = Trial(real)
    found = found_by(trial, budget)
    assert NEAR_PEAK in [one.candidate.order for one in trial.seen]
    assert found.over
    assert found.evaluation.candidate.order == "planned"
    assert found.evaluation.peak_bytes == least + 1000


def test_what_is_within_the_budget_is_not_taken_where_less_is_wanted_and_found() -> None:
    """A part of a step is taken as soon as it is near what is wanted."""
    wanted = plan_under(0.7).peak_bytes
    more = wanted // 50
    trial = Trial(lambda planned, order: planned + more * (order == NEAR_PEAK))
    found = found_by(trial, 2 * wanted, wanted=wanted)
    assert trial.seen[0].peak_bytes == wanted + more
    assert found.evaluation.candidate.order == "planned"
    assert found.evaluation.peak_bytes <= wanted
    trial = Trial(lambda planned, order: planned + 1)
    found = found_by(trial, 2 * wanted, wanted=wanted)
    assert [one.peak_bytes for one in trial.seen] == [wanted + 1]
    assert found.evaluation is trial.seen[0]


def test_variants_that_were_found_before_are_taken_without_a_search_for_others() -> None:
    draft, unasked = draft_of(PROBLEM), mock.PropertyMock(side_effect=AssertionError)
    graphs = mock.Mock(plain=draft, draft={("this", "that"): draft}.__getitem__)
    type(graphs).offered = unasked
    policy = Policy(solver="greedy", taken=("this", "that"))
    request, trial = Request(Budget(10**9), policy=policy), Trial(lambda planned, order: planned)
    found = Search(Planning(request, StageTimes()), cast("Any", trial), graphs).run()
    assert not found.over
    assert found.evaluation.candidate.draft is draft


# --- torch plan ---------------------------------------------------------------------------


ATEN = torch.ops.aten


def forward_values(problem: Problem) -> list[str]:
    return [name for op in problem.ops if op.phase == "forward" for name in op.writes]


def test_what_is_computed_runs_again_once() -> None:
    problem = homogeneous(3)
    assert steps_again(problem, set()) == problem.base_steps()
    assert steps_again(problem, {"y1"}) == ("f0", "f1", "f2", "loss", "f1", "b2", "b1", "b0")


@given(st.data(), chains().filter(lambda problem: bool(forward_values(problem))))
def test_every_choice_of_values_is_a_schedule(data: st.DataObject, problem: Problem) -> None:
    """The checker takes it; computing less never takes more time."""
    names = forward_values(problem)
    again = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    less = again & set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    steps = steps_again(problem, again)
    verdict = check(problem, steps)
    assert verdict.ok, verdict.failures
    fewer_runs = replay(problem, steps_again(problem, less)).time_us
    assert fewer_runs <= replay(problem, steps).time_us


def saving(seen: Capture, *saved: fx.Node) -> Draft:
    """The graph cut so that the forward saves these nodes."""
    joint = seen.joint
    halves = extract_forward_backward(
        joint.module, [*joint.primals, *saved], num_fwd_outputs=1, static_inputs=()
    )
    return Draft(joint.module, 1, joint=joint, estimate=seen.found, halves=halves)


def test_what_is_saved_as_a_view_is_held() -> None:
    """The forward saves the view, and the problem knows its owner."""
    net = Net(lambda net, x: net.linear(x).view(-1).sin().sum(), linear=linear())
    seen = capture(net, [batch(4, 8)])
    view = seen.calls(ATEN.view.default)[0]
    draft = saving(seen, view)
    assert [node.name for node in draft.saved] == [view.name]
    assert plan_of_torch(draft).steps == seen.problem.base_steps()


def test_an_op_of_which_something_inside_is_saved_does_not_run_again() -> None:
    """Torch saves what a layer norm has scaled, and not what it reads: that is not computed."""
    net = Net(lambda net, x: net.last(net.norm(net.first(x))).sum(),
              first=linear(), norm=torch.nn.LayerNorm(8), last=linear())  # fmt: skip
    seen = capture(net, [batch(4, 8)], fused=True)
    scaled, deviation = (seen.calls(op)[0] for op in (ATEN.mul.Tensor, ATEN.rsqrt.default))
    assert scaled.name not in seen.problem.writer_of
    draft = saving(seen, scaled, deviation)
    products = {op for op in seen.problem.op_of if "mm" in op}
    assert products
    assert not products & set(plan_of_torch(draft).repeats())


# --- costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_a_variant_whose_call_does_not_run_is_withdrawn(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail in the first step."""

    def of_node(spaces: Workspaces, node: fx.Node) -> int:
        spaces.refused += raises and node.target is torch.ops.aten.clone.default
        return 0

    monkeypatch.setattr(Workspaces, "of_node", of_node)
    joint = seen().joint
    offered = insertion.insert_all(joint, insertion.find_sites(joint, RULES))
    costs = cost_model(Request(policy=Policy(executor="aot_eager")), joint.module.graph, "test")
    found = costs.estimate(offered.joint, offered.inserted).problem
    left = {variant.name.partition(":")[0] for variant in found.variants}
    assert left == ({"doubled"} if raises else {"doubled", "transposed"})
