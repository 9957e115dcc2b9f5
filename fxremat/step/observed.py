"""What steps were seen to take beside all that was counted, kept on disk for the next run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.disk_cache import Answers, Question


@dataclass
class Observed:
    """Bytes that were seen beside a graph, named by its ``signature``; "" for none to remember."""

    signature: str = ""
    nbytes: int = 0

    def recall(self, limit: int | None, device: torch.device) -> int:
        """What an earlier run has noted under this budget; 0 where it is known already."""
        if self.nbytes or limit is None or not self.signature or caches_disabled():
            return 0
        known = _answers().read(self._question(limit, device))
        self.nbytes = known if isinstance(known, int) else 0
        return self.nbytes

    def note(self, more: int, limit: int | None, device: torch.device) -> None:
        """So many bytes more were seen."""
        self.nbytes += more
        if limit is not None and self.signature and not caches_disabled():
            _answers().keep(self._question(limit, device), self.nbytes)

    def _question(self, limit: int, device: torch.device) -> Question:
        return {"graph": self.signature, "budget": limit, "device": str(device)}


def _answers() -> Answers:
    return Answers(Path(cache_directory()) / "fxremat" / "observed")
