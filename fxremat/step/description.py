"""One step as data: which run of which graph, in which order, and what lies between.

It is made from a look at a step before anything is compiled (`fxremat.step.preparation`), from the
schedule of a pipeline or the parts of a graph that DDP splits (`fxremat.step.context`), from the
order in which graphs have run (`fxremat.step.scope`), or by repeating one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from fxremat.compile import session
from fxremat.compile.constants import DRY_RUNS
from fxremat.compile.request import Budget, Request
from fxremat.core.events import Outside, RunEvents
from fxremat.core.layout import NOWHERE, RunLayout, StepLayout
from fxremat.core.step import (
    NOTHING_GATHERED,
    Gathered,
    Step,
    StepPoint,
    Version,
    first_first,
    in_order,
    last_first,
)
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.memory.composed_steps import repeated_outside
from fxremat.memory.layout import arrange
from fxremat.memory.reserved_bytes import Reserved, order_of, reserved_by_step
from fxremat.planner import step_versions as planner
from fxremat.sizes import format_bytes
from fxremat.step.promise import MadeVersions
from fxremat.step.versions import KnownVersions, Offer, Part, Planner, followed_by


@dataclass
class StepDescription:
    """The points of a step, the part of each run, and what each part offers.

    A part is a compiled graph, which may run several times. A run of it is told by its place: the
    lowest that no other run of the part had when it came. ``part_of`` and ``place_of`` are those of
    each run. ``parts`` offer fewer versions once they are compiled. The ``request`` is one of a
    part: what is the same for all of them. ``outside`` gives what is asked of the allocator outside
    of the parts, by what each run asks for; None where the order of runs is not known. Where part 1
    stands for blocks that follow part 0, ``followers_given`` are what these are given. ``fixed``
    are the versions of runs whose part is compiled, by the numbers of the runs.
    """

    points: tuple[StepPoint, ...]
    part_of: tuple[int, ...]
    place_of: tuple[int, ...]
    parts: list[Part]
    request: Request | None = None
    outside: Callable[[Sequence[RunEvents]], Iterable[Outside]] | None = None
    followers_given: int | None = None
    fixed: dict[int, int] = field(default_factory=dict)
    planners: dict[int, Planner] = field(default_factory=dict)
    """Of parts whose graph is at hand."""
    seen_between: bool = False
    """Whether the points have what was seen between the halves."""
    reported: set[int] = field(default_factory=set)
    """The graphs that are its parts, by the numbers of their reports."""
    layouts: dict[tuple[int, ...], list[StepLayout]] = field(default_factory=dict)
    """Of all parts, by the versions of all runs."""

    @property
    def digest(self) -> str:
        """Names what the step is, but for the versions of its parts."""
        return session.digest(self.points, self.part_of, self.place_of)

    def reserved(
        self, chosen: Sequence[int], settings: AllocatorSettings | None
    ) -> Reserved | None:
        """What the step takes of the allocator, unless it has no ``settings`` that count.

        ``chosen`` is the version of each run that is not compiled yet. None where one is not known
        so well.
        """
        if settings is None:
            return None
        found = self._events({**dict(enumerate(chosen)), **self.fixed})
        return None if found is None else reserved_by_step(*found, settings)

    def _events(self, versions: Mapping[int, int]) -> tuple[list[RunEvents], list[Outside]] | None:
        """What runs ask for, and what is outside; None where a version is not known so well."""
        found = [self.parts[part].offers[versions[k]].events for k, part in enumerate(self.part_of)]
        runs = [one for one in found if one is not None]
        if not runs or len(runs) < len(found) or self.outside is None:
            return None
        return runs, list(self.outside(runs))

    def layout_of(self, part: int, device: str) -> StepLayout:
        """Where the runs of a part lie in the arena of all; nowhere until all of them are known.

        The same layout is the same object, until another one is due.
        """
        if len(self.fixed) < len(self.part_of):
            return NOWHERE
        key = tuple(self.fixed[run] for run in range(len(self.part_of)))
        if key not in self.layouts:
            if (known := self._events(self.fixed)) is None:
                return NOWHERE
            runs, outside = known
            whole = arrange(runs, order_of(outside), device, outside=outside).layout
            self.layouts[key] = [self._at_places(own, whole) for own in range(len(self.parts))]
        return self.layouts[key][part]

    def _at_places(self, part: int, whole: StepLayout) -> StepLayout:
        """The layout of the runs of a part, by their places."""
        of_place = {self.place_of[run]: run for run in self.runs_of(part)}
        places = (of_place.get(place) for place in range(max(of_place) + 1))
        runs = tuple(RunLayout() if run is None else whole.runs[run] for run in places)
        return StepLayout(runs, whole.arena_bytes)

    def offer(self, part: int, offers: Iterable[Offer]) -> None:
        """From now on the part offers these versions."""
        self.parts[part] = replace(self.parts[part], offers=tuple(offers))
        if self.followers_given is not None:
            self.parts[1] = followed_by(self.parts[0], self.followers_given)

    def offer_compiled(self) -> bool:
        """Offer the versions that parts have compiled, too; whether there are any.

        What is planned of a graph may be far above what its code takes, where this is one kernel.
        """
        found = False
        for part, own in enumerate(self.parts):
            more = tuple(one for one in own.compiled if one not in own.offers)
            if more and self._is_open(part):
                self.offer(part, (*own.offers, *more))
                found = True
        return found

    def see_between(self, nbytes: int) -> None:
        """So many bytes were seen while all runs wait, and nothing of a part runs."""
        if nbytes and not self.seen_between:
            self.seen_between = True
            self.points = tuple(
                replace(one, outside_bytes=one.outside_bytes + nbytes * (one.running is None))
                for one in self.points
            )

    def step(self) -> Step:
        """Its points, and what the parts offer now."""
        versions = (tuple(offer.version for offer in part.offers) for part in self.parts)
        return Step(self.points, self.part_of, tuple(versions))

    def make_exact(
        self, chosen: Sequence[int], limit_bytes: int, without: int | None = None
    ) -> bool:
        """Have versions offered with what they really take, where their graph is at hand.

        ``chosen`` is the version of each run; each is planned under so many bytes, those of the
        part ``without`` not. Whether none was refused: what one that is refused takes is only
        guessed then.
        """
        planned, runs = True, [(part, chosen[k]) for k, part in enumerate(self.part_of)]
        for part, version in sorted({one for one in runs if one[0] != without}):
            if part == 1 and self.followers_given is not None:
                part = 0  # those blocks take versions of this part
            plan, offers = self.planners.get(part), list(self.parts[part].offers)
            if plan is None or offers[version].exact:
                continue
            try:
                offers[version] = offers[version].as_counted(plan(offers[version], limit_bytes))
            except InfeasibleBudget as refused:
                offers[version] = offers[version].raised(refused)
                planned = False
                forget_frames(refused)
            self.offer(part, offers)
        return planned

    def least(self, budget: Budget, reserved: Reserves) -> LeastVersions:
        """The versions that need the least budget, of those that are counted in a dry run.

        ``reserved`` says what versions take of the allocator, None where that is not counted. Then
        versions that save more may need less: more of what is free fits. So from those of the least
        peak on, faster ones are tried that allocate less and less.
        """
        ways = (self._needed(way, budget, reserved) for way in lowest_ways(budget))
        best = min(ways, key=attrgetter("budget_bytes"))
        aim = best.budget_bytes - budget.autotune
        for _ in range(DRY_RUNS if budget.metric == "reserved" else 0):
            fastest = planner.fastest(self.step(), aim)
            if fastest is None:
                break
            found = self._needed(partial(_these, fastest), budget, reserved)
            over = max(1, found.budget_bytes - best.budget_bytes)
            aim = min(aim, self.step().peak_bytes(fastest)) - over
            best = min(best, found, key=attrgetter("budget_bytes"))
        return best

    def enough_at(self, points: tuple[StepPoint, ...], least: LeastVersions, budget: Budget) -> int:
        """A budget that is enough for these versions at other points, too."""
        peak = replace(self.step(), points=points).peak_bytes(least.chosen)
        return max(least.budget_bytes, budget.least_for(peak + least.unused))

    def _needed(self, choose: Way, budget: Budget, reserved: Reserves) -> LeastVersions:
        """What one way to choose needs."""
        tried = list[tuple[bool, int, planner.Chosen]]()
        for _ in range(DRY_RUNS):
            chosen = choose(self.step())
            planned = self.step().peak_bytes(chosen)
            guessed = not self.make_exact(chosen, budget.least_for(planned))
            counted = self.step().peak_bytes(chosen)
            fits = budget.limit is not None and budget.least_for(counted) <= budget.limit
            # less than was planned is named only to one who asks for as much: plans follow limits
            tried.append((guessed, counted if fits else max(planned, counted), chosen))
            if counted <= planned:
                break
        _, least, chosen = min(tried)
        taken = reserved(chosen)
        if taken is None:
            return LeastVersions(chosen, budget.least_for(least))
        unused = max(0, taken.nbytes - self.step().peak_bytes(chosen))
        return LeastVersions(chosen, budget.least_for(taken.nbytes), unused)

    def surely(
        self, part: int, chosen: Sequence[int], limit_bytes: int
    ) -> tuple[Step, planner.Chosen] | None:
        """Versions that were counted for all other parts, which fit beside those chosen for one.

        What is planned may be too little: the code of graphs that are compiled later takes more.
        None where those that were counted, or are compiled, do not fit, or a part has none.
        """
        step = self.step()
        others = [own for own in range(len(self.parts)) if own != part and self._is_open(own)]
        counted = {own: self._counted(own) for own in others}
        if not all(counted.values()):
            return None
        versions = (counted.get(own, each) for own, each in enumerate(step.versions))
        sure, of_run = replace(step, versions=tuple(versions)), list(chosen)
        for run, own in enumerate(self.part_of):
            of_run[run] = self.fixed.get(run, 0 if own in counted else chosen[run])

        def peak(own: int, version: int) -> int:
            with_it = [version if self.part_of[k] == own else one for k, one in enumerate(of_run)]
            return sure.peak_bytes(with_it)

        for own, each in counted.items():
            best = min(range(len(each)), key=partial(peak, own))
            for run in self.runs_of(own):
                of_run[run] = best
        return (sure, tuple(of_run)) if sure.peak_bytes(of_run) <= limit_bytes else None

    def _is_open(self, part: int) -> bool:
        """Whether the versions of a part are still to be chosen."""
        return not any(run in self.fixed for run in self.runs_of(part))

    def _counted(self, part: int) -> tuple[Version, ...]:
        """The versions of a part that were counted in a dry run, those of least bytes first."""
        own = self.parts[part]
        found = [one.version for one in (*own.offers, *own.compiled) if one.exact]
        return tuple(sorted(found, key=lambda one: one.saved_bytes))

    def know_others(self, part: int, limit_bytes: int) -> None:
        """Have enough versions of the other parts counted before one of these is compiled."""
        for _ in range(DRY_RUNS):
            chosen, before = planner.fastest(self.step(), limit_bytes), self.step()
            if chosen is None or self.surely(part, chosen, limit_bytes) is not None:
                return
            self.make_exact(chosen, limit_bytes, without=part)
            if self.step() == before:
                return  # they are counted, or their graphs are not at hand

    def widen(self, part: int, chosen: Sequence[int], limit_bytes: int) -> bool:
        """Offer the chosen versions of a part with all that the rest leaves; whether that is more.

        Versions that are compiled stay, and so do those that keep everything.
        """
        found, sure = False, self.surely(part, chosen, limit_bytes)
        for version in sorted({chosen[run] for run in self.runs_of(part)}):
            offers, step = list(self.parts[part].offers), self.step()
            fastest = min(one.version.time_us for one in offers)
            most = step.widest(part, version, chosen, limit_bytes)
            if sure is not None:
                most = most.and_at_most(sure[0].widest(part, version, sure[1], limit_bytes))
            keeps = offers[version].exact or offers[version].version.time_us <= fastest
            if keeps or most == offers[version].version:
                continue
            resident = self.parts[part].interface.resident
            offers[version], found = offers[version].within(most, resident), True
            self.offer(part, offers)
        return found

    def filled(self, part: int, budget_bytes: int, make: Make) -> MadeVersions | None:
        """The fastest versions, made, those of a part with all that the others leave of the budget.

        Few versions are offered. What lies between them is found here: the plan that is fastest
        under the bytes that are left. None where that gives no more, or is not kept.
        """
        offered, aim = self.parts[part].offers, budget_bytes
        for _ in range(2):  # the second time with less, by what the allocator adds
            chosen = planner.fastest(self.step(), aim)
            if chosen is None or not self.widen(part, chosen, aim):
                return None
            try:
                found = make(chosen)
            except InfeasibleBudget as refused:
                forget_frames(refused)
                break
            if found.nbytes <= budget_bytes:
                return found
            aim -= found.nbytes - budget_bytes
            self.offer(part, offered)
        self.offer(part, offered)
        return None

    def known(self, part: int, of_run: tuple[int, ...], beside: int) -> KnownVersions:
        """What is kept of the runs of a part for later runs of the program."""
        places = tuple(self.place_of[run] for run in self.runs_of(part))
        offers = tuple(replace(one, events=None) for one in self.parts[part].offers)
        return KnownVersions(self.digest, offers, of_run, places, beside)

    def as_before(
        self, part: int, known: KnownVersions, most_bytes: int | None, make: Make
    ) -> MadeVersions | None:
        """The versions that a part had when the program ran before.

        None where they are refused, or the step takes more than ``most_bytes`` with them.
        """
        offered, at = self.parts[part].offers, dict(zip(known.places, known.of_run, strict=True))
        least = min(known.of_run, key=lambda k: known.offers[k].version.saved_bytes)
        taken = {run: at.get(self.place_of[run], least) for run in self.runs_of(part)}
        self.offer(part, known.offers)
        lowest = planner.lowest(self.step())
        with suppress(InfeasibleBudget):
            found = make(tuple(taken.get(run, k) for run, k in enumerate(lowest)))
            if most_bytes is None or found.nbytes <= most_bytes:
                return found
        self.offer(part, offered)
        return None

    def outside_bytes(self, part: int) -> int:
        """Live outside when the last run of a part goes backward, beside the gradients it gets."""
        last = self.runs_of(part)[-1]
        points = [one for one in self.points if (one.running, one.phase) == (last, "backward")]
        outside = max((one.outside_bytes for one in points), default=0)
        return max(0, outside - self.parts[part].interface.incoming)

    def saving_most_first(
        self, part: int, chosen: tuple[int, ...], budget_bytes: int
    ) -> tuple[int, ...]:
        """The chosen versions, of a part by what they save, the most first, within the budget.

        Blocks of one class are several graphs where their inputs differ: the first block's needs no
        gradient. These share the places, and each is planned as if it had all of them. So at each
        place they should save about as much.
        """
        step, runs = self.step(), self.runs_of(part)
        versions, mine = step.versions[part], [chosen[run] for run in runs]
        by_saved = sorted(mine, key=lambda k: versions[k].saved_bytes, reverse=True)
        sorted_so = list(chosen)
        for run, k in zip(runs, by_saved, strict=True):
            sorted_so[run] = k
        return tuple(sorted_so) if step.peak_bytes(sorted_so) <= budget_bytes else chosen

    def settle(self, part: int, of_run: Sequence[int]) -> tuple[int, ...]:
        """Note the versions of a part's runs; the version of each place.

        Other parts have the places between them: a run that comes there saves least.
        """
        runs, offers = self.runs_of(part), self.parts[part].offers
        self.fixed.update(zip(runs, of_run, strict=True))
        least = min(of_run, key=lambda k: offers[k].version.saved_bytes)
        taken = dict(zip((self.place_of[run] for run in runs), of_run, strict=True))
        return tuple(taken.get(place, least) for place in range(max(taken) + 1))

    def runs_of(self, part: int) -> tuple[int, ...]:
        """The runs of a part, by their places."""
        runs = [run for run, own in enumerate(self.part_of) if own == part]
        return tuple(sorted(runs, key=self.place_of.__getitem__))


@dataclass(frozen=True)
class LeastVersions:
    """The version of each run, the budget that they need, and what is unused of it, in bytes."""

    chosen: planner.Chosen
    budget_bytes: int
    unused: int = 0

    def refusal(self, limit_bytes: int) -> InfeasibleBudget:
        """The error of a budget that is less."""
        return InfeasibleBudget(limit_bytes, self.budget_bytes, (), self.unused)

    def of_a_part(self, limit_bytes: int) -> str:
        """What is said where they are of one graph, and graphs follow that are not known yet."""
        needed, limit = format_bytes(self.budget_bytes), format_bytes(limit_bytes)
        return (
            f"fxremat: one graph of the step needs {needed}, and the budget is {limit}. Training "
            "goes on until all graphs are known; then an error names the least budget for them."
        )


Make = Callable[[planner.Chosen], MadeVersions]
"""Compiles the versions that are chosen of a part; raises `InfeasibleBudget`."""
Way = Callable[[Step], planner.Chosen]
"""How to choose versions."""
Reserves = Callable[[Sequence[int]], Reserved | None]
"""What the allocator takes for the chosen version of each run; None where that is not known."""


def lowest_ways(budget: Budget) -> tuple[Way, ...]:
    """How to choose versions that take little.

    Where what is outside makes the peak, any versions have it that are low enough beside it. More
    may then stay unused between what they save: so they are also chosen by themselves.
    """
    if budget.metric != "reserved":
        return (planner.lowest,)
    return planner.lowest, lambda step: planner.lowest(_by_itself(step))


def _by_itself(step: Step) -> Step:
    """The same without what is live outside."""
    points = tuple(replace(point, outside_bytes=0) for point in step.points)
    return replace(step, points=points)


def _these(chosen: planner.Chosen, step: Step) -> planner.Chosen:
    return chosen


def repeated_step(
    part: Part,
    places: Sequence[int],
    held_bytes: int,
    left_bytes: int | None = None,
    gathered: Gathered = NOTHING_GATHERED,
    before: Sequence[Part] = (),
    followers_given: int | None = None,
    *,
    either_order: bool = False,
) -> StepDescription:
    """A step in which one part runs at these places at once, and nothing else is known.

    The runs ``before`` wait already, each of a part of its own. Of the gradients of a run
    ``left_bytes`` stay; None: all that are no inputs' of its own. All runs but the first are of
    blocks that are given ``followers_given``, if it is not None. The last run goes backward first;
    in ``either_order`` the first may, too, as where micro-batches go backward in turn.
    """
    part = part.leaving(left_bytes)
    parts, own = [part, *before], [0] * len(places)
    if followers_given is not None:
        parts.append(followed_by(part, followers_given))
        own[1:] = [len(parts) - 1] * (len(places) - 1)
    part_of = (*range(1, len(before) + 1), *own)
    outside = held_bytes + part.interface.resident - part.interface.given
    there = held_bytes + gathered.ahead + gathered.sent + len(places) * gathered.kept

    def outside_of(runs: Sequence[RunEvents]) -> Iterable[Outside]:
        return repeated_outside(len(runs), runs[0], there, left_bytes)

    interfaces, count = [part.interface for part in parts], len(part_of)
    points = in_order(interfaces, part_of, last_first(count), outside, gathered)
    if either_order:
        in_turn = in_order(interfaces, part_of, first_first(count), outside, gathered)
        points += tuple(one for one in in_turn if one.phase == "backward")
    return StepDescription(
        points,
        part_of,
        (*range(len(before)), *places),
        parts,
        outside=None if either_order or before else outside_of,
        followers_given=followers_given,
    )


def summary(
    offers: Sequence[Offer], of_run: Sequence[int], peak_bytes: int, limit_bytes: int, counted: str
) -> str:
    """One line for the log."""
    each = ", ".join(
        f"{of_run.count(k)} save {format_bytes(offers[k].version.saved_bytes)}"
        for k in sorted(set(of_run))
    )
    return (
        f"fxremat: {len(of_run)} runs wait at once: {each}; peak {format_bytes(peak_bytes)} "
        f"{counted}, of {format_bytes(limit_bytes)}"
    )
