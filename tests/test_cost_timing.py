"""Times of calls: undisturbed runs, and one process on a GPU."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from fxremat.cost import timing
from fxremat.cost.timing import alone_on, quickest

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)

# --- runs that count -----------------------------------------------------------------------


def test_runs_that_other_programs_disturb_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run after which the count of interruptions is higher is made again."""
    interruptions = iter([0, 1, 1, 2, 2, *[3] * 1000])
    monkeypatch.setattr(timing, "_interruptions", lambda device: next(interruptions))
    seconds = iter([1e-6, 2e-6, *[5e-3] * 500])
    monkeypatch.setattr(timing, "_seconds", lambda call, device: next(seconds))
    assert quickest(lambda: None, HOST).us == pytest.approx(5000.0)


def test_a_long_run_may_lose_a_core_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own tasks come every few hundredths of a second: without other programs, too."""
    counted = iter(range(10**9))
    monkeypatch.setattr(timing, "_interruptions", lambda device: next(counted))
    seconds = iter([0.1, *[0.011] * 500])
    monkeypatch.setattr(timing, "_seconds", lambda call, device: next(seconds))
    assert quickest(lambda: None, HOST).us == pytest.approx(11_000.0)


# --- one process on a GPU ------------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a GPU that need not be here."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(timing, "_name_of", lambda device: "a-gpu")
    return tmp_path / "fxremat-timing-a-gpu.lock"


def _is_free(lock: Path) -> bool:
    """Whether another process would get the lock: one file opened twice has two locks."""
    handle = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_others_wait_while_a_call_is_timed(lock: Path) -> None:
    """And no longer than that, also where timing fails."""
    with alone_on(GPU):
        assert not _is_free(lock)
    assert _is_free(lock)
    with pytest.raises(RuntimeError), alone_on(GPU):
        raise RuntimeError("out of memory")
    assert _is_free(lock)
