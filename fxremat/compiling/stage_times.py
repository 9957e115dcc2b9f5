"""Seconds spent in each stage of compiling a graph."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LONG_S = 5.0
"""Seconds: a stage that takes longer says so."""
NAMES = {
    "prepare": "preparing the graph",
    "estimate": "estimating bytes and times",
    "plan": "planning",
    "apply": "applying a plan",
    "rehearse": "generating the code of a plan, to count its bytes",
    "verify": "verifying a plan",
    "kernels": "compiling kernels",
}


@dataclass
class StageTimes:
    """Seconds by stage. A stage inside another one counts for itself alone.

    One that takes long is named on the log while it runs.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    inner: float = 0.0
    """Seconds that stages inside the one that runs now have taken."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside to ``name``."""
        start, outer, self.inner = time.perf_counter(), self.inner, 0.0
        spent_before = sum(self.seconds.values())
        known = NAMES.get(name, name)
        message = "still %s; %.0f s so far"
        progress = threading.Timer(LONG_S, log.info, (message, known, spent_before + LONG_S))
        progress.daemon = True
        progress.start()
        try:
            yield
        finally:
            progress.cancel()
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.inner
            self.inner = outer + spent
