"""Seconds spent in each stage of compiling a graph."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

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


@dataclass(frozen=True)
class _Running:
    """A stage that has not ended: from when on it takes long, and what the log says of it then."""

    long_from: float
    known: str
    spent: float


class _Watch:
    """Names on the log what takes long.

    One thread looks at all stages while there are any: to start one for each stage would take
    longer than most stages do.
    """

    def __init__(self) -> None:
        self._lock, self._keys = threading.Lock(), count()
        self._running: dict[int, _Running] = {}
        self._is_looking = False

    @contextmanager
    def watched(self, known: str, spent_before: float) -> Iterator[None]:
        """What runs inside is named once it takes long."""
        key, long_from = next(self._keys), time.perf_counter() + LONG_S
        with self._lock:
            self._running[key] = _Running(long_from, known, spent_before + LONG_S)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(key, None)

    def _look(self) -> None:
        """Until nothing runs any more; each stage is named once."""
        while True:
            time.sleep(LONG_S / 10)
            with self._lock:
                if not self._running:
                    self._is_looking = False
                    return
                now = time.perf_counter()
                late = [key for key, one in self._running.items() if one.long_from <= now]
                told = [self._running.pop(key) for key in late]
            for one in told:
                log.info("still %s; %.0f s so far", one.known, one.spent)


_watch = _Watch()


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
        try:
            with _watch.watched(NAMES.get(name, name), spent_before):
                yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.inner
            self.inner = outer + spent
