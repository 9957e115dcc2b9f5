"""Kernels are timed by one process at a time on a GPU."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from fxremat.cost import device_lock
from fxremat.cost.device_lock import alone_on

GPU = torch.device("cuda", 0)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a GPU that need not be here."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(device_lock, "_name", lambda device: "a-gpu")
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


def test_no_lock_where_none_is_needed_or_can_be(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU notices disturbances itself; a folder that cannot be written stops nobody."""
    with alone_on(torch.device("cpu")):
        assert not lock.exists()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "missing"))
    with alone_on(GPU):
        assert not lock.exists()
