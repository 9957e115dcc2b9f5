"""What loops reach: bandwidth by size, functions, and that it is measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxremat import compat
from fxremat.cost import call_times, loop_rates
from fxremat.cost.call_times import Timing
from fxremat.cost.loop_rates import FUNCTIONS, TRAFFIC, LoopRates, measured_rates
from fxremat.cost.number_file import number_path

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: tests of times ask for no true ones, nor for all sizes."""
    monkeypatch.setattr(call_times, "_interruptions", lambda device: 0)
    monkeypatch.setattr(loop_rates, "TRAFFIC", TRAFFIC[:2])


def test_bandwidth_is_that_of_the_next_smaller_size() -> None:
    rates = LoopRates(0.0, ((100, 1e9), (1000, 1e8)), {})
    assert rates.move_us(10) == pytest.approx(0.01)
    assert rates.move_us(999) == pytest.approx(0.999)
    assert rates.move_us(1000) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("exponent", "ns"),
    [(2, 0.0), (3.0, 0.0), (-2, 7.0), (0.5, 5.0), (2.5, 100.0), (-0.5, 100.0), (40, 100.0)],
)
def test_a_power_costs_what_inductor_computes_for_it(exponent: float, ns: float) -> None:
    """Small whole ones are products, as the square in every RMSNorm."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    power = graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (x, exponent))
    power.meta["val"] = torch.ones(1000)
    rates = LoopRates(0.0, ((0, 1e15),), {"pow": 100.0, "sqrt": 5.0, "div": 7.0})
    assert rates.us([power], 8, int) == pytest.approx(ns, abs=1e-6)


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_rates(HOST, tmp_path, compat.outside_fake_mode)
    assert first is not None
    assert [size for size, _ in first.bytes_per_s] == list(TRAFFIC[:2])
    assert set(first.element_ns) == set(FUNCTIONS)
    assert first.call_us > 0
    assert all(rate > 0 for _, rate in first.bytes_per_s)

    def never(device: torch.device) -> dict[str, float]:
        raise AssertionError(device)

    monkeypatch.setattr(loop_rates, "_measure", never)
    assert measured_rates(HOST, tmp_path, compat.outside_fake_mode) == first


def test_a_broken_off_measurement_is_made_again(tmp_path: Path) -> None:
    path = number_path(tmp_path, HOST, loop_rates.KIND)
    path.parent.mkdir(parents=True)
    path.write_text('{"exp": 1.0}', encoding="utf-8")
    found = measured_rates(HOST, tmp_path, compat.outside_fake_mode)
    assert found is not None
    assert found.element_ns["exp"] != 1.0
    assert found.bytes_per_s


def test_the_rates_of_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are better than none: a vendor's figures would be of another kind than measured ones."""
    monkeypatch.setattr(loop_rates, "quickest", lambda call, device, pace: Timing(50.0, True))
    rates = measured_rates(HOST, tmp_path, compat.outside_fake_mode)
    assert rates.call_us == 50.0
    assert not number_path(tmp_path, HOST, loop_rates.KIND).exists()
