"""Seconds spent in each stage of compiling a graph."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StageTimes:
    """Seconds by stage. A stage inside another one counts for itself alone."""

    seconds: dict[str, float] = field(default_factory=dict)
    inner: float = 0.0
    """Seconds that stages inside the one that runs now have taken."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside to ``name``."""
        start, outer, self.inner = time.perf_counter(), self.inner, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.inner
            self.inner = outer + spent
