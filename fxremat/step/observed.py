"""What steps were seen to take beside all that was counted, kept on disk for the next run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.disk_cache import Answers, Question


@dataclass
class Observed:
    """Bytes that were seen beside a graph, named by its ``signature``; "" for none to remember.

    Those ``between`` are there while all runs of the step wait, and those ``held`` at all times.
    Fewer than were ``counted`` are known again only where as many are counted again.
    """

    signature: str = ""
    between: int = 0
    held: int = 0
    counted: int = 0

    def recall(self, limit: int | None, device: torch.device) -> None:
        """Know what an earlier run has noted under this budget."""
        if limit is None or not self.signature or caches_disabled():
            return
        known = _answers().read(self._question(limit, device))
        if isinstance(known, list) and [*map(type, known)] == [int] * 3:
            between, held, counted = known
            if held >= 0 or counted == self.counted:
                self.between, self.held = between, held

    def note(self, between: int, held: int, limit: int | None, device: torch.device) -> None:
        """So many bytes more were seen, or fewer."""
        self.between += between
        self.held += held
        if limit is not None and self.signature and not caches_disabled():
            found = [self.between, self.held, self.counted]
            _answers().keep(self._question(limit, device), found)

    def _question(self, limit: int, device: torch.device) -> Question:
        return {"graph": self.signature, "budget": limit, "device": str(device)}


def _answers() -> Answers:
    return Answers(Path(cache_directory()) / "fxremat" / "observed")
