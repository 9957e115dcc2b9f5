"""How fast the machine is just now, so that times taken at different moments can be compared.

A core's clock, and the neighbours on its chip, change how long the same matmul takes by a quarter
within minutes. Times are kept on disk and added up, so they have to be of one pace: each is taken
together with that of a fixed matmul, the yardstick, and scaled to the pace at which the yardstick
was first timed. Calls that are timed within moments share its runs. On a GPU times are left as they
are.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from fxremat.cost.number_file import NumberFile, number_path

ROWS, DEPTH, COLUMNS = 256, 512, 512
"""Sizes of the yardstick: it stays in a cache, and takes about a millisecond on two cores."""
LASTS_S, ENOUGH_RUNS = 0.5, 20
"""Seconds for which a run of the yardstick counts, and how many of them are enough."""
KIND = "pace"
"""Of numbers on disk: what the yardstick took when it was first timed."""
_YARDSTICK = f"us of mm {ROWS}x{DEPTH}x{COLUMNS}"


@dataclass(frozen=True)
class Pace:
    """The yardstick of a CPU; what it took at first is kept below ``directory``."""

    directory: Path
    file: NumberFile = field(init=False)
    lately: deque[tuple[float, float]] = field(default_factory=deque, compare=False)
    """Runs of the yardstick: when they were, and their microseconds."""

    def __post_init__(self) -> None:
        path = number_path(self.directory, torch.device("cpu"), KIND)
        object.__setattr__(self, "file", NumberFile(path))

    def run(self) -> None:
        """Run the yardstick once."""
        a, b, out = self._operands
        torch.mm(a, b, out=out)

    def note(self, seconds: float | None) -> None:
        """The yardstick took so long just now; None: the run was disturbed."""
        if seconds is not None:
            self.lately.append((time.monotonic(), 1e6 * seconds))

    @property
    def is_known(self) -> bool:
        """Whether the yardstick ran often enough in the last moments."""
        while self.lately and self.lately[0][0] < time.monotonic() - LASTS_S:
            self.lately.popleft()
        return len(self.lately) >= ENOUGH_RUNS

    def to_first_pace(self, us: float) -> float:
        """What takes ``us`` now, at the first pace; the same where the yardstick was not timed."""
        if not self.lately:
            return us
        yardstick_us = min(took for _, took in self.lately)
        if _YARDSTICK not in self.file.numbers:
            self.file.add(_YARDSTICK, yardstick_us)
        return us * self.file.numbers[_YARDSTICK] / yardstick_us

    @cached_property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b = torch.ones(ROWS, DEPTH), torch.ones(DEPTH, COLUMNS)
        return a, b, torch.empty(ROWS, COLUMNS)


def pace_of(device: torch.device, directory: Path) -> Pace | None:
    """The pace of a device; None where times are left as they are."""
    return Pace(directory) if device.type == "cpu" else None
