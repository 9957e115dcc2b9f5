"""A unit of a step: the versions that it may take, and how to ask the search for one of them.

A plan for a graph says how many bytes the graph takes by itself. Where several runs of it wait for
their backward at once, what each saves counts as often as it waits. So plans are looked for under
two limits at once: bytes at the peak of the graph, and bytes between its halves. The second one is
a limit of the first kind where the rest is held in between (`Request.between_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
from torch import fx

from fxremat.compiling import session
from fxremat.compiling.costs import cost_model, with_between
from fxremat.compiling.draft import Draft
from fxremat.compiling.pipeline import PREPARE, Runner
from fxremat.compiling.ranks import graph_digest, shared_answer
from fxremat.compiling.rehearsal import Rehearsal
from fxremat.compiling.request import Request
from fxremat.compiling.searching.candidates import Judge
from fxremat.compiling.searching.planning import QUICK_SOLVER, QUICKEST_SOLVER, Planning
from fxremat.compiling.searching.search import Search
from fxremat.compiling.searching.tuning import UNIT_BALANCES, UNIT_SAVED
from fxremat.compiling.stage_times import StageTimes
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import keep_all, ops_of
from fxremat.core.timeline import replay
from fxremat.core.units import Moment, UnitStep, Version
from fxremat.cost.allocator import Allocate
from fxremat.cost.step_events import RunEvents
from fxremat.passes.joint_graph import JointGraph, root
from fxremat.passes.memory_estimation import TANGENTS, nbytes
from fxremat.version import build


@dataclass(frozen=True)
class Boundary:
    """The bytes of a unit that others hold too, or instead of it.

    ``resident`` are all inputs; ``given`` those of them that each run has of its own, ``results``
    what the forward returns, ``incoming`` the gradients of these, ``left`` the gradients of the
    others that stay.
    """

    resident: int
    given: int
    results: int
    incoming: int
    left: int


@dataclass(frozen=True)
class Offer:
    """A version of a unit, and the limits under which the search finds it.

    ``peak_bytes`` are those of the graph by itself, ``between_bytes`` what is held beside it
    between its halves. Of a version that has been rehearsed on CUDA the ``events`` are known.
    """

    version: Version
    peak_bytes: int
    between_bytes: int
    events: RunEvents | None = None

    def asked(self, request: Request) -> Request:
        """The request for this version; all else that the budget counts is held."""
        if request.budget_bytes is None:
            return request
        held = request.budget_bytes - request.tuning_bytes - self.peak_bytes
        return replace(request, held_bytes=held, between_bytes=self.between_bytes)


@dataclass(frozen=True)
class Unit:
    """A compiled part of the step: what it may take, and what is known of its surroundings."""

    boundary: Boundary
    offers: tuple[Offer, ...]


def unit_on_all_ranks(draft: Draft, request: Request, count: int) -> Unit:
    """What `look_at_unit` sees on this rank, or on one that has looked at the same before."""
    graph = graph_digest(draft.module)
    question = session.digest("unit", build(), graph, astuple(request), count)

    def look() -> Any:
        return asdict(look_at_unit(draft, request, count))

    return _unit_from_json(shared_answer("look at a compiled part", question, look))


def _unit_from_json(data: Any) -> Unit:
    offers = (
        Offer(Version(**one["version"]), one["peak_bytes"], one["between_bytes"])
        for one in data["offers"]
    )
    return Unit(Boundary(**data["boundary"]), tuple(offers))


def look_at_unit(draft: Draft, request: Request, count: int) -> Unit:
    """What the quick solvers offer, from everything kept to the least that can be saved.

    ``count`` runs wait at once, which share what is left of the budget. Nothing is judged: what is
    compiled of it will be.
    """
    times, request = StageTimes(), replace(request, verify=False)
    runner = Runner(cost_model(request, draft.module.graph, "unit"), times)
    prepared = runner.run("prepare", PREPARE, draft)
    search = Search(runner, Planning(request, times), Judge(runner, plan_only=True), prepared)
    own, offers = _boundary(prepared, request.parameters), dict[Version, Offer]()

    def left(saved_limit: int) -> int | None:
        """Bytes for the peak of one run, where the others save so many."""
        if request.own_budget is None:
            return None
        return request.own_budget - (count - 1) * (saved_limit - own.resident + own.given)

    for found, plan in _plans(search, search.draft(()).estimate.problem, left):
        offer = _offer(found, plan, request)
        offers.setdefault(offer.version, offer)
    return Unit(own, tuple(offers.values()))


def _plans(
    search: Search, plain: Problem, left: Callable[[int], int | None]
) -> Iterator[tuple[Draft, Plan]]:
    """Plans between the fastest, the lowest, and the one that saves least."""
    everything = replay(plain, keep_all(plain))
    most, kept = everything.peak_bytes, everything.live_bytes[keep_all(plain).index(TANGENTS)]
    yield search.draft(()), search.planning.solve(plain, most, QUICK_SOLVER)
    least_peak = least_saved = most
    for parts in UNIT_BALANCES:
        for draft in _lowest(search, int(parts * most)):
            problem = with_between(draft.estimate.problem, int(parts * most))
            plan = search.planning.solve(problem, 0, QUICKEST_SOLVER)
            yield draft, plan
            line = replay(with_between(problem, 0), plan.steps)
            least_peak = min(least_peak, line.peak_bytes)
            least_saved = min(least_saved, line.live_bytes[plan.steps.index(TANGENTS)])
    for k in range(UNIT_SAVED):
        limit = least_saved + (kept - least_saved) * k // UNIT_SAVED
        peaks = {most, (most + least_peak) // 2, min(most, left(limit) or most)}
        for peak in sorted(peaks):
            if max(limit, least_peak) <= peak:
                yield from _under(search, peak, peak - limit)


def _under(search: Search, peak: int, between: int) -> Iterator[tuple[Draft, Plan]]:
    """The graph as it is, and in the variants chosen, under both limits."""
    planning, variants, drafts = search.planning, search.offered(), [search.draft(())]
    if variants is not None:
        offered = with_between(variants.problem, between)
        names = planning.solve(offered, peak, QUICKEST_SOLVER).variants
        drafts += [search.draft(names, variants)] if names else []
    for draft in drafts:
        plan = planning.solve(with_between(draft.estimate.problem, between), peak, QUICKEST_SOLVER)
        if plan.peak_bytes <= peak:
            yield draft, plan


def _lowest(search: Search, between: int) -> Iterator[Draft]:
    """The graph as it is, and in the variants of least peak where so much is held in between."""
    yield search.draft(())
    variants = search.offered()
    if variants is None:
        return
    names = search.planning.solve(
        with_between(variants.problem, between), 0, QUICKEST_SOLVER
    ).variants
    if names:
        yield search.draft(names, variants)


def _offer(draft: Draft, plan: Plan, request: Request) -> Offer:
    """The version that a plan is, with what it takes as limits."""
    problem = with_between(draft.estimate.problem, 0)
    line = replay(problem, plan.steps)
    between = plan.steps.index(TANGENTS)
    live, parameters, dropped = line.live_bytes, request.parameters, tuple[int, ...]()
    if request.is_passed_on:
        passed = _passed_on(problem, draft.joint, parameters)
        dropped = replay(passed, plan.steps).live_bytes[between + 1 :]
    figures = _figures(draft, plan, parameters, live[:between], live[between:], dropped)
    return Offer(figures, line.peak_bytes, line.peak_bytes - line.live_bytes[between])


def _passed_on(problem: Problem, joint: JointGraph, parameters: Sequence[int]) -> Problem:
    """The problem as others have it: they pass on what the unit is given and gives.

    They drop results when the forward has ended, and gradients that come in when these are passed;
    then all that lives is what is read later. Inputs of its own live as long.
    """
    given = {node.name for node in _given(joint, parameters)}
    results = {root(node).name for node in joint.forward_outputs} & {*problem.outputs}
    dropped = results | {node.name for node in joint.tangents}
    ops = tuple(
        replace(op, reads=(*op.reads, *sorted(results - {*op.reads})))
        if op.name == TANGENTS
        else op
        for op in problem.ops
    )
    return replace(
        problem,
        ops=ops,
        inputs=tuple(name for name in problem.resident if name in given),
        resident=tuple(name for name in problem.resident if name not in given),
        outputs=tuple(name for name in problem.outputs if name not in dropped),
    )


def version_of(draft: Draft, plan: Plan, shown: Rehearsal | None, request: Request) -> Version:
    """What a plan takes as a version of its unit, as it was rehearsed if it was."""
    if shown is None:
        return _offer(draft, plan, request).version
    parameters = request.parameters
    live = list(zip(shown.making, shown.live_bytes, strict=True))
    before, after = (
        [nbytes for making, nbytes in half if making != TANGENTS]  # what others hold in between
        for half in (live[: shown.forward_moments], live[shown.forward_moments :])
    )
    given = {node.name for node in _given(draft.joint, parameters)}
    dropped = shown.live_where_dropped(given) if request.is_passed_on else ()
    return _figures(draft, plan, parameters, before, [shown.saved_bytes, *after], dropped)


def run_events_of(
    draft: Draft, shown: Rehearsal | None, parameters: Sequence[int]
) -> RunEvents | None:
    """What a version asks of CUDA's allocator; None where it was not rehearsed there."""
    if shown is None or shown.as_run is None:
        return None
    own = {node.name for node in _given(draft.joint, parameters)}
    names = [e.name for e in shown.events if isinstance(e, Allocate)]
    pairs = zip(names, shown.as_run.inputs, strict=False)  # what is resident comes first
    inputs = tuple(replace(one, own=name in own) for name, one in pairs)
    return replace(shown.as_run, inputs=inputs)


def _figures(
    draft: Draft,
    plan: Plan,
    parameters: Sequence[int],
    forward: Sequence[int],
    backward: Sequence[int],
    dropped: Sequence[int] = (),
) -> Version:
    """By the bytes that are live at each moment; the first of the backward is before it begins.

    ``dropped`` are those of the backward where others drop what they pass on.
    """
    own, joint = _boundary(draft, parameters), draft.joint
    again = {
        name
        for op in ops_of(plan.steps[plan.steps.index(TANGENTS) :])
        for name in draft.estimate.problem.op_of[op].reads
    }
    given = sum(nbytes(n.meta["val"]) for n in _given(joint, parameters) if n.name in again)
    kept = _bytes_of({root(n) for n in joint.forward_outputs if root(n).name not in again})
    beside = own.resident + kept + own.incoming - given
    return Version(
        plan.time_us,
        saved_bytes=max(0, backward[0] - beside),
        forward_bytes=max(0, max(forward, default=0) - own.resident),
        backward_bytes=max(
            0,
            (max(backward) if not dropped else backward[0]) - beside,
            max(dropped, default=0) - own.resident - own.incoming + own.given,
        ),
    )


def _boundary(draft: Draft, parameters: Sequence[int]) -> Boundary:
    joint, given = draft.joint, set(_given(draft.joint, parameters))
    gradients = joint.results[joint.num_forward_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)
    left = {root(g) for primal, g in pairs if isinstance(g, fx.Node) and primal not in given}
    return Boundary(
        resident=_bytes_of(joint.primals),
        given=_bytes_of(given),
        results=_bytes_of({root(n) for n in joint.forward_outputs}),
        incoming=_bytes_of(joint.tangents),
        left=_bytes_of(left),
    )


def _given(joint: JointGraph, parameters: Sequence[int]) -> Iterator[fx.Node]:
    """The inputs that each run has of its own: those with a gradient that are no parameters."""
    gradients, fixed = joint.results[joint.num_forward_outputs :], set(parameters)
    for index, (primal, gradient) in enumerate(zip(joint.primals, gradients, strict=False)):
        if index not in fixed and isinstance(gradient, fx.Node):
            yield primal


def _bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Of the tensors among them that are computed or given, and not seen through views."""
    values = [node.meta.get("val") for node in nodes if node.op != "output"]
    return sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))


def followed_by(unit: Unit, given_bytes: int) -> Unit:
    """The unit of blocks like this one that come after it, and so are given what needs a gradient.

    What they are given has ``given_bytes``. They hold it while they wait, and make its gradient.
    """
    more, own = given_bytes, unit.boundary
    versions = (
        replace(
            one.version,
            saved_bytes=one.version.saved_bytes + more,
            backward_bytes=one.version.backward_bytes + more,
        )
        for one in unit.offers
    )
    pairs = zip(unit.offers, versions, strict=True)
    offers = tuple(replace(one, version=version, events=None) for one, version in pairs)
    return Unit(replace(own, given=own.given + more), offers)


@dataclass(frozen=True)
class Gathered:
    """What FSDP2 holds beside the units that it shards, in bytes.

    While one runs, the parameters of the next one are gathered ``ahead``, and in the backward the
    gradients of the last one are ``sent``. While a run waits, ``kept`` of its parameters stay.
    """

    ahead: int = 0
    sent: int = 0
    kept: int = 0

    @property
    def again(self) -> int:
        """Of ``ahead``, what is gathered in the backward: nothing where all are there still."""
        return self.ahead if self.kept < self.ahead else 0


NOTHING_GATHERED = Gathered()


def repeated(
    units: Sequence[Unit],
    unit_of: Sequence[int],
    outside_bytes: int,
    gathered: Gathered = NOTHING_GATHERED,
    *,
    either_order: bool = False,
) -> UnitStep:
    """A step in which some runs wait at once, and the last runs backward first.

    In ``either_order`` the first may be the first, too, as where micro-batches go backward in turn.

    ``unit_of`` each run says which of the ``units`` it is of. ``outside_bytes`` are there all the
    time, what no run has of its own among them; what is ``gathered`` comes in addition.
    """
    moments, owns = list[Moment](), [units[k].boundary for k in unit_of]
    for run, own in enumerate(owns):
        outside = outside_bytes + gathered.ahead + run * gathered.kept + own.given
        moments.append(Moment(outside, tuple(range(run)), run, "forward"))
    between = outside_bytes + gathered.ahead + len(owns) * gathered.kept
    between += owns[-1].results + owns[-1].incoming
    moments.append(Moment(between, tuple(range(len(owns)))))
    for run, own in reversed(list(enumerate(owns))):
        outside = outside_bytes + own.incoming
        outside += gathered.again if run else 0
        outside += gathered.sent if run < len(owns) - 1 else 0
        last_first = outside + sum(later.left for later in owns[run + 1 :]) + run * gathered.kept
        moments.append(Moment(last_first, tuple(range(run)), run, "backward"))
        if either_order:
            in_turn = outside + sum(earlier.left for earlier in owns[:run])
            waiting = tuple(range(run + 1, len(owns)))
            in_turn += len(waiting) * gathered.kept
            moments.append(Moment(in_turn, waiting, run, "backward"))
    versions = (tuple(offer.version for offer in unit.offers) for unit in units)
    return UnitStep(tuple(moments), tuple(unit_of), tuple(versions))
