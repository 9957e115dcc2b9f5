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
    """

    signature: str = ""
    between: int = 0
    held: int = 0

    def recall(self, limit: int | None, device: torch.device) -> None:
        """Know what an earlier run has noted under this budget."""
        if limit is None or not self.signature or caches_disabled():
            return
        known = _answers().read(self._question(limit, device))
        if isinstance(known, list) and all(isinstance(one, int) for one in known):
            self.between, self.held = known

    def note(self, between: int, held: int, limit: int | None, device: torch.device) -> None:
        """So many bytes more were seen."""
        self.between += between
        self.held += held
        if limit is not None and self.signature and not caches_disabled():
            _answers().keep(self._question(limit, device), [self.between, self.held])

    def _question(self, limit: int, device: torch.device) -> Question:
        return {"graph": self.signature, "budget": limit, "device": str(device)}


def _answers() -> Answers:
    return Answers(Path(cache_directory()) / "fxremat" / "observed")
