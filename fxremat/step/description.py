"""One step as data: which run of which graph, in which order, and what lies between.

Whoever plans memory or time for a step reads this. It is made from a look at a step before
anything is compiled (`fxremat.step.preparation`), from the schedule of a pipeline
(`fxremat.step.pipelines`), from the parts of a graph that DDP splits (`fxremat.step.ddp`), from the
order in which graphs have run (`fxremat.step.scope`), or, where one graph is known to run several
times, by repeating it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fxremat.compile.request import Request
from fxremat.core.constants import UNUSED_PART
from fxremat.core.events import Outside
from fxremat.core.step import (
    NOTHING_GATHERED,
    Gathered,
    Interface,
    Step,
    StepPoint,
    first_first,
    in_order,
    last_first,
)
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.report.report import Report
from fxremat.step.events import StepEvents, composed, repeated_outside
from fxremat.step.versions import Offer, Part, followed_by

Planner = Callable[[Offer, int], Report]
"""Plans a graph as a version, under so many bytes."""


@dataclass
class StepDescription:
    """The points of a step, the part of each run, and what each part offers.

    A part is a compiled graph, which may run several times. A run of it is told by its place: the
    lowest that no other run of the part had when it came. ``part_of`` and ``place_of`` are those of
    each run. ``parts`` offer fewer versions once they are compiled. The ``request`` is one of a
    part: what is the same for all of them. ``outside`` is what is asked of the allocator outside of
    the parts, where that was recorded. Where it was not, ``held_bytes`` are there all the time, and
    of gradients ``left_bytes`` stay (None: all). Where part 1 stands for blocks that follow part 0,
    ``followers_given`` are what these are given. ``fixed`` are the versions of runs whose part is
    compiled, by the numbers of the runs.
    """

    points: tuple[StepPoint, ...]
    part_of: tuple[int, ...]
    place_of: tuple[int, ...]
    parts: list[Part]
    request: Request | None = None
    outside: tuple[Outside, ...] | None = None
    held_bytes: int = 0
    left_bytes: int | None = None
    followers_given: int | None = None
    fixed: dict[int, int] = field(default_factory=dict)
    planners: dict[int, Planner] = field(default_factory=dict)
    """Of parts whose graph is at hand."""

    def events(self, chosen: Sequence[int]) -> StepEvents | None:
        """What the step asks of the allocator; None where a version is not known so well.

        ``chosen`` is the version of each run that is not compiled yet.
        """
        versions = {**dict(enumerate(chosen)), **self.fixed}
        found = [self.parts[part].offers[versions[k]].events for k, part in enumerate(self.part_of)]
        runs = [one for one in found if one is not None]
        if not runs or len(runs) < len(found):
            return None
        outside: Iterable[Outside] | None = self.outside
        if outside is None:
            outside = repeated_outside(len(runs), runs[0], self.held_bytes, self.left_bytes)
        return composed(outside, runs.__getitem__)

    def offer(self, part: int, offers: Iterable[Offer]) -> None:
        """From now on the part offers these versions."""
        self.parts[part] = replace(self.parts[part], offers=tuple(offers))
        if self.followers_given is not None:
            self.parts[1] = followed_by(self.parts[0], self.followers_given)

    def step(self) -> Step:
        """Its points, and what the parts offer now."""
        versions = (tuple(offer.version for offer in part.offers) for part in self.parts)
        return Step(self.points, self.part_of, tuple(versions))

    def make_exact(self, chosen: Sequence[int], limit_bytes: int) -> None:
        """Have versions offered with what they really take, where their graph is at hand.

        ``chosen`` is the version of each run; each is planned under so many bytes.
        """
        for part, version in sorted({(part, chosen[k]) for k, part in enumerate(self.part_of)}):
            if part == 1 and self.followers_given is not None:
                part = 0  # those blocks take versions of this part
            plan, offers = self.planners.get(part), list(self.parts[part].offers)
            if plan is None or offers[version].exact:
                continue
            try:
                offers[version] = offers[version].as_counted(plan(offers[version], limit_bytes))
            except InfeasibleBudget as refused:
                offers[version] = offers[version].raised(refused)
                forget_frames(refused)
            self.offer(part, offers)

    def outside_bytes(self, part: int) -> int:
        """Live outside when the last run of a part goes backward, beside the gradients it gets."""
        last = self.runs_of(part)[-1]
        outside = [
            point.outside_bytes
            for point in self.points
            if (point.running, point.phase) == (last, "backward")
        ]
        return max(0, max(outside, default=0) - self.parts[part].interface.incoming)

    def runs_of(self, part: int) -> tuple[int, ...]:
        """The runs of a part, by their places."""
        runs = [run for run, own in enumerate(self.part_of) if own == part]
        return tuple(sorted(runs, key=self.place_of.__getitem__))


def repeated(
    parts: Sequence[Interface],
    part_of: Sequence[int],
    outside_bytes: int,
    gathered: Gathered = NOTHING_GATHERED,
    *,
    either_order: bool = False,
) -> tuple[StepPoint, ...]:
    """The points of a step in which some runs wait at once, and the last goes backward first.

    In ``either_order`` the first may be the first, too, as where micro-batches go backward in turn.
    The rest is as in `in_order`.
    """
    count = len(part_of)
    points = in_order(parts, part_of, last_first(count), outside_bytes, gathered)
    if either_order:
        in_turn = in_order(parts, part_of, first_first(count), outside_bytes, gathered)
        points += tuple(one for one in in_turn if one.phase == "backward")
    return points


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
    blocks that are given ``followers_given``, if it is not None.
    """
    if left_bytes is not None:
        left = min(part.interface.left, left_bytes)
        part = replace(part, interface=replace(part.interface, left=left))
    parts, own = [part, *before], [0] * len(places)
    if followers_given is not None:
        parts.append(followed_by(part, followers_given))
        own[1:] = [len(parts) - 1] * (len(places) - 1)
    part_of = (*range(1, len(before) + 1), *own)
    outside = held_bytes + part.interface.resident - part.interface.given
    interfaces = [part.interface for part in parts]
    return StepDescription(
        repeated(interfaces, part_of, outside, gathered, either_order=either_order),
        part_of,
        (*range(len(before)), *places),
        parts,
        held_bytes=held_bytes + gathered.ahead + gathered.sent + len(places) * gathered.kept,
        left_bytes=left_bytes,
        followers_given=followers_given,
    )


def unplanned_bytes(request: Request) -> int:
    """Of a budget, what no version is planned to take: for tuning, and what may stay unused.

    How blocks of several graphs come to lie is not known before the events of the step are. Where
    the step of the optimizer takes more than the budget, nothing is left to plan for.
    """
    assert request.budget.limit is not None
    if request.budget.optimizer_step > request.budget.limit:
        return request.budget.limit
    unused = UNUSED_PART * request.budget.limit if request.budget.metric == "reserved" else 0
    return request.budget.autotune + int(unused)


def budget_for(nbytes: int, request: Request) -> int:
    """The least that leaves so many bytes for all versions together."""
    part = UNUSED_PART if request.budget.metric == "reserved" else 0.0
    least = math.ceil((nbytes + request.budget.autotune) / (1 - part))
    return max(least, request.budget.optimizer_step)
