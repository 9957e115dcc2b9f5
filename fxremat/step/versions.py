"""A part of a step: the versions that it may take, and how to ask the search for one of them.

A plan for a graph says how many bytes the graph takes by itself. Where several runs of it wait for
their backward at once, what each saves counts as often as it waits. So plans are looked for under
two limits at once: bytes at the peak of the graph, and bytes between its halves. The second one is
a limit of the first kind where the rest is held in between (`Budget.between`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compat.ranks import is_a_rank
from fxremat.compile import session
from fxremat.compile.constants import UNIT_BALANCES, UNIT_SAVED
from fxremat.compile.cost_model import cost_model, with_between
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import PREPARE, Runner
from fxremat.compile.ranks import graph_digest, shared_answer
from fxremat.compile.request import Budget, Request
from fxremat.compile.run_figures import interface_of, planned_run
from fxremat.compile.search.planning import ONE_PASS, Planning
from fxremat.compile.search.variant_sets import GraphInVariants
from fxremat.compile.stage_times import StageTimes
from fxremat.core.constants import MEASURABLE
from fxremat.core.events import RunEvents
from fxremat.core.json_data import InvalidData, from_data, to_data
from fxremat.core.plan import Plan
from fxremat.core.schedule import store_all
from fxremat.core.step import Interface, Version
from fxremat.core.timeline import replay
from fxremat.disk_cache import Answers, Question
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.passes.memory_estimation import TANGENTS
from fxremat.report.report import Report
from fxremat.version import build


@dataclass(frozen=True)
class Offer:
    """A version of a part, and the limits under which the search finds it.

    ``peak_bytes`` are those of the graph by itself, ``between_bytes`` what is held beside it
    between its halves. It was found in these ``variants``. Of a version that was counted in a dry
    run, the figures are ``exact``, and on CUDA the ``events`` are known. The limits of a ``tight``
    one are all that the step leaves it. One that is compiled was ``asked_as`` this.
    """

    version: Version
    peak_bytes: int
    between_bytes: int
    variants: tuple[str, ...] = ()
    events: RunEvents | None = None
    exact: bool = False
    tight: bool = False
    asked_as: Request | None = None

    @classmethod
    def of_compiled(cls, request: Request, report: Report) -> Offer:
        """One that is compiled, so that it may run again as it is."""
        version = version_in(report)
        return cls(version, 0, 0, events=report.events, exact=True, asked_as=request)

    def asked(self, request: Request, *, whole: bool, as_found: bool = False) -> Request:
        """The request for this version; all else that the budget counts is held.

        What the ``whole`` step reserves is counted elsewhere, or is not. One that will run once is
        left ``as_found``: a better plan takes longer to find than it saves.
        """
        if self.asked_as is not None or request.budget.limit is None:
            return self.asked_as or request
        held = request.budget.limit - request.budget.autotune - self.most_bytes
        asked = request.with_budget(
            held=held,
            between=self.between_bytes,
            soft_limit=self.peak_bytes,
            optimizer_step=0,
            part=whole,
        )
        return asked.with_policy(solver=ONE_PASS, taken=self.variants) if as_found else asked

    @property
    def most_bytes(self) -> int:
        """What it may take where its dry run shows a little more than was planned."""
        return self.peak_bytes if self.tight else int(self.peak_bytes * (1 + MEASURABLE))

    def within(self, most: Version, resident: int) -> Offer:
        """The offer with other limits: what a run may take at most.

        What lies beside the bytes that it saves, between its halves, is as in the plan at hand;
        its inputs are ``resident``. Both halves are asked for under one peak: the higher of what
        they may take, where the other half has room for all that may be saved more.
        """
        own, more = self.version, most.saved_bytes - self.version.saved_bytes
        beside = self.peak_bytes - self.between_bytes - own.saved_bytes
        forward, backward = most.forward_bytes + resident, most.backward_bytes + beside
        taken, may = own.forward_bytes, most.forward_bytes
        if backward < forward:
            taken, may = own.backward_bytes, most.backward_bytes
        peak = max(forward, backward) if taken + more <= may else min(forward, backward)
        between = max(0, peak - beside - most.saved_bytes)
        return Offer(most, peak, between, tight=True)

    def as_counted(self, report: Report | None) -> Offer:
        """The offer with what the version really takes."""
        version = version_in(report)
        events = None if report is None else report.events
        return replace(self, version=version, events=events, exact=True)

    def raised(self, refused: InfeasibleBudget) -> Offer:
        """The offer with the bytes that it was found to take, which are more than was thought."""
        assert refused.minimum_bytes is not None
        more = refused.minimum_bytes - refused.budget_bytes
        version = replace(
            self.version,
            saved_bytes=self.version.saved_bytes + more,
            forward_bytes=self.version.forward_bytes + more,
            backward_bytes=self.version.backward_bytes + more,
        )
        return replace(self, version=version, peak_bytes=self.peak_bytes + more, events=None)


Planner = Callable[[Offer, int], Report]
"""Plans a graph as a version, under so many bytes."""


def version_in(report: Report | None) -> Version:
    """What a graph takes as a part of its step."""
    assert report is not None
    assert report.as_part is not None
    return report.as_part


@dataclass(frozen=True)
class Part:
    """A compiled part of the step: what it may take, and what is known of its surroundings.

    Versions that are ``compiled`` are offered where no others fit.
    """

    interface: Interface
    offers: tuple[Offer, ...]
    compiled: tuple[Offer, ...] = ()

    def leaving(self, left_bytes: int | None) -> Part:
        """The part where of its gradients no more than ``left_bytes`` stay; None: all."""
        if left_bytes is None:
            return self
        left = min(self.interface.left, left_bytes)
        return replace(self, interface=replace(self.interface, left=left))


@dataclass(frozen=True)
class KnownVersions:
    """The offers that runs of a graph took in a step that was planned as one, and which run which.

    The runs are told by their ``places``. They are kept on disk, so that later runs of a program
    begin with them. ``step`` is a digest of what the step was. When the graph was asked for its
    versions, ``beside`` bytes were held by others.
    """

    step: str
    offers: tuple[Offer, ...]
    of_run: tuple[int, ...]
    places: tuple[int, ...]
    beside: int

    @classmethod
    def recalled(cls, signature: str, request: Request) -> KnownVersions | None:
        """Those of the graph of this name; None where none are known that fit the request."""
        with suppress(InvalidData):
            return from_data(cls, _kept().read(_question(signature, request)))
        return None

    def keep(self, signature: str, request: Request) -> None:
        """Write them for later runs."""
        _kept().keep(_question(signature, request), to_data(self))


def _kept() -> Answers:
    return Answers(cache_directory() / "steps")


def _question(signature: str, request: Request) -> Question | None:
    """What versions depend on, but for what is held beside them, which is part of the offers.

    Ranks may have kept different answers, and have to begin with the same.
    """
    if not signature or is_a_rank() or caches_disabled():
        return None
    asked = replace(request, budget=Budget(limit=request.budget.limit))
    return {"graph": signature, "request": repr(asked)}


def with_compiled(part: Part, compiled: Mapping[Request, Any], request: Request) -> Part:
    """The part with what is compiled of it for the inputs of the request, by what was asked for."""
    alike = (
        Offer.of_compiled(asked, one.report)
        for asked, one in compiled.items()
        if one.report and one.report.as_part and asked.inputs == request.inputs
    )
    return replace(part, compiled=tuple(alike))


def version_refused(
    plan: Callable[[Request], Report], request: Request, refused: InfeasibleBudget
) -> tuple[Offer, ...]:
    """The version that was refused, as it is where the graph gets what it needs.

    Its code may take less than any version that is offered: these are as they were planned.
    """
    asked = request.with_budget(limit=refused.minimum_bytes, optimizer_step=0)
    try:
        return (Offer.of_compiled(asked, plan(asked)),)
    except InfeasibleBudget as other:
        forget_frames(other)
        return ()


def part_on_all_ranks(draft: Draft, request: Request, count: int) -> Part:
    """What `offers_of` sees on this rank, or on one that has looked at the same before."""
    graph = graph_digest(draft.module)
    question = session.digest("part", build(), graph, astuple(request), count)

    def look() -> Any:
        return to_data(offers_of(draft, request, count))

    return from_data(Part, shared_answer("look at a compiled part", question, look))


def offers_of(draft: Draft, request: Request, count: int) -> Part:
    """What the quick solvers offer, from everything kept to the least that can be saved.

    ``count`` runs wait at once, which share what is left of the budget. Nothing is judged: what is
    compiled of it will be.
    """
    times, request = StageTimes(), request.with_policy(verify=False)
    runner = Runner(cost_model(request, draft.module.graph, "part"), times)
    prepared = runner.run("prepare", PREPARE, draft)
    planning, graphs = Planning(request, times), GraphInVariants(runner, prepared)
    own, offers = interface_of(prepared, request.inputs.parameters), dict[Version, Offer]()

    def left(saved_limit: int) -> int | None:
        """Bytes for the peak of one run, where the others save so many."""
        if request.budget.own is None:
            return None
        return request.budget.own - (count - 1) * (saved_limit - own.resident + own.given)

    for found, plan in _plans(planning, graphs, left):
        version, peak, between = planned_run(found, plan, request)
        taken = tuple(one.name for one in found.taken)
        offers.setdefault(version, Offer(version, peak, peak - between, taken))
    return Part(own, tuple(offers.values()))


def _plans(
    planning: Planning, graphs: GraphInVariants, left: Callable[[int], int | None]
) -> Iterator[tuple[Draft, Plan]]:
    """Plans between the fastest, the lowest, and the one that saves least."""
    plain = graphs.plain.problem
    everything = replay(plain, store_all(plain))
    most, kept = everything.peak_bytes, everything.live_bytes[store_all(plain).index(TANGENTS)]
    yield graphs.plain, planning.solve(plain, most, ONE_PASS)
    least_peak = least_saved = most
    balances = [int(parts * most) for parts in UNIT_BALANCES]
    lowest = graphs.also_with(planning, 0, balances[0], balances[-1])
    for draft in lowest:
        for between in balances:
            problem = with_between(draft.estimate.problem, between)
            plan = planning.solve(problem, 0, ONE_PASS)
            yield draft, plan
            line = replay(with_between(problem, 0), plan.steps)
            least_peak = min(least_peak, line.peak_bytes)
            least_saved = min(least_saved, line.live_bytes[plan.steps.index(TANGENTS)])
    for k in range(UNIT_SAVED):
        limit = least_saved + (kept - least_saved) * k // UNIT_SAVED
        peaks = {most, (most + least_peak) // 2, min(most, left(limit) or most)}
        also = graphs.also_with(planning, most, most - limit, improved=False)
        drafts = [*lowest, *(one for one in also if one not in lowest)]
        for peak in sorted(peaks):
            if max(limit, least_peak) <= peak:
                yield from _under(planning, drafts, peak, peak - limit)


def _under(
    planning: Planning, drafts: Sequence[Draft], peak: int, between: int
) -> Iterator[tuple[Draft, Plan]]:
    """The graph in variants that were chosen for the least bytes, or for as many saved ones."""
    for draft in drafts:
        plan = planning.solve(with_between(draft.estimate.problem, between), peak, ONE_PASS)
        if plan.peak_bytes <= peak:
            yield draft, plan


def followed_by(part: Part, given: int) -> Part:
    """The part of blocks like this one that come after it, and so are given what needs a gradient.

    What they are given has ``given`` bytes. They hold it while they wait, and make its gradient.
    """

    def holding(one: Version) -> Version:
        saved, backward = one.saved_bytes + given, one.backward_bytes + given
        return replace(one, saved_bytes=saved, backward_bytes=backward)

    offers = (replace(one, version=holding(one.version), events=None) for one in part.offers)
    own = part.interface
    return Part(replace(own, given=own.given + given), tuple(offers))
