"""Seconds spent in each stage of compiling a graph, and who hears of the long ones.

The log names each long stage once. Where it is not shown, one line on the terminal tells what
planning does, rewritten in place. Where standard error is no terminal nothing is written; of
several ranks on a machine one writes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fxremat.compile.constants import LONG_S

log = logging.getLogger(__name__)

NAMES = {
    "prepare": "preparing the graph",
    "estimate": "estimating bytes and times",
    "plan": "planning",
    "apply": "applying a plan",
    "dry run": "generating the code of a plan, to count its bytes",
    "verify": "verifying a plan",
    "kernels": "compiling kernels",
}


CLEAR = "\r\x1b[K"


def _is_seen() -> bool:
    """Whether somebody looks, and no other rank writes there."""
    if sys.stderr is None or not sys.stderr.isatty():  # a program without a console has none
        return False
    return os.environ.get("LOCAL_RANK", "0") == "0"


@dataclass
class ProgressLine:
    """What is shown now is cleared before anything else is written."""

    is_shown: bool = False

    def show(self, text: str) -> None:
        """Write the text over what was shown before."""
        if _is_seen():
            sys.stderr.write(f"{CLEAR}fxremat: {text}")
            sys.stderr.flush()
            self.is_shown = True

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self.is_shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self.is_shown = False


@dataclass(eq=False)
class _Running:
    """A stage that has not ended: what it does, since when, and the seconds spent before it."""

    begun: float
    known: str
    spent_before: float
    is_told: bool = False


class _Watch:
    """Names what takes long, while it does.

    One thread looks at all stages while there are any: to start one for each stage would take
    longer than most stages do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[_Running] = []
        self._is_looking = False
        self._line = ProgressLine()

    @contextmanager
    def watched(self, known: str, spent_before: float) -> Iterator[None]:
        """What runs inside is named once it takes long."""
        stage = _Running(time.perf_counter(), known, spent_before)
        with self._lock:
            self._running.append(stage)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(stage)
                if not self._running:  # what is written next begins a line
                    self._line.clear()

    def _look(self) -> None:
        """Until nothing runs any more; the log names each stage once."""
        while True:
            time.sleep(LONG_S / 10)
            with self._lock:
                if not self._running:
                    self._is_looking = False
                    return
                now, running = time.perf_counter(), self._running
                late = [one for one in running if now >= one.begun + LONG_S and not one.is_told]
                for one in late:
                    one.is_told = True
                outer, inner = running[0], running[-1]
                spent = outer.spent_before + now - outer.begun
                if spent >= LONG_S and not log.isEnabledFor(logging.INFO):
                    self._line.show(f"{inner.known}; {spent:.0f} s so far")
            for one in late:
                log.info("still %s; %.0f s so far", one.known, one.spent_before + LONG_S)


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
