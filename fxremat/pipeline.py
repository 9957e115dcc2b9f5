"""The passes in order, and the runner: joint graph in; forward, backward and report out.

Timing, verification and logging belong to the runner here, never to a pass.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import fx

from fxremat import compat, planner
from fxremat.aliasing import check_in_place
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Problem
from fxremat.core.schedule import Step, keep_all
from fxremat.core.timeline import replay
from fxremat.cost.device import DeviceSpec, device_spec
from fxremat.cost.roofline import roofline_us
from fxremat.errors import InfeasibleBudget, SolverRefused, VerificationFailed
from fxremat.passes import inplace
from fxremat.passes.accumulation import accumulate
from fxremat.passes.forms import Form, Offer, find_sites, offer, take
from fxremat.passes.joint_graph import JointGraph, is_tensor, read_joint_graph
from fxremat.passes.memory_estimation import Estimate, OpTimer, estimate, nbytes
from fxremat.passes.offload import add_before_putting
from fxremat.passes.recompute import Rewritten, apply_plan
from fxremat.passes.rule import Site
from fxremat.passes.sums import accumulate_sums
from fxremat.passes.user_tags import obey_must_recompute, protect_mutated_inputs
from fxremat.passes.variants import RULES, rules_named
from fxremat.planner.cache import PlanCache
from fxremat.rehearsal import Rehearsal, rehearse
from fxremat.report.report import Report, Row
from fxremat.report.where import describe
from fxremat.runtime import kernels
from fxremat.verify import check_data_flow, check_split, check_waits
from fxremat.workspace import Workspaces

log = logging.getLogger(__name__)

MAX_REHEARSALS = 6
LOWEST_PERCENT = (100, 108, 120)  # of the least planned peak: what the last attempts aim at
LEAST_SOLVER = "greedy"
"""Its limits count work, never time."""
CLOSE_ENOUGH = 0.02  # a plan this near below the budget is not improved any further


@dataclass(frozen=True)
class Request:
    """What is asked of a graph: bytes at most in all, and how to go about it.

    ``held_bytes`` of the budget belong to other graphs of the model, and to what no graph sees.
    ``wanted_bytes`` is what this graph should make do with if it can, because more graphs follow.
    ``copies`` is what moving values takes; None where nothing is to move. With the objective
    "energy" a plan may take ``most_time`` times what running every op once takes.
    """

    budget_bytes: int | None
    held_bytes: int
    wanted_bytes: int | None
    executor: str
    solver: str
    solver_time_limit: float | None
    op_times: str
    verify: bool
    copies: Copies | None = None
    objective: Literal["time", "energy"] = "time"
    most_time: float | None = None
    variants: tuple[str, ...] | None = None
    """Names of rules whose forms of ops may be taken; None: all."""
    allow_lossy: bool = False
    accumulated: tuple[int, ...] = ()
    """Arguments of the graph whose gradients are to be added to their ``grad`` in the backward."""


@dataclass
class Clock:
    """Seconds spent in each stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


@dataclass(frozen=True)
class Split:
    """A forward and a backward module, and what is known of them."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    rewritten: Rewritten
    peak_bytes: int
    rehearsal: Rehearsal | None


@dataclass(frozen=True)
class Outcome:
    """The modules to compile, and the report."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    report: Report


def device_of(graph: fx.Graph) -> torch.device:
    """The device whose bytes are counted: the accelerator if there is one, else the CPU."""
    devices = [n.meta["val"].device for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def prepare(module: fx.GraphModule, num_fwd_outputs: int, *, fused: bool = False) -> JointGraph:
    """Clean up the joint graph and read it; the user's tags are obeyed here.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    compat.prepare_joint_graph(module)
    add_before_putting(module.graph)
    if fused:
        accumulate_sums(module.graph)
    joint = read_joint_graph(module, num_fwd_outputs)
    changed = [obey_must_recompute(joint), protect_mutated_inputs(joint)]
    return read_joint_graph(module, num_fwd_outputs) if any(changed) else joint


def op_timer(request: Request, device: torch.device, spec: DeviceSpec | None = None) -> OpTimer:
    """The cost model asked for; ``spec`` is that of a device which is not here."""
    rates = device_spec(device) if spec is None else spec

    def timer(nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        dtype = next((n.meta["val"].dtype for n in nodes if is_tensor(n)), torch.float32)
        on_cpu = rates.name == device_spec(torch.device("cpu")).name
        inside = [_inside(n, on_cpu) for n in nodes if n.target in kernels.INSIDE]
        calls = sum(each.calls for each in inside) * rates.launch_us
        traffic = traffic_bytes + sum(each.bytes for each in inside)
        return calls + roofline_us(nodes, traffic, dtype, rates, compat.size_bound)

    if request.op_times == "measured":
        from fxremat.cost.measured import measured_timer

        return measured_timer(
            timer,
            device,
            directory=Path(compat.cache_directory()) / "fxremat",
            size=compat.size_bound,
            outside_fake_mode=compat.outside_fake_mode,
        )
    return timer


def _inside(node: fx.Node, on_cpu: bool) -> kernels.Inside:
    assert isinstance(node.target, compat.OpOverload)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return kernels.INSIDE[node.target](*args, **kwargs, on_cpu=on_cpu)


def with_energies(problem: Problem, spec: DeviceSpec) -> Problem:
    """The problem with what each op and each moved byte takes on the device."""
    ops = tuple(replace(op, energy_uj=op.time_us * spec.watts) for op in problem.ops)
    copies = problem.copies
    if copies is not None:
        copies = replace(copies, energy_uj=spec.host_nj_per_byte / 1000)
    return replace(problem, ops=ops, copies=copies)


def _with_costs(problem: Problem, request: Request, spec: DeviceSpec) -> Problem:
    """The problem with the copies of the request, if anything may move, and with energies."""
    if request.copies is not None and (problem.host or not request.copies.only_host):
        problem = replace(problem, copies=request.copies)
    return with_energies(problem, spec) if request.objective == "energy" else problem


@dataclass(frozen=True)
class _Costs:
    """Makes the problem of a joint graph."""

    request: Request
    device: torch.device
    timer: OpTimer
    workspaces: Workspaces
    name: str

    def estimate(self, joint: JointGraph, forms: Sequence[Form] = ()) -> Estimate:
        """With the forms that stand in the graph as alternatives."""
        found = estimate(
            joint,
            self.timer,
            self.workspaces.of_node,
            fused=self.request.executor == "inductor",
            device=self.device.type,
            name=self.name,
            forms=forms,
        )
        problem = _with_costs(found.problem, self.request, device_spec(self.device))
        return replace(found, problem=problem)


@dataclass
class _Run:
    """One graph, in the forms taken, on its way through the passes."""

    request: Request
    joint: JointGraph
    found: Estimate
    static_inputs: Sequence[fx.Node]
    costs: _Costs
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
                directory = Path(compat.cache_directory()) / "fxremat" / "plans"
                plan, known = PlanCache(directory).solve(*question)
            except planner.Refused as refused:
                raise SolverRefused(question[2], str(refused)) from refused
        if known:
            log.debug("plan from the cache: %s, %d bytes", plan.solver, plan.peak_bytes)
        return plan

    def solve(self, budget: int | None, solver: str | None = None) -> Plan:
        """The plan of the solver that the user asked for, or of another."""
        plan = self.answer(budget, solver or self.request.solver)
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
        if self.request.executor != "inductor" or self.budget is None:
            return Split(forward, backward, plan, rewritten, plan.peak_bytes, None)
        shown = self.rehearse(forward, backward)
        peak = plan.peak_bytes if shown is None else shown.peak_bytes
        return Split(forward, backward, plan, rewritten, peak, shown)

    def rehearse(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Rehearsal | None:
        """The real peak; None, with a warning, for code that does not run without data."""
        with self.clock.stage("rehearse"):
            try:
                return rehearse(
                    forward,
                    backward,
                    num_fwd_outputs=self.joint.num_forward_outputs,
                    device=self.device.type,
                    workspace=self.costs.workspaces.of_call,
                )
            except Exception as error:  # any op of any library may refuse
                log.warning(
                    "the generated code could not be rehearsed (%s: %s); the budget is held by the "
                    "plan alone, which may be off by some percent: leave a reserve",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                return None


def _check_plan(found: Estimate, plan: Plan) -> None:
    verdict = check(found.problem, plan.steps)
    if not verdict.ok:
        raise VerificationFailed("plan", str(verdict.failures[0]))
    if verdict.peak_bytes != plan.peak_bytes:
        detail = f"{plan.solver} claims {plan.peak_bytes} bytes, the checker {verdict.peak_bytes}"
        raise VerificationFailed("peak", detail)


def _learn(run: _Run, shown: Rehearsal) -> bool:
    """Put the workspaces that Inductor's layouts need into the problem; True if any differs."""
    problem = run.found.problem
    ops = tuple(
        replace(op, workspace_bytes=shown.scratch.get(op.name, op.workspace_bytes))
        for op in problem.ops
    )
    if ops == problem.ops:
        return False
    run.found = replace(run.found, problem=replace(problem, ops=ops))
    return True


@dataclass
class _Search:
    """Looks for the cheapest plan whose real peak is under the budget.

    The planner's peak and the real one differ, so the planner's target is moved by as much as
    the real peak missed the budget, and halved in where that has been tried before. The first
    plan is tried in Inductor's own order; if that takes too much, orders are held from there on.
    """

    run: _Run
    budget: int
    hold: bool = False
    best: Split | None = None
    too_much: int | None = None
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
        target = split.plan.peak_bytes - miss
        low = self.best.plan.peak_bytes if self.best is not None else None
        high = self.too_much
        if low is not None and high is not None and not low < target < high:
            target = (low + high) // 2
            return target if high - low > CLOSE_ENOUGH * self.budget else None
        return target

    def fit(self, first: Plan) -> Split:
        """The best plan found; the one of least peak where no other is under the budget."""
        split = self.try_plan(first)
        if split.peak_bytes > self.budget and split.rewritten.recomputed:
            self.hold, self.too_much = True, None
            split = self.try_plan(first)
        while len(self.tried) < MAX_REHEARSALS:
            target = self.next_target(split)
            plan = self.run.solve(target) if target is not None else None
            if plan is None or (self.hold, plan.steps) in self.tried:
                break
            split = self.try_plan(plan)
        return self.loosened(self.best) if self.best is not None else self.least()

    def loosened(self, found: Split) -> Split:
        """The same plan in Inductor's own order, if that is under the budget too."""
        if not self.hold:
            return found
        self.hold = False
        loose = self.try_plan(found.plan)
        return loose if loose.peak_bytes <= self.budget else found

    def least(self) -> Split:
        """The lowest real peak among the plans of lowest planned peak.

        Which plans these are does not depend on the budget, nor on how fast the machine is: the
        minimum that an error names is found again when it is asked for.
        """
        self.hold = True
        lowest = self.run.solve(0, LEAST_SOLVER)
        splits = []
        for percent in LOWEST_PERCENT:
            target = lowest.peak_bytes * percent // 100
            splits.append(self.try_plan(self.run.solve(target, LEAST_SOLVER)))
            if self.best is not None:
                return self.best
        return min(splits, key=lambda split: split.peak_bytes)


@dataclass(frozen=True)
class _Fitted:
    """A run, the best split that was found for it, and how many were rehearsed."""

    run: _Run
    split: Split
    rehearsals: int

    @property
    def over(self) -> bool:
        """Whether it takes more than there is."""
        return self.run.budget is not None and self.split.peak_bytes > self.run.budget


@dataclass
class _Forms:
    """Takes other forms of ops where the plan says so."""

    plain: _Run
    sites: tuple[Site, ...]
    offered: Offer
    problem: Problem

    def fit(self, budget: int, solver: str) -> _Fitted | None:
        """The graph in the forms that are chosen for a budget; None where that does not fit.

        With a budget of 0, in those of least peak.
        """
        asked = self.plain.answer(budget, solver, self.problem)
        names = asked.variants
        if not names or 0 < budget < asked.peak_bytes:
            return None
        plain = self.plain
        with plain.clock.stage("estimate"):
            joint = take(plain.joint, [site for site in self.sites if site.name in names])
            found = plain.costs.estimate(joint)
        index = {node.name: node for node in joint.primals}
        static = [index[node.name] for node in plain.static_inputs]
        run = replace(
            plain, joint=joint, found=found, static_inputs=static,
            variants=tuple(map(_form_row, self._taken(names))), plain=plain.found.problem,
        )  # fmt: skip
        return _Fitted(run, *_fit(run))

    def _taken(self, names: Sequence[str]) -> list[Form]:
        return [form for form in self.offered.forms if form.name in names]


def _form_row(form: Form) -> Row:
    """A form in the report: its rule, where it is, and the bytes that it stands in for."""
    old = [node for node in form.stand_ins if is_tensor(node)]
    where = describe(old[0]) if old else form.name
    lossy = " (inexact)" if any(rule.lossy for rule in RULES if rule.name == form.rule) else ""
    return Row(f"{form.name}{lossy}: {where}", sum(nbytes(node.meta["val"]) for node in old), 1)


def _forms(run: _Run) -> _Forms | None:
    """The forms that the graph could take."""
    rules = rules_named(run.request.variants, allow_lossy=run.request.allow_lossy)
    with run.clock.stage("estimate"):
        try:
            sites = find_sites(run.joint, rules)
            offered = offer(run.joint, sites)
        except Exception as error:  # a graph that no rule was tried on: it trains without them
            log.warning("no other forms of ops: %s: %s", type(error).__name__, error)
            return None
        if not sites:
            return None
        problem = run.costs.estimate(offered.joint, offered.forms).problem
        return _Forms(run, sites, offered, problem)


def _fit_in_forms(run: _Run) -> _Fitted:
    """The graph as it is where all of it fits the budget, else in the forms that are best.

    Where what is chosen does not fit, after all, the graph as it is comes next if a plan for it
    does, then the forms of least peak; which these are does not depend on the budget.
    """
    budget = run.budget if run.request.wanted_bytes is None else run.request.wanted_bytes
    tried: list[_Fitted] = []
    if budget is None or not _changes(run.solve(budget)):
        tried.append(_Fitted(run, *_fit(run)))
    forms = _forms(run) if budget is not None and (not tried or tried[0].over) else None
    if forms is not None and budget is not None:
        plain_fits = not tried and run.solve(budget).peak_bytes <= budget
        attempts: list[Callable[[], _Fitted | None]] = [
            partial(forms.fit, budget, run.request.solver),
            lambda: _Fitted(run, *_fit(run)) if plain_fits else None,
            partial(forms.fit, 0, LEAST_SOLVER),
        ]
        for attempt in attempts:
            fitted = attempt()
            if fitted is not None:
                tried.append(fitted)
                if not fitted.over:
                    return fitted
    least = min((one.split.peak_bytes for one in tried), default=None)
    as_it_is = any(one.run is run for one in tried)
    if least is None or (not as_it_is and run.solve(0, LEAST_SOLVER).peak_bytes < least):
        tried.append(_Fitted(run, *_fit(run)))
    return min(tried, key=lambda one: (one.over, one.split.peak_bytes))


def _changes(plan: Plan) -> bool:
    """Whether anything runs again or moves, or is over the budget all the same."""
    over = plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes
    return over or bool(plan.repeats() or plan.moves)


def _fit(run: _Run) -> tuple[Split, int]:
    """Plan; where the real kernels are known, plan again until they are under the budget."""
    wanted = run.request.wanted_bytes
    budget = run.budget if wanted is None else wanted
    split = run.split(run.solve(budget), hold=False)
    if budget is None or run.request.executor != "inductor":
        return split, 0
    if split.rehearsal is None:  # nothing shows what Inductor's own order takes
        return run.split(split.plan, hold=True), 0
    search = _Search(run, budget)
    first = run.solve(budget) if _learn(run, split.rehearsal) else split.plan
    if first.steps == split.plan.steps:  # the same graphs, whatever was learnt of their problem
        search.tried[False, first.steps] = replace(split, plan=first)
    return search.fit(first), len(search.tried)


def transform(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_input_indices: Sequence[int],
    request: Request,
    graph: int,
    trace_seconds: float,
) -> Outcome:
    """Plan the joint graph for the request and split it.

    ``trace_seconds`` is what making the joint graph took, for the report.

    Raises `InfeasibleBudget` where not even the plan of least peak fits the budget, and
    `VerificationFailed` where a check on our own work fails.
    """
    clock = Clock({"trace": trace_seconds})
    if request.budget_bytes is not None:
        compat.plan_for_sizes_seen(module.graph)
    with clock.stage("estimate"):
        joint = prepare(module, num_fwd_outputs, fused=request.executor == "inductor")
        joint = accumulate(joint, request.accumulated, static_input_indices)
        device = device_of(module.graph)
        timer, workspaces = op_timer(request, device), Workspaces(device)
        costs = _Costs(request, device, timer, workspaces, f"graph {graph}")
        found = costs.estimate(joint)
    static = [joint.primals[i] for i in static_input_indices if i < len(joint.primals)]
    fitted = _fit_in_forms(_Run(request, joint, found, static, costs, clock))
    run, split = fitted.run, fitted.split
    if fitted.over:
        assert request.budget_bytes is not None
        raise InfeasibleBudget(
            request.budget_bytes,
            split.peak_bytes + request.held_bytes,
            tuple((row.what, row.bytes) for row in _at_peak(run, split)[:8]),
        )
    return Outcome(split.forward, split.backward, _report(run, split, fitted.rehearsals, graph))


def _live_bytes(run: _Run, split: Split) -> tuple[int, ...]:
    if split.rehearsal is not None:
        return split.rehearsal.live_bytes
    return replay(run.found.problem, split.plan.steps).live_bytes


def _at_peak(run: _Run, split: Split) -> list[Row]:
    """The largest values live at the peak, named by module and source line."""
    nodes = {n.name: n for n in split.rewritten.module.graph.nodes}
    nodes |= run.found.node_of
    if split.rehearsal is not None:
        live = split.rehearsal.at_peak
    else:
        timeline = replay(run.found.problem, split.plan.steps)
        sizes = timeline.problem.bytes_of
        live = tuple((name, sizes[name]) for name in timeline.live_at(timeline.peak_step))
    rows = [
        Row(describe(nodes[name]) if name in nodes else f"{name} [Inductor's temporary]", size)
        for name, size in live
        if size
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _report(run: _Run, split: Split, rehearsals: int, graph: int) -> Report:
    problem, plan = run.found.problem, split.plan
    plain = run.plain or problem
    full = replay(plain, keep_all(plain))
    least = run.answer(0, LEAST_SOLVER)
    sizes = problem.bytes_of
    saved = [
        Row(describe(node), sizes.get(node.name, 0))
        for node in split.rewritten.saved
        if node.op != "placeholder" and is_tensor(node)
    ]
    recomputed = [
        Row(
            describe(run.found.cones[name].nodes[-1]),
            sum(sizes[w] for w in problem.op_of[name].writes),
            times,
            problem.op_of[name].time_us,
        )
        for name, times in plan.repeats().items()
    ]
    fetches = Counter(move.value for move in plan.moves if move.kind == "to device")
    moved = [
        Row(describe(run.found.node_of[name]), sizes[name], times)
        for name, times in fetches.items()
    ]
    held = run.request.held_bytes
    return Report(
        graph=graph,
        nodes=len(run.joint.module.graph.nodes),
        budget_bytes=run.request.budget_bytes,
        resident_bytes=problem.resident_bytes,
        keep_all_peak_bytes=full.peak_bytes + held,
        planned_peak_bytes=plan.peak_bytes + held,
        predicted_peak_bytes=split.peak_bytes + held,
        minimum_peak_bytes=least.peak_bytes + held,
        held_bytes=held,
        time_overhead=plan.time_us / plain.base_time_us - 1 if plain.base_time_us else 0.0,
        saved=tuple(saved),
        recomputed=tuple(recomputed),
        moved=tuple(moved),
        variants=run.variants,
        host_peak_bytes=replay(problem, plan.steps).host_peak_bytes,
        at_peak=tuple(_at_peak(run, split)[:20]),
        timeline=_live_bytes(run, split),
        plan=plan,
        rehearsals=rehearsals,
        seconds=run.clock.seconds,
        problem=problem,
    )
