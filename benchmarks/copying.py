"""Host memory: how much copies hold, a cap, and how fast copies of the CPU are."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from fxremat.errors import InvalidOption
from fxremat.runtime import host_memory
from fxremat.runtime.copy_trace import Direction
from fxremat.runtime.cpu_engine import ENGINE


class HostBytes(NamedTuple):
    """Bytes of host memory that copies of this process hold, now and at most since the reset."""

    now_bytes: int
    peak_bytes: int


def host_bytes() -> HostBytes:
    """What they hold."""
    return HostBytes(host_memory.HOST_MEMORY.held_bytes, host_memory.HOST_MEMORY.peak_bytes)


def reset_host_peak() -> None:
    """Let ``host_bytes().peak_bytes`` begin anew with what is held now."""
    host_memory.HOST_MEMORY.peak_bytes = host_memory.HOST_MEMORY.held_bytes


def set_host_memory_cap(cap_bytes: int | None) -> AbstractContextManager[object]:
    """Let copies to host hold at most ``cap_bytes`` at once, all devices together; None: no cap.

    It holds from now on or, as a context manager, inside ``with`` only.
    """
    undo, account = ExitStack(), host_memory.HOST_MEMORY
    undo.callback(setattr, account, "cap_bytes", account.cap_bytes)
    account.cap_bytes = cap_bytes
    return undo


def set_copy_speed(
    to_host_bytes_per_s: float | None = None,
    to_device_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> AbstractContextManager[object]:
    """Let copies of the CPU take ``latency_s`` and their bytes at this speed; None: no limit.

    It holds for copies started from now on or, as a context manager, inside ``with`` only. The
    time of the real copy in memory is added. InvalidOption (a ValueError) for a speed that is
    not positive or a negative latency.
    """
    rates = {"to_host": to_host_bytes_per_s, "to_device": to_device_bytes_per_s}
    for direction, rate in rates.items():
        if rate is not None and not rate > 0:
            expected = "a positive number of bytes per second or None"
            raise InvalidOption(f"{direction}_bytes_per_s", rate, expected)
    if not 0 <= latency_s < float("inf"):
        raise InvalidOption("latency_s", latency_s, "a number of seconds")

    def delay(direction: Direction, nbytes: int) -> float:
        rate = rates[direction]
        return latency_s + (nbytes / rate if rate else 0.0)

    undo = ExitStack()
    undo.callback(setattr, ENGINE, "delay", ENGINE.delay)
    ENGINE.delay = delay
    return undo
