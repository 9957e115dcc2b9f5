"""From a graph to its two halves under a budget: plan, apply, rehearse, and plan again.

Verification and logging belong to the runner here, never to a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx

from fxremat import compat, planner
from fxremat.checking.aliasing import check_in_place
from fxremat.checking.data_flow import check_data_flow, check_split, check_waits
from fxremat.compiling.rehearsal import Rehearsal
from fxremat.compiling.rehearsal_cache import rehearse_once
from fxremat.compiling.request import Clock, Costs, Request
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import replay
from fxremat.errors import SolverRefused, VerificationFailed
from fxremat.passes import inplace
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.recompute import Rewritten, apply_plan
from fxremat.passes.variants.chunks.inductor_kernels import suit_rows
from fxremat.planner.plan_cache import PlanCache
from fxremat.report.report import Row

log = logging.getLogger(__name__)

MAX_REHEARSALS = 6
LOWEST_PERCENT = (108, 120)  # of the least planned peak: what the last attempts aim at
QUICK_SOLVER = "greedy"
"""Its limits count work, never time: what it finds does not depend on the machine's speed."""
CLOSE_ENOUGH = 0.02  # a plan this near below the budget is not improved any further
FAR_ABOVE = 1.1  # times the budget: a plan of least peak above that will not fit in any order
MOST_STEP = 4  # times the last step: what the next one goes down by, at most


@dataclass(frozen=True)
class Split:
    """A forward and a backward module, and what is known of them."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    rewritten: Rewritten
    peak_bytes: int
    rehearsal: Rehearsal | None


@dataclass
class Run:
    """One graph, in the forms taken, on its way through the passes."""

    request: Request
    joint: JointGraph
    found: Estimate
    static_inputs: Sequence[fx.Node]
    costs: Costs
    clock: Clock
    variants: tuple[Row, ...] = ()
    """These forms, and the graph's problem without them."""
    plain: Problem | None = None
    answers: dict[tuple[int, int | None, str], tuple[Problem, Plan]] = field(default_factory=dict)
    """What the planner said; with the problem, so that its id is given to no other."""

    @property
    def device(self) -> torch.device:
        """Whose bytes are counted."""
        return self.costs.device

    @property
    def budget(self) -> int | None:
        """Bytes left for this graph."""
        total = self.request.budget_bytes
        return None if total is None else total - self.request.held_bytes

    def answer(self, budget: int | None, solver: str, problem: Problem | None = None) -> Plan:
        """The planner's plan, or the one it gave when it was asked the same before."""
        request, problem = self.request, problem or self.found.problem
        most = None if request.most_time is None else request.most_time * problem.base_time_us
        options = planner.SolverOptions(
            time_limit_s=request.solver_time_limit, objective=request.objective, most_time_us=most
        )
        question = (problem, budget, solver, options)
        asked = (id(problem), budget, solver)
        if asked not in self.answers:
            self.answers[asked] = problem, self._ask(question)
        return self.answers[asked][1]

    def _ask(self, question: tuple[Problem, int | None, str, planner.SolverOptions]) -> Plan:
        with self.clock.stage("plan"):
            try:
                if compat.caches_disabled():
                    return planner.solve(*question)
                plan, known = PlanCache(_directory("plans")).solve(*question)
            except planner.ProblemRefused as refused:
                raise SolverRefused(question[2], str(refused)) from refused
        if known:
            log.debug("plan from the cache: %s, %d bytes", plan.solver, plan.peak_bytes)
        return plan

    def solve(self, budget: int | None, solver: str | None = None) -> Plan:
        """The plan of the solver that the user asked for, or of another."""
        return self.checked(self.answer(budget, solver or self.request.solver))

    def checked(self, plan: Plan) -> Plan:
        """The plan itself; raises `VerificationFailed` where it is not what it claims to be."""
        if self.request.verify:
            with self.clock.stage("verify"):
                _check_plan(self.found, plan)
        return plan

    def split(self, plan: Plan, hold: bool) -> Split:
        """Apply ``plan``, cut the graph in two, and say what it really takes.

        ``hold`` holds the planned order through Inductor, at some cost in time.
        """
        with self.clock.stage("apply"):
            planned = apply_plan(self.found, plan.steps, hold=hold)
            rewritten = planned
            if "inplace" not in self.request.disabled:
                rewritten = inplace.rewrite(planned, self.joint.num_forward_outputs).rewritten
            inputs = {n.name: n for n in rewritten.module.graph.nodes if n.op == "placeholder"}
            forward, backward = compat.extract_forward_backward(
                rewritten.module,
                list(rewritten.saved),
                num_fwd_outputs=self.joint.num_forward_outputs,
                static_inputs=[inputs[n.name] for n in self.static_inputs],
            )
        if self.request.verify:
            with self.clock.stage("verify"):
                names = [n.name for n in self.joint.mutated]
                check_data_flow(self.joint.module.graph, planned.module.graph, names)
                check_in_place(
                    planned.module.graph,
                    rewritten.module.graph,
                    saved=[n.name for n in rewritten.saved],
                    num_forward_outputs=self.joint.num_forward_outputs,
                )
                check_waits(rewritten.module.graph)
                check_split(backward.graph, [n.name for n in rewritten.saved], forward.graph)
        if self.request.executor == "inductor":
            suit_rows(forward)
            suit_rows(backward)
        if self.request.executor != "inductor" or self.budget is None:
            return Split(forward, backward, plan, rewritten, plan.peak_bytes, None)
        shown = self.rehearse(forward, backward)
        peak = plan.peak_bytes if shown is None else shown.peak_bytes
        return Split(forward, backward, plan, rewritten, peak, shown)

    def rehearse(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Rehearsal | None:
        """The real peak; None, with a warning, for code that does not run without data."""
        with self.clock.stage("rehearse"):
            try:
                return rehearse_once(
                    forward,
                    backward,
                    num_fwd_outputs=self.joint.num_forward_outputs,
                    device=self.device.type,
                    workspace=self.costs.workspaces.of_call,
                    directory=_directory("rehearsals"),
                )
            except Exception as error:  # any op of any library may refuse
                log.warning(
                    "the generated code could not be rehearsed (%s: %s); the budget is held by the "
                    "plan alone, which may be off by some percent: leave a reserve",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                return None


def _directory(kind: str) -> Path:
    """Where what is known is kept."""
    return Path(compat.cache_directory()) / "fxremat" / kind


def _check_plan(found: Estimate, plan: Plan) -> None:
    verdict = check(found.problem, plan.steps)
    if not verdict.ok:
        raise VerificationFailed("plan", str(verdict.failures[0]))
    if verdict.peak_bytes != plan.peak_bytes:
        detail = f"{plan.solver} claims {plan.peak_bytes} bytes, the checker {verdict.peak_bytes}"
        raise VerificationFailed("peak", detail)


def _learn(run: Run, shown: Rehearsal) -> Problem | None:
    """Put the workspaces that Inductor's layouts need into the problem.

    The problem as it was before, if any differs.
    """
    problem = run.found.problem
    ops = tuple(
        replace(op, workspace_bytes=shown.scratch.get(op.name, op.workspace_bytes))
        for op in problem.ops
    )
    if ops == problem.ops:
        return None
    run.found = replace(run.found, problem=replace(problem, ops=ops))
    return problem


@dataclass
class _Search:
    """Looks for the cheapest plan whose real peak is under the budget.

    The planner's peak and the real one differ, so the planner's target is moved by as much as
    the real peak missed the budget, by more where it hardly followed the last move, and halved in
    where that has been tried before. The first plan is tried in Inductor's own order; if that
    takes too much, orders are held from there on.
    """

    run: Run
    budget: int
    hold: bool = False
    best: Split | None = None
    too_much: int | None = None
    before: Problem | None = None
    """The problem as it was before anything was learnt from a rehearsal, if anything was."""
    disorder: int = 0
    """How much more the first plan takes in Inductor's own order."""
    tried: dict[tuple[bool, tuple[Step, ...]], Split] = field(default_factory=dict)

    def try_plan(self, plan: Plan) -> Split:
        """Apply and rehearse a plan; remember the best."""
        split = self.tried.get((self.hold, plan.steps))
        if split is None:
            split = self.tried[self.hold, plan.steps] = self.run.split(plan, self.hold)
        if split.peak_bytes > self.budget:
            self.too_much = min(plan.peak_bytes, self.too_much or plan.peak_bytes)
        elif self.best is None or plan.time_us < self.best.plan.time_us:
            self.best = split
        return split

    def next_target(self, split: Split) -> int | None:
        """The peak to plan for next; None where there is nothing left to gain."""
        miss = split.peak_bytes - self.budget
        if miss <= 0 and (-miss <= CLOSE_ENOUGH * self.budget or not split.rewritten.recomputed):
            return None
        target = split.plan.peak_bytes - self._step(split, miss)
        low = self.best.plan.peak_bytes if self.best is not None else None
        high = self.too_much
        if low is not None and high is not None and not low < target < high:
            target = (low + high) // 2
            return target if high - low > CLOSE_ENOUGH * self.budget else None
        return target

    def _step(self, split: Split, miss: int) -> int:
        """How much lower to plan, given by how much the real peak is too high.

        By as much, the first time; then along the line through the last two plans that took too
        much, since the real peak may fall by far less than the planned one.
        """
        over = [
            (other.plan.peak_bytes - split.plan.peak_bytes, other.peak_bytes - split.peak_bytes)
            for (hold, _), other in self.tried.items()
            if hold == self.hold and other.peak_bytes > self.budget and other is not split
        ]
        if miss <= 0 or not over or over[-1][0] <= 0:
            return miss
        planned, real = over[-1]
        most = MOST_STEP * planned
        step = min(miss * planned // real, most) if real > 0 else most
        return max(miss, step, int(CLOSE_ENOUGH * self.budget) // 2)

    def fit(self, first: Plan) -> Split:
        """The best plan found; the one of least peak where no other is under the budget."""
        split = self.try_plan(first)
        if split.peak_bytes > self.budget and not self.hold:
            loose, self.hold, self.too_much = split, True, None
            split = self.try_plan(first)
            self.disorder = max(self.disorder, loose.peak_bytes - split.peak_bytes)
        while len(self.tried) < MAX_REHEARSALS:
            target = self.next_target(split)
            plan = self.run.solve(target) if target is not None else None
            if plan is None or (self.hold, plan.steps) in self.tried:
                break
            split = self.try_plan(plan)
        return self.loosened(self.best) if self.best is not None else self.least()

    def loosened(self, found: Split) -> Split:
        """The same plan in Inductor's own order, if that is under the budget too.

        That is not tried where the disorder would have to be less than half of what was seen.
        """
        if not self.hold or found.peak_bytes + self.disorder // 2 > self.budget:
            return found
        self.hold = False
        loose = self.try_plan(found.plan)
        return loose if loose.peak_bytes <= self.budget else found

    def least(self) -> Split:
        """The lowest real peak among the plans of lowest planned peak.

        Which plans these are does not depend on the budget: the minimum that an error names is
        found again when it is asked for. A plan is left out that could only be the lowest by
        falling short of its planned peak by more than those before it.
        """
        self.hold = True
        splits: list[Split] = []
        for plan in self.lowest():
            short = max((s.plan.peak_bytes - s.peak_bytes for s in splits), default=0)
            if splits and plan.peak_bytes - max(short, 0) > min(s.peak_bytes for s in splits):
                continue
            splits.append(self.try_plan(plan))
            if self.best is not None:
                return self.best
        return min(splits, key=lambda split: split.peak_bytes)

    def lowest(self) -> Iterator[Plan]:
        """Plans of low peak: by what has been learnt, and by what was known before.

        The quick solver decides by the bytes it is given, and small changes of them can lead it to
        something better. It finds the same on every machine; what the solver that was asked for
        finds in its time is kept with the plans on disk.
        """
        run = self.run
        least = run.solve(0, QUICK_SOLVER)
        yield least
        for percent in LOWEST_PERCENT:
            yield run.solve(least.peak_bytes * percent // 100, QUICK_SOLVER)
        if self.before is not None:
            plan = run.answer(0, QUICK_SOLVER, self.before)
            yield run.checked(
                replace(plan, peak_bytes=replay(run.found.problem, plan.steps).peak_bytes)
            )
        yield run.solve(0)


def fit(run: Run) -> tuple[Split, int]:
    """Plan; where the real kernels are known, plan again until they are under the budget."""
    wanted = run.request.wanted_bytes
    budget = run.budget if wanted is None else wanted
    plan = run.solve(budget)
    if budget is None or run.request.executor != "inductor":
        over = budget is not None and plan.peak_bytes > budget
        lowest = [plan, run.solve(0)] if over else [plan]
        return run.split(min(lowest, key=lambda each: each.peak_bytes), hold=False), 0
    search = _Search(run, budget, hold=plan.peak_bytes > FAR_ABOVE * budget)
    split = run.split(plan, search.hold)
    if split.rehearsal is None:  # nothing shows what Inductor's own order takes
        return run.split(plan, hold=True), 0
    search.before = _learn(run, split.rehearsal)
    first = plan if search.before is None else run.solve(budget)
    if first.steps == plan.steps:  # the same graphs, whatever was learnt of their problem
        search.tried[search.hold, first.steps] = replace(split, plan=first)
    elif not search.hold and split.peak_bytes > budget:
        search.disorder = _disorder(run, split)
        search.hold = search.disorder > CLOSE_ENOUGH * budget
    return search.fit(first), len(search.tried)


def _disorder(run: Run, split: Split) -> int:
    """How much more it takes than its plan does by what has been learnt: for want of its order."""
    return max(0, split.peak_bytes - replay(run.found.problem, split.plan.steps).peak_bytes)
