"""A graph in its step: the versions that its runs take, so that all graphs share one budget.

What each run saves counts as often as it waits: a block that is compiled by itself is one graph
that runs once for each block. So the graph is traced first, and the versions that it may take are
offered (`fxremat.step.versions`); which run takes which is chosen for the whole step
(`fxremat.planner.step_versions`). Each is then compiled within the bytes that the others leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fxremat.compat.ranks import is_a_rank
from fxremat.compile import session
from fxremat.compile.constants import DRY_RUNS
from fxremat.compile.request import Request
from fxremat.core.events import RunEvents
from fxremat.core.layout import NOWHERE, StepLayout
from fxremat.core.step import Interface
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.memory.layout import arrange
from fxremat.memory.optimizers import optimizer_memory
from fxremat.memory.reserved_bytes import ALONE, Reserved
from fxremat.memory.storages import storage_bytes
from fxremat.planner import step_versions as planner
from fxremat.report.files import write_report
from fxremat.report.report import Report
from fxremat.runtime.accumulation import living_gradients
from fxremat.step import versions
from fxremat.step.context import Surroundings, first_description
from fxremat.step.description import LeastVersions, StepDescription, lowest_ways, summary
from fxremat.step.graph import CompiledVersion, Graph, NoBackward, Role, Taken
from fxremat.step.promise import MadeVersions, Observed, Promise, RunVersions
from fxremat.step.versions import KnownVersions, Offer, Part

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GraphInStep:
    """One graph, and how many runs of it wait for their backward at once.

    ``request`` says what may be taken where the others are as they were when it was compiled. Its
    ``role`` and what its runs have ``taken`` change when the step is planned anew. ``known`` are
    the versions that were compiled, ``looked`` is what it offers as a part of a step, and ``call``
    runs it where no run waits, or nothing is planned. What steps were ``observed`` to take beside
    what was counted is set aside. Where it is alone, buffers lie as ``one_run`` asks for them, else
    as the step ``placed`` says.
    """

    graph: Graph
    request: Request
    where: Surroundings
    role: Role = field(default_factory=Role)
    taken: Taken = field(default_factory=Taken)
    known: dict[Request, CompiledVersion] = field(default_factory=dict)
    looked: Part | None = None
    call: Callable[..., Any] | None = None
    observed: Observed = field(default_factory=Observed)
    placed: StepDescription | None = None
    one_run: RunEvents | None = None
    one_layout: StepLayout | None = None

    def compiled(self) -> RunVersions | None:
        """The versions for the first runs, None where no run waits; raises `InfeasibleBudget`."""
        self.observed.recall(self.request.budget.held)
        return self.observed.beside_loss(self.request, self._compiled_so)

    def _compiled_so(self, request: Request) -> RunVersions | None:
        self.request, count, pipeline = request, self.runs_at_once, self.where.context.pipeline
        together = count > 1 or self.role.described or pipeline is not None or self.where.follow
        if together and self.request.budget.limit is not None and self.graph.needs_gradients:
            with suppress(NoBackward):
                found = self.compiled_for(count)
                self.where.scope.due |= self.goes_on
                return found
        return self._alone()

    @property
    def _known_before(self) -> KnownVersions | None:
        """What it took when the program ran before, if the step has begun as it did then."""
        described, before = self.role.described, self.where.neighbours.graphs
        if not (described or before or self.where.follow):
            return None
        known = KnownVersions.recalled(self.observed.signature, self.request)
        steps = {described.digest} if described else {one.taken.as_before for one in before}
        return known if known and steps <= {known.step} else None

    @property
    def runs_at_once(self) -> int:
        """How many runs of it are known to wait at once."""
        if self.role.described is not None:
            return len(self.role.described.runs_of(self.role.index))
        return max(self.where.context.runs, self.taken.count)

    @property
    def layout(self) -> StepLayout:
        """Where the buffers of the run at each place lie; nowhere until the step is known.

        On CUDA a graph that nobody follows is taken to be alone from the first step on.
        """
        described, device = self.role.described, self.where.device.type
        if not self.request.policy.arena or self.request.inputs.accumulated:
            return NOWHERE
        if described is None and self.taken.count > 1:
            described = self.placed
        if described is not None:
            return described.layout_of(self.role.index, device)
        alone = self.role.runs_alone
        if alone is None:
            alone = device == "cuda" and not (self.where.follow or self.where.neighbours.graphs)
        if not alone or self.where.context.sharded or self.one_run is None:
            return NOWHERE
        if self.one_layout is None:
            self.one_layout = arrange([self.one_run], ALONE, device).layout
        return self.one_layout

    @property
    def fixed_bytes(self) -> int:
        """There all the time beside what its runs are given, by what is known to it."""
        own, behind = self.part().interface, self.observed.held_by_loss
        return self.unseen_bytes - behind + own.resident - own.given

    @property
    def goes_on(self) -> bool:
        """Whether graphs follow in the step that are not known yet."""
        return self.where.follow and self.role.described is None

    @property
    def saves_least(self) -> bool:
        """Whether its versions save little until all graphs of the step are known."""
        return self.goes_on and self.where.context.runs == 1

    @property
    def unseen_bytes(self) -> int:
        """Of what is held beside it, all that no run has saved."""
        others = self.where.neighbours
        return self.request.budget.held - others.waiting - others.coming

    def renewed(self, args: Iterable[object]) -> RunVersions | None:
        """Other versions, where the step has changed since these were chosen; else None."""
        if self.role.is_due or self._see_gradients(args):
            return self._planned_again()
        alone = self.role.described is None and self.taken.count == 1 and not self.graph.ranks
        scope, known = self.where.scope, len(self.where.scope.given.parameters)
        if not alone or scope.due or scope.waiting or self.taken.parameters == known:
            return None  # as planned, or about to be planned with the others
        self.taken.parameters = known
        return self._beside_more(args)

    def sends_otherwise(self) -> bool:
        """Whether it is another part of its step: its results are sent more gradients, or fewer.

        One that is alone is planned again when it begins.
        """
        if not self.graph.sends_otherwise(self.request.budget.limit):
            return False
        self.known, self.looked, self.role.is_due = {}, None, True
        return self.role.described is not None

    @property
    def takes_time(self) -> bool:
        """Whether a plan of it runs something again, or moves it."""
        return any(one.report and one.report.time_overhead > 0 for one in self.known.values())

    @property
    def is_complete(self) -> bool:
        """Whether all that was counted beside it is there: its optimizers have their states."""
        trained = optimizer_memory(None, self.where.scope.given.weights(), self.where.device)
        unnamed = self.graph.options.optimizer in (None, "none")
        return not trained.missing and (unnamed or trained.trained > 0)

    def set_aside(self, between: int, held: int, *, remembered: bool = True) -> None:
        """Have it planned again with so many bytes more, or fewer, beside it."""
        if self.graph.gradients.late:  # the step took more for a gradient that none had expected
            return
        self._hold(held)
        if remembered:
            self.observed.note(between, held)
        self.role.is_due |= self.role.described is None

    def _see_gradients(self, args: Iterable[object]) -> bool:
        """Note gradients that live on where this begins; whether they do for the first time.

        They count from then on, and later ones lie outside of the arena, where these are moved.
        """
        several = self.taken.count != 1 or self.role.described is not None
        several |= bool(self.where.scope.waiting)  # then this step has made them
        counts = self.request.budget.limit is not None and not self.where.context.sharded
        if several or is_a_rank() or self.request.inputs.gradients_stay or not counts:
            return False
        if living := living_gradients(args):
            self.expect_gradients(living)
        return bool(living)

    def expect_gradients(self, living: Sequence[torch.Tensor]) -> None:
        """Have it planned for these, which live where a step begins."""
        own, device = self.where.scope.own, self.where.device
        own.to_move, own.graphs = list(living), ()
        if device.type != "cuda":  # there they are in the pool of the graphs
            self._hold(storage_bytes(living, device))
        self.request = self.request.with_inputs(gradients_stay=True)

    def _hold(self, more: int) -> None:
        self.request = self.request.with_budget(held=max(0, self.request.budget.held + more))

    def _planned_again(self) -> RunVersions | None:
        """Versions for the step as known now; raises `InfeasibleBudget`, or leaves it as it is."""
        if self.role.described is not None:
            self._hold(-self.observed.forget_expected())  # a loss is known now
            if not any(one.graph.gradients.came_late for one in self.where.scope.graphs):
                return self.compiled_for(self.runs_at_once)
        self.role.is_due, warned = False, self.where.scope.warned
        if warned.lowest and not self.taken.lowest:  # as the others, refused at first
            self._hold(self.request.budget.limit or 0)
        try:
            return self._compiled_so(self.request)
        except InfeasibleBudget as refused:
            if warned.ended:
                self.role.is_due = True  # whoever goes on is refused again
                raise replace(refused, minimum_bytes=warned.taken) from None
            forget_frames(refused)
            if warned.planned_again > 1 and not self.taken.lowest:
                self.where.scope.take_lowest()
                self.taken.lowest, self.role.is_due = True, False
                self._hold(refused.budget_bytes - (refused.minimum_bytes or 0))
                return self._compiled_so(self.request)
            log.warning("fxremat: the plan stays as it is: %s", refused)
            self.observed.note(-self.observed.between, 0)
            return None

    def _beside_more(self, args: Iterable[object]) -> RunVersions | None:
        """Another version, where what other graphs are given leaves too few bytes to this one."""
        where, budget = self.where, self.request.budget
        if where.device.type != "cpu" or budget.limit is None:
            return None
        beside = where.scope.neighbours(where.place, args, where.context.others, where.device, 1)
        more = beside.lasting - where.neighbours.lasting
        if more <= 0 or self.taken.own_peak_bytes + budget.held + more <= budget.limit:
            return None
        self.where = replace(where, neighbours=beside)
        self.request = self.request.with_budget(held=budget.held + more)
        return self._alone()

    def _alone(self) -> RunVersions | None:
        """The graph by itself, beside what is there now.

        Where runs that wait leave it too few bytes, this step exceeds the budget, and the next one
        is planned for all. Raises `InfeasibleBudget` with what all need, if a loss ends the step.
        """
        missing, told = 0, len(session.STATE.reports)
        request = self.request.with_budget(between=self.observed.between)
        try:
            request, version = self._alone_as_before() or (request, self.graph.compile(request))
        except InfeasibleBudget as refused:
            if refused.minimum_bytes is None or not self.where.neighbours.graphs:
                raise
            last = self.graph.gives_loss and not self.goes_on
            least, named = self._least_of_all(refused) if last else (0, 0)
            if least > refused.budget_bytes:
                raise replace(refused, minimum_bytes=named, let_go_bytes=least) from None
            missing = refused.minimum_bytes - refused.budget_bytes
            self.where.scope.warned.tell_missing(missing)
            forget_frames(refused)
            request = request.with_budget(held=request.budget.held - missing, optimizer_step=0)
            version = self.graph.compile(request)
            self.where.scope.due = True
        self.known[request] = version
        report = version.report
        if report is None or request.budget.limit is None:
            self.call = version.call
            return None
        self.taken.count, self.one_run, self.one_layout = 1, report.events, None
        self.where.scope.own.share(report.memory.own, request.budget.allocator)
        promised = self.promised(version, request)
        promised = replace(promised, left_bytes=missing or None)
        self.taken.saved_bytes, self.taken.own_peak_bytes = report.saved_bytes, promised.peak_bytes
        step_bytes = request.budget.held - self.where.context.late + promised.peak_bytes
        return self._note_peak(told, RunVersions((promised,), (0,), step_bytes))

    def _alone_as_before(self) -> tuple[Request, CompiledVersion] | None:
        """What it was when the program ran before, where all that waits is as it was then."""
        known = self._known_before
        if known and len(known.of_run) == 1:
            with suppress(InfeasibleBudget):
                request = known.offers[0].asked(self.request, whole=self._knows_whole)
                found = request, self.graph.compile(request)
                self.taken.as_before = known.step
                return found
        return None

    def _least_of_all(self, refused: InfeasibleBudget) -> tuple[int, int]:
        """The least budget for this graph and those that wait, and one that is surely enough."""
        where, scope = self.where, self.where.scope
        self.part()
        inputs, waiting = self.graph.inputs, scope.waiting.values()
        scope.given.see_eager(inputs, where.context.others, waiting, where.device)
        if (found := scope.describe_with(self, where.given)) is None:
            return (refused.minimum_bytes or 0,) * 2
        described, if_held = found
        described.offer_compiled()
        more = versions.version_refused(self.graph.plan, self.request, refused)
        described.offer(own := described.part_of[-1], (*described.parts[own].offers, *more))
        least = self._least(described)
        return least.budget_bytes, described.enough_at(if_held, least, self.request.budget)

    def part(self) -> Part:
        """What it offers as a part of a step. Raises `NoBackward`."""
        if self.looked is None:
            free = self.request.with_budget(held=0, soft_limit=None)
            self.looked = self.graph.as_part(free, max(1, self.taken.count))
        return versions.with_compiled(self.looked, self.known, self.request)

    def compiled_for(self, count: int) -> RunVersions:
        """The versions for so many runs; raises `InfeasibleBudget` with the least for as many."""
        told, described = len(session.STATE.reports), self.role.described
        if described is None or count != len(described.runs_of(self.role.index)):
            known = self._known_before  # what was asked for then is on disk
            self.taken.beside = known.beside if known else self.request.budget.held
            asked = self.request.with_budget(held=self.taken.beside)
            part = self.looked = self.graph.as_part(asked, count)
            self.role.described, self.role.index = None, 0  # the step is not as it was described
            held, before = self.request.budget.held, bool(self.known)
            described = first_description(part, count, self.where, held, compiled_before=before)
        elif not self.role.looked_at:
            beside = self.request.with_budget(held=self.request.budget.coming)
            index, part = self.role.index, self.graph.as_part(beside, count)
            described.parts[index] = versions.with_compiled(part, self.known, self.request)
            self.role.looked_at = True
        self.taken.count = count
        chosen = self._chosen(described)
        self.role.is_due = False  # what is refused stays due: whoever goes on is refused again
        return self._note_peak(told, chosen)

    def _note_peak(self, told: int, found: RunVersions) -> RunVersions:
        """Say the peak of the step, with graphs that wait, in its reports made until now."""
        peaks = [found, *(one.runs for one in self.where.scope.waiting.values())]
        peak = max(self.request.budget.optimizer_step, *(one.step_peak_bytes for one in peaks))
        also = self.role.described.reported if self.role.described else set[int]()
        for report in session.note_step_peak(told, peak, also):
            if self.graph.options.report is not None:
                write_report(self.graph.options.report, report)
        return found

    def _chosen(self, described: StepDescription) -> RunVersions:
        """The versions of least time within the budget; one that saves little if others follow."""
        described.see_between(self.observed.between)
        choose = planner.saving_least if self.saves_least else planner.fastest
        aim = budget = self.request.budget.for_step
        make, index = partial(self._made, described), self.role.index
        known, most = self._known_before, None if self.saves_least else budget
        if known and (found := described.as_before(index, known, most, make)) is not None:
            self.taken.as_before = known.step
            return self._settled(described, found)
        described.know_others(index, budget)
        in_order = self.where.context.pipeline is None  # its halves run in either order
        if in_order and not self.saves_least and (found := described.filled(index, budget, make)):
            return self._settled(described, found)
        failed, ways = set[planner.Chosen](), lowest_ways(self.request.budget)
        for _ in range(DRY_RUNS):
            chosen = choose(described.step(), aim)
            if chosen is None and described.offer_compiled():
                chosen = choose(described.step(), aim)
            if chosen is None and failed:
                left = (way(described.step()) for way in ways)
                chosen = next((one for one in left if one not in failed), None)
            if chosen is None:
                break
            as_found = self.saves_least and described.step().peak_bytes(chosen) <= budget
            try:
                found = self._made(described, chosen, as_found)
            except InfeasibleBudget as refused:
                forget_frames(refused)
                continue
            if found.nbytes <= budget or (self.saves_least and not found.is_reserved):
                return self._settled(described, found)
            if found.is_reserved:
                failed.add(chosen)
                aim = min(aim, described.step().peak_bytes(chosen)) - (found.nbytes - budget)
        described.planners[self.role.index] = self.plan_version
        least, limit = self._least(described), self.request.budget.limit
        if limit is not None and least.budget_bytes > limit:
            if not self.goes_on or self.graph.options.enforce:
                raise least.refusal(limit)
            self.where.scope.warned.tell(least.of_a_part(limit))
        return self._settled(described, self._made(described, least.chosen))

    def _made(
        self, described: StepDescription, chosen: planner.Chosen, as_found: bool = False
    ) -> MadeVersions:
        """The versions chosen for this graph, compiled. Raises `InfeasibleBudget`."""
        index, part = self.role.index, described.parts[self.role.index]
        offers, runs = list(part.offers), described.runs_of(index)
        try:
            mine = sorted({chosen[run] for run in runs})
            compiled = {k: self._compiled(offers, k, part.interface, as_found) for k in mine}
        finally:
            described.offer(index, offers)
        if self.role.described is None:
            chosen = described.saving_most_first(index, chosen, self.request.budget.for_step)
        taken, of_run = self._reserved(described, chosen), [chosen[run] for run in runs]
        nbytes = described.step().peak_bytes(chosen) if taken is None else taken.nbytes
        return MadeVersions(compiled, of_run, nbytes, taken is not None)

    def _least(self, described: StepDescription) -> LeastVersions:
        return described.least(self.request.budget, partial(self._reserved, described))

    def _reserved(self, described: StepDescription, chosen: Sequence[int]) -> Reserved | None:
        """What the allocator takes for the whole step; None where that is not known."""
        settings = self.request.budget.counted_allocator if self._knows_whole else None
        return described.reserved(chosen, settings)

    @property
    def _knows_whole(self) -> bool:
        """Whether it is known what lies between its runs, whose order is not that of a pipeline."""
        described = self.role.described
        known = described is None or described.outside is not None
        return known and self.where.context.pipeline is None

    def _settled(self, described: StepDescription, found: MadeVersions) -> RunVersions:
        """The versions that were chosen; no other ones are offered from now on."""
        index, alone = self.role.index, self.role.described is None
        made, mine, offers = found.compiled, found.of_run, described.parts[index].offers
        self.taken.saved_bytes = sum(offers[k].version.saved_bytes for k in mine)
        kept, of_run = tuple(offers[k] for k in made), tuple(list(made).index(k) for k in mine)
        described.parts[index] = part = replace(described.parts[index], offers=kept)
        peak, counted = found.nbytes, "reserved" if found.is_reserved else "allocated"
        log.info("%s", summary(kept, of_run, peak, self.request.budget.for_step, counted))
        at_place, late = described.settle(index, of_run), self.where.context.late if alone else 0
        self.placed = described
        if not alone:
            known = described.known(index, of_run, self.taken.beside)
            known.keep(self.observed.signature, self.request)
        parts = tuple(replace(part, offers=(kept[k],)) for k in at_place if alone)
        self.taken.own_peak_bytes = peak - self.request.budget.held
        return RunVersions(tuple(made.values()), at_place, peak - late, parts)

    def _compiled(self, offers: list[Offer], place: int, own: Interface, as_found: bool) -> Promise:
        """A version, compiled; what it really takes is offered from now on.

        One that will run once may be left ``as_found``, as `Offer.asked` says.
        Raises `InfeasibleBudget` where that is more than was asked for.
        """
        request = offers[place].asked(self.request, whole=self._knows_whole, as_found=as_found)
        if request not in self.known:
            self.where.scope.compiled_again += 1
            try:
                made = self.graph.compile(request)
                # A cache answered, and has forgotten what it took.
                self.known[request] = replace(made, report=made.report or self.graph.plan(request))
            except InfeasibleBudget as refused:
                offers[place] = offers[place].raised(refused)
                raise
        offers[place] = offers[place].as_counted(self.known[request].report)
        return self.promised(self.known[request], request, own)

    def promised(
        self, version: CompiledVersion, request: Request, own: Interface | None = None
    ) -> Promise:
        """A version with what was promised of it.

        Of several runs, each with ``own`` inputs, parameters count as part of what lies around.
        """
        report, unseen, around = version.report, self.unseen_bytes, self.where.context.others
        assert report is not None
        assert request.budget.limit is not None
        peak = report.counted_peak_bytes - report.held_bytes
        if own is not None:
            part, around = versions.version_in(report), self.where.context.everything
            unseen += own.resident - own.given - self.where.context.late
            if self.where.context.pipeline is not None:
                unseen -= self.where.context.pipeline.arriving(own.incoming)
            if self.role.described is not None:
                unseen = self.role.described.outside_bytes(self.role.index)
            peak = max(part.forward_bytes + own.given, part.backward_bytes + own.incoming)
        return Promise(
            call=version.call,
            graph=f"graph {report.graph}",
            device=self.where.device,
            budget_bytes=request.budget.limit,
            peak_bytes=peak,
            held_bytes=report.held_bytes,
            reserve_bytes=unseen,
            saved_bytes=report.saved_bytes,
            unseen_bytes=self.unseen_bytes,
            around=around,
            counts_reserved=request.budget.metric == "reserved",
        )

    def plan_version(self, offer: Offer, limit_bytes: int) -> Report:
        """The graph planned as a version, which generates no kernels."""
        asked = self.request.with_budget(limit=limit_bytes)
        return self.graph.plan(offer.asked(asked, whole=self._knows_whole))
