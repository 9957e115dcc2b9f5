"""The pace of a machine: times taken while it is slow are those of its first pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxremat.cost import call_times
from fxremat.cost.pace import Pace, pace_of

HOST = torch.device("cpu")


class Machine:
    """Every run takes its seconds times how slow the machine is just now."""

    def __init__(self, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slowness, self.pace, self.runs, self.now = 1.0, pace, 0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(call_times, "_interruptions", lambda device: 0)
        monkeypatch.setattr(call_times, "_seconds", self.seconds)

    def seconds(self, call: Callable[[], object], device: torch.device) -> float:
        is_yardstick = call == self.pace.run
        self.runs += is_yardstick
        took = self.slowness * (1e-3 if is_yardstick else 7e-3)
        self.now += took
        return took

    def timed(self, after: float = 60.0) -> float:
        self.now += after
        return call_times.quickest(lambda: None, HOST, self.pace).us


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(Pace(tmp_path), monkeypatch)


def test_the_first_pace_is_that_of_the_first_time(machine: Machine) -> None:
    assert machine.timed() == pytest.approx(7000.0)


@pytest.mark.parametrize("slowness", [0.8, 1.3])
def test_a_machine_that_changes_its_pace_gives_the_same_times(
    machine: Machine, slowness: float
) -> None:
    machine.timed()
    machine.slowness = slowness
    assert machine.timed() == pytest.approx(7000.0)


def test_another_process_goes_on_from_the_pace_on_disk(machine: Machine, tmp_path: Path) -> None:
    machine.timed()
    machine.pace, machine.slowness = Pace(tmp_path), 2.0
    assert machine.timed() == pytest.approx(7000.0)


def test_the_yardstick_takes_part_of_the_time(machine: Machine) -> None:
    machine.timed()
    assert 5 <= machine.runs <= 20  # of 1 ms, beside five runs of 7 ms


def test_runs_of_the_yardstick_count_for_some_moments(machine: Machine) -> None:
    """Calls that are timed one after the other share them."""
    for _ in range(20):
        machine.timed(after=0.0)
    shared, machine.runs = machine.runs, 0
    for _ in range(20):
        machine.timed()
    assert 20 <= shared < machine.runs / 2


def test_the_yardstick_is_a_matmul(tmp_path: Path) -> None:
    pace = Pace(tmp_path)
    pace.run()
    a, b, out = pace._operands
    assert torch.equal(out, a @ b)


def test_times_on_a_gpu_are_left_as_they_are(tmp_path: Path) -> None:
    assert pace_of(torch.device("cuda"), tmp_path) is None
    assert pace_of(HOST, tmp_path) is not None
