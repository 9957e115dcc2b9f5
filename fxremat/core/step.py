"""A training step as the parts that are compiled by themselves, and what lives outside of them.

A *part* is a part of a model that is one compiled graph, such as a block. It *runs* several times
in a step: once for each block that it stands for, or for each micro-batch. From the end of its
forward to its backward a run waits, and holds what it has saved. Plain data.

    outside   ▁▁▁▁▁▁▁▂▂▂█▂▂▁▁▁▁▁▁▁▁        parameters, the loss, gradients
    run 0     ──▅▂▂▂▂▂▂▂▂▂▂▂▂▂▂▇──         forward, waits, backward
    run 1     ─────▅▂▂▂▂▂▂▂▂▇─────
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Version:
    """One way to run a part. Bytes are beside what lives outside; ``time_us`` is of both halves.

    ``forward_bytes`` and ``backward_bytes`` are the most while it runs, the latter with what is
    saved; ``saved_bytes`` are held while it waits.
    """

    time_us: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    @property
    def figures(self) -> tuple[float, int, int, int]:
        """All that counts, each the better the smaller."""
        return self.time_us, self.saved_bytes, self.forward_bytes, self.backward_bytes

    def and_at_most(self, other: Version) -> Version:
        """With the bytes of the other one where these are fewer."""
        return Version(
            self.time_us,
            min(self.saved_bytes, other.saved_bytes),
            min(self.forward_bytes, other.forward_bytes),
            min(self.backward_bytes, other.backward_bytes),
        )


@dataclass(frozen=True)
class StepPoint:
    """One point of the step: which runs wait, and which runs.

    ``outside_bytes`` are live outside of all parts; what ``running`` is given counts there in its
    forward, as long as its caller holds it.
    """

    outside_bytes: int
    waiting: tuple[int, ...] = ()
    running: int | None = None
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True)
class Step:
    """The points of a step, the part of each run, and the versions that each part may take."""

    points: tuple[StepPoint, ...]
    part_of: tuple[int, ...]
    versions: tuple[tuple[Version, ...], ...]

    def version(self, run: int, chosen: Sequence[int]) -> Version:
        """The one that a run takes."""
        return self.versions[self.part_of[run]][chosen[run]]

    def bytes_at(self, point: StepPoint, chosen: Sequence[int]) -> int:
        """Live at a point; ``chosen`` is the version of each run, by its place."""
        total = point.outside_bytes
        total += sum(self.version(run, chosen).saved_bytes for run in point.waiting)
        if point.running is not None:
            one = self.version(point.running, chosen)
            total += one.forward_bytes if point.phase == "forward" else one.backward_bytes
        return total

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The most at any point."""
        return max((self.bytes_at(point, chosen) for point in self.points), default=0)

    def widest(self, part: int, version: int, chosen: Sequence[int], limit: int) -> Version:
        """The most that a version of a part may take, if other runs take what they have chosen.

        All points stay within the limit, in bytes. Its time is that of the version as it is.
        """

        def takes(run: int) -> bool:
            return self.part_of[run] == part and chosen[run] == version

        left = dict[str, int]()
        waiting = list[tuple[str, int, int]]()
        more: int | None = None
        for point in self.points:
            runs = point.running is not None and takes(point.running)
            many = sum(map(takes, point.waiting))
            free = limit - self.bytes_at(point, chosen)
            if many:
                more = min(free // (many + runs), free if more is None else more)
            if runs:
                waiting.append((point.phase, many, free))
        saved = max(0, more or 0)
        for phase, many, free in waiting:
            left[phase] = max(0, min(free - many * saved, left.get(phase, free)))
        one = self.versions[part][version]
        return Version(
            one.time_us,
            one.saved_bytes + saved,
            one.forward_bytes + left.get("forward", 0),
            one.backward_bytes + left.get("backward", 0),
        )

    def time_us(self, chosen: Sequence[int]) -> float:
        """Of all runs together."""
        return sum(self.version(run, chosen).time_us for run in range(len(self.part_of)))


@dataclass(frozen=True)
class Interface:
    """The bytes of a part that others hold too, or instead of it.

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
class Gathered:
    """What FSDP2 holds beside the parts that it shards, in bytes.

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


ALL_RESULTS = sys.maxsize
"""In the place of the bytes of all that a run returns."""
NOTHING_HELD: Mapping[int, int] = {}
Order = Sequence[tuple[int, Literal["forward", "backward"]]]
"""Which run goes forward or backward, one after the other."""


def in_order(
    parts: Sequence[Interface],
    part_of: Sequence[int],
    order: Order,
    outside_bytes: int,
    gathered: Gathered = NOTHING_GATHERED,
    results_kept: Mapping[int, int] = NOTHING_HELD,
    results_held: Mapping[int, int] = NOTHING_HELD,
    weights: Sequence[Mapping[int, int]] = (),
) -> tuple[StepPoint, ...]:
    """The points of a step whose runs go forward and backward in this order.

    ``part_of`` each run says which of the ``parts`` it is of. ``outside_bytes`` are there all
    the time, what no run has of its own among them; what is ``gathered`` comes in addition. The
    gradients of a part stay from its backward on; one that has gone backward may run again, as
    the discriminator of a GAN does, and adds to them; so does another part that has ``weights``
    of it, bytes by address of those of each run, where these are known. What runs outside holds
    so many bytes of a run's results as ``results_kept`` has for it until it goes backward, and
    those in ``results_held`` to the end. Whoever goes backward from a loss holds
    its gradient until all runs have gone backward that do so then.
    """
    points, waiting, left, ended = list[StepPoint](), list[int](), 0, set[int]()
    held = [min(results_held.get(k, 0), parts[part].results) for k, part in enumerate(part_of)]
    kept = [min(results_kept.get(k, 0), parts[part].results) for k, part in enumerate(part_of)]
    of_loss = 0
    added = set[int]()
    for k, (run, phase) in enumerate(order):
        own = parts[part_of[run]]
        if phase == "forward":
            there = gathered.ahead + len(waiting) * gathered.kept
            outside = outside_bytes + left + there + own.given
            points.append(StepPoint(outside, tuple(waiting), run, "forward"))
            waiting.append(run)
            there = max(kept[run], held[run])
            outside_bytes += there
            if k + 1 == len(order) or order[k + 1][1] == "backward":  # the loss, between them
                others = gathered.ahead + len(waiting) * gathered.kept
                between = outside_bytes + left + others + own.results - there + own.incoming
                points.append(StepPoint(between, tuple(waiting)))
            continue
        waiting.remove(run)
        outside_bytes -= max(0, kept[run] - held[run])
        begins = k > 0 and order[k - 1][1] == "forward"
        of_loss = 0 if begins else of_loss
        outside = outside_bytes + left + of_loss + own.incoming + len(waiting) * gathered.kept
        of_loss = own.incoming if begins and is_number(own.incoming) else of_loss
        outside += (gathered.again if waiting else 0) + (gathered.sent if ended else 0)
        points.append(StepPoint(outside, tuple(waiting), run, "backward"))
        trained = weights[run] if weights else {}
        again = sum(nbytes for key, nbytes in trained.items() if key in added)
        left += 0 if run in ended else max(0, own.left - again)
        ended.add(run)
        added |= trained.keys()
    return tuple(points)


def is_number(nbytes: int) -> bool:
    """Whether a result of so many bytes is one number, as a loss is."""
    return 0 < nbytes <= 8


def last_first(count: int) -> Order:
    """So many runs go forward, and then the last of them backward first."""
    runs = range(count)
    return [*((k, "forward") for k in runs), *((k, "backward") for k in reversed(runs))]


def first_first(count: int) -> Order:
    """So many runs go forward, and then the first of them backward first."""
    return [*((k, "forward") for k in range(count)), *((k, "backward") for k in range(count))]
