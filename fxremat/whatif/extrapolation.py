"""Steps with few of the blocks that a model repeats, continued to all of them.

Blocks between the first and the last are alike: as torch cuts a step, each adds the same to its
time, to what is live between forward and backward, and to what is live at the end. So two steps
that differ in nothing but the number of blocks give straight lines, which are continued to the
whole model.

Plans of the planner are no straight lines: of few blocks all but one may run again from the inputs
of the first, of many not. So the step with most blocks is planned, and each further block is taken
to be either checkpointed or as torch has it. There is such a plan: what it takes is known from the
two lines. A better one may run several blocks again from one input; it is not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.whatif.symbolic_step import Expected, PeaksBySize, Sizes, SymbolicStep


@dataclass(frozen=True)
class Line:
    """Over numbers of blocks: those ``studied``, one or two of them, continued to ``whole``."""

    studied: tuple[int, ...]
    whole: int

    @property
    def further(self) -> int:
        """Blocks of the whole that are in no step."""
        return self.whole - self.studied[-1]

    def slope(self, values: Sequence[float]) -> float:
        """What each block adds; nothing is less for more blocks. 0 where one number is studied."""
        if len(values) == 1:
            return 0.0
        return max(0.0, (values[-1] - values[0]) / (self.studied[-1] - self.studied[0]))

    def continued(self, values: Sequence[float]) -> float:
        """The value for all blocks of the model."""
        return values[-1] + self.further * self.slope(values)


@dataclass
class TorchSteps:
    """Steps with torch's own partition, one for each number of blocks, as one size varies."""

    line: Line
    steps: Sequence[SymbolicStep]
    sizes: Sizes
    what: str
    peaks: Sequence[PeaksBySize] = field(init=False)

    def __post_init__(self) -> None:
        self.peaks = [step.torch_peaks(self.sizes, self.what) for step in self.steps]

    def peak_bytes(self, size: int) -> int:
        """The peak of the whole, by a dry run of each step at this size."""
        return self._continued([peaks.at(size) for peaks in self.peaks])

    def expected_bytes(self, size: int) -> int:
        """The peak of the whole, as dry runs of each step at other sizes say."""
        return self._continued(self._told(size))

    def time_us(self, size: int) -> float:
        """The planned time of the whole."""
        return self.line.continued(self._times(size))

    def bytes_per_block(self, size: int) -> float:
        """What each further block adds to what is live: what it saves, or its gradients."""
        return max(self._saved_and_left(self._told(size)))

    def us_per_block(self, size: int) -> float:
        """What each further block adds to the planned time."""
        return self.line.slope(self._times(size))

    def _told(self, size: int) -> list[DryRun]:
        return [peaks.expected(size, self.sizes[self.what]) for peaks in self.peaks]

    def _times(self, size: int) -> list[float]:
        return [step.torch_time_us({**self.sizes, self.what: size}) for step in self.steps]

    def _continued(self, shown: Sequence[DryRun]) -> int:
        """The peak of the whole, in what the budget counts.

        Where the backward begins, all blocks have saved; where it ends, all have gradients. In
        between more and more of these take the place of those. So the peak is that before or after
        the middle of the backward. Before it, Inductor may run parts of many blocks again at once:
        each block then adds more than it has saved. What of that is held beyond the middle is no
        more than that. What the budget counts beyond live bytes is a line, too, but not less than
        it was, and no larger a part.
        """
        last, further = shown[-1], self.line.further
        saved, left = self._saved_and_left(shown)
        parts = [_early_and_late(one) for one in shown]
        again, held = (self.line.slope(values) for values in zip(*parts, strict=True))
        early = parts[-1][0] + further * max(saved, again)
        late = parts[-1][1] + further * max(left, min(again, held))
        live = max(early, late)
        unused = [
            peaks.peak_of(one) - one.peak_bytes
            for peaks, one in zip(self.peaks, shown, strict=True)
        ]
        most = unused[-1] * live / max(1, last.peak_bytes)
        return int(live + min(self.line.continued(unused), most))

    def _saved_and_left(self, shown: Sequence[DryRun]) -> tuple[float, float]:
        """What each block adds to what is live between forward and backward, and at the end."""
        saved = self.line.slope([one.saved_bytes for one in shown])
        return saved, self.line.slope([one.left_bytes for one in shown])


def _early_and_late(shown: DryRun) -> tuple[int, int]:
    """The most live bytes before the middle of the backward, and after it."""
    live, middle = shown.live_bytes, (shown.forward_steps + len(shown.live_bytes)) // 2
    return max(live[:middle], default=0), max(live[middle:], default=0)


@dataclass
class PlannedSteps:
    """The step with most blocks, planned at one size after the other.

    Of further blocks it is known what they take as torch has them, ``plain``, and ``checkpointed``.
    """

    plain: TorchSteps
    checkpointed: TorchSteps | None
    asked: dict[int, SymbolicStep] = field(default_factory=dict)

    def quickest(self, size: int, budget_bytes: int, kept: float = 0.0) -> Expected:
        """A plan that is found quickly; where none is within the bytes, the one of least.

        So large a part of the further blocks is ``kept`` as torch has them.
        """
        if size not in self.asked:
            sizes = {**self.plain.sizes, self.plain.what: size}
            self.asked[size] = self.plain.steps[-1].with_numbers(sizes)
        nbytes, time_us = self._further(size, kept)
        plan = self.asked[size].quickest(max(0, budget_bytes - nbytes))
        return Expected(
            plan.peak_bytes + nbytes,
            plan.time_us + time_us,
            lambda: plan.dry_run_peak() + nbytes,
        )

    def _further(self, size: int, kept: float) -> tuple[int, float]:
        """The bytes and the microseconds of the blocks that are in no step."""
        further = self.plain.line.further
        if not further:
            return 0, 0.0
        whole, again = self.plain, self.checkpointed or self.plain
        nbytes = kept * whole.bytes_per_block(size) + (1 - kept) * again.bytes_per_block(size)
        time_us = kept * whole.us_per_block(size) + (1 - kept) * again.us_per_block(size)
        return int(further * nbytes), further * time_us
