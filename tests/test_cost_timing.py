"""Times of calls: undisturbed runs, one process on a GPU, and one clock on a CPU."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxremat.cost import timing
from fxremat.cost.timing import ReferenceMatmul, alone_on, quickest, reference_of

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


# --- the clock -----------------------------------------------------------------------------


class Machine:
    """Every run takes its seconds times how slow the machine is just now."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slowness, self.now, self.reference = 1.0, 0.0, reference_of(HOST, directory)
        self.matmuls = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(timing, "_interruptions", lambda device: 0)
        monkeypatch.setattr(timing, "_seconds", self.run)

    def run(self, call: Callable[[], object], device: torch.device) -> float:
        is_reference = isinstance(call(), torch.Tensor)
        self.matmuls += is_reference
        took = self.slowness * (1e-3 if is_reference else 7e-3)
        self.now += took
        return took

    def timed(self, after: float = 60.0) -> float:
        self.now += after
        return quickest(lambda: None, HOST, self.reference).us


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.3])
def test_a_machine_that_changes_its_clock_gives_the_same_times(
    machine: Machine, slowness: float
) -> None:
    assert machine.timed() == pytest.approx(7000.0)
    machine.slowness = slowness
    assert machine.timed() == pytest.approx(7000.0)


def test_another_process_goes_on_from_the_clock_on_disk(machine: Machine, tmp_path: Path) -> None:
    machine.timed()
    machine.reference, machine.slowness = reference_of(HOST, tmp_path), 2.0
    assert machine.timed() == pytest.approx(7000.0)


def test_calls_that_are_timed_one_after_the_other_share_a_look_at_the_clock(
    machine: Machine,
) -> None:
    for _ in range(20):
        machine.timed(after=0.0)
    shared, machine.matmuls = machine.matmuls, 0
    for _ in range(20):
        machine.timed()
    assert 0 < shared < machine.matmuls / 5


def test_where_the_clock_is_not_known_times_are_left_as_they_are(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter(range(10**9))
    monkeypatch.setattr(timing, "_interruptions", lambda device: next(counted))
    machine.slowness = 1.3
    assert machine.timed() == pytest.approx(1.3 * 7000.0)


def test_times_on_a_gpu_are_left_as_they_are(tmp_path: Path) -> None:
    assert reference_of(GPU, tmp_path) is None
    assert isinstance(reference_of(HOST, tmp_path), ReferenceMatmul)


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
