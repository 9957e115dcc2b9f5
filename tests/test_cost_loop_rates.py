"""What loops reach: bandwidth by size, functions, and that it is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxremat.compat.tensors import outside_fake_mode
from fxremat.cost import op_timers, timing
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.op_timers import FUNCTIONS, TRAFFIC, LoopRates, bandwidth_name, measured_rates
from fxremat.cost.timing import Timing

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: tests of times ask for no true ones."""
    monkeypatch.setattr(timing, "_interruptions", lambda device: 0)


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
    numbers = {"pow": 100.0, "sqrt": 5.0, "div": 7.0, "call_us": 0.0}
    rates = LoopRates({bandwidth_name(TRAFFIC[0]): 1e15, **numbers}.__getitem__)
    assert rates.us([power], 8, int) == pytest.approx(ns, abs=1e-6)


def test_what_is_asked_for_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured_rates(HOST, tmp_path, outside_fake_mode)
    exp, neg = first.loop_us([("exp", 10**9)], 0), first.loop_us([("neg", 10**9)], 0)
    moved, call = first.move_us(TRAFFIC[1]), first.call_us
    assert neg == 0.0
    assert min(exp, moved, call) > 0
    kept = NumberFile(number_path(tmp_path, HOST, op_timers.KIND)).numbers
    sizes = [bandwidth_name(size) for size in TRAFFIC[:2]]
    assert kept.keys() == {"call_us", "moving_us", "exp", *sizes}

    def never(call: object, device: torch.device, reference: object) -> Timing:
        raise AssertionError(device)

    monkeypatch.setattr(op_timers, "quickest", never)
    again = measured_rates(HOST, tmp_path, outside_fake_mode)
    assert again.loop_us([("exp", 10**9)], 0) == exp
    assert again.move_us(TRAFFIC[1]) == moved
    with pytest.raises(AssertionError):
        again.loop_us([("tanh", 10**9)], 0)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_can_be_timed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the dtype is of tensors that nobody gives one."""

    def once(call: Callable[[], object], device: torch.device, reference: object) -> Timing:
        call()
        return Timing(50.0, False)

    monkeypatch.setattr(op_timers, "quickest", once)
    rates = measured_rates(HOST, tmp_path, outside_fake_mode)
    assert rates.loop_us([(name, 1)], 0) == 0.0  # no dearer than to move


def test_the_rates_of_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are better than none: a vendor's figures would be of another kind than measured ones."""
    asked = list[object]()

    def disturbed(call: object, device: torch.device, reference: object) -> Timing:
        asked.append(call)
        return Timing(50.0, True)

    monkeypatch.setattr(op_timers, "quickest", disturbed)
    rates = measured_rates(HOST, tmp_path, outside_fake_mode)
    assert rates.call_us == rates.call_us == 50.0
    assert len(asked) == 1
    assert not number_path(tmp_path, HOST, op_timers.KIND).exists()
