"""When a solver has to stop: at its time limit, or at Ctrl-C.

Solvers are anytime: they ask their deadline now and then and return the best they have.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_interrupted = threading.Event()


class Deadline:
    """A time limit in seconds; without one only Ctrl-C ends it."""

    def __init__(self, limit_s: float | None) -> None:
        self.started = time.perf_counter()
        self.end = math.inf if limit_s is None else self.started + limit_s

    def running(self) -> bool:
        """Whether there is time left and nobody pressed Ctrl-C."""
        return not _interrupted.is_set() and self.left() > 0

    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return self.end - time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the deadline was made."""
        return time.perf_counter() - self.started


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first Ctrl-C ends every deadline; a second one raises `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        _interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _interrupted.clear()
