"""A training step as the units that are compiled by themselves, and what lives outside of them.

A *unit* is a part of a model that is one compiled graph, such as a block. It *runs* several times
in a step: once for each block that it stands for, or for each micro-batch. From the end of its
forward to its backward a run waits, and holds what it has saved. Plain data.

    outside   ▁▁▁▁▁▁▁▂▂▂█▂▂▁▁▁▁▁▁▁▁        parameters, the loss, gradients
    run 0     ──▅▂▂▂▂▂▂▂▂▂▂▂▂▂▂▇──         forward, waits, backward
    run 1     ─────▅▂▂▂▂▂▂▂▂▇─────
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Version:
    """One way to run a unit. Bytes are beside what lives outside; ``time_us`` is of both halves.

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


@dataclass(frozen=True)
class Moment:
    """One moment of the step: which runs wait, and which runs.

    ``outside_bytes`` are live outside of all units; what ``running`` is given counts there in its
    forward, as long as its caller holds it.
    """

    outside_bytes: int
    waiting: tuple[int, ...] = ()
    running: int | None = None
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True)
class UnitStep:
    """The moments of a step, the unit of each run, and the versions that each unit may take."""

    moments: tuple[Moment, ...]
    unit_of: tuple[int, ...]
    versions: tuple[tuple[Version, ...], ...]

    def version(self, run: int, chosen: Sequence[int]) -> Version:
        """The one that a run takes."""
        return self.versions[self.unit_of[run]][chosen[run]]

    def bytes_at(self, moment: Moment, chosen: Sequence[int]) -> int:
        """Live at a moment; ``chosen`` is the version of each run, by its place."""
        total = moment.outside_bytes
        total += sum(self.version(run, chosen).saved_bytes for run in moment.waiting)
        if moment.running is not None:
            one = self.version(moment.running, chosen)
            total += one.forward_bytes if moment.phase == "forward" else one.backward_bytes
        return total

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The most at any moment."""
        return max((self.bytes_at(moment, chosen) for moment in self.moments), default=0)

    def time_us(self, chosen: Sequence[int]) -> float:
        """Of all runs together."""
        return sum(self.version(run, chosen).time_us for run in range(len(self.unit_of)))


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
