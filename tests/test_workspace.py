"""Workspaces of library calls: measured once, kept on disk, nothing else disturbed."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxremat import compat
from fxremat.cost.peak import measure_peak
from fxremat.cost.workspaces import Workspaces
from tests import nets
from tests.test_joint_graph import ATEN, X, call, item

HOST = torch.device("cpu")
CONV_BACKWARD = ATEN.convolution_backward.default
IMAGE, GRADIENT, WEIGHT = torch.ones(2, 3, 16, 16), torch.ones(2, 8, 16, 16), torch.ones(8, 3, 3, 3)
ONES, NONE = [1, 1], [0, 0]
ARGS = (GRADIENT, IMAGE, WEIGHT, [8], ONES, ONES, ONES, False, NONE, 1, [True, True, True])


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cache_directory", lambda: str(tmp_path))


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured a second time")


def test_a_convolutions_backward_is_measured() -> None:
    results = CONV_BACKWARD(*ARGS)
    peak = measure_peak(lambda: CONV_BACKWARD(*ARGS))
    kept = sum(result.untyped_storage().nbytes() for result in results)
    assert Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {}) == peak.above_start_bytes - kept


def test_a_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = Workspaces(HOST)
    first = spaces.of_call(CONV_BACKWARD, ARGS, {})
    monkeypatch.setattr("fxremat.cost.workspaces.measure_call", never)
    assert spaces.of_call(CONV_BACKWARD, ARGS, {}) == first
    assert Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {}) == first  # read from disk
    with pytest.raises(AssertionError, match="second time"):
        spaces.of_call(CONV_BACKWARD, (GRADIENT[:1], IMAGE[:1], *ARGS[2:]), {})


def test_a_node_is_its_call() -> None:
    node = call(CONV_BACKWARD, *ARGS)
    spaces = Workspaces(HOST)
    assert spaces.of_node(node) == spaces.of_call(CONV_BACKWARD, ARGS, {})
    assert len(spaces.file.times) == 1


def test_scratch_memory_is_found() -> None:
    """Sorting what is not contiguous needs a copy; the results are not counted."""
    wide = torch.ones(64, 64).t()
    peak = measure_peak(lambda: ATEN.sort.default(wide, 1))
    kept = 64 * 64 * (4 + 8)
    found = Workspaces(HOST).of_call(ATEN.sort.default, (wide, 1), {})
    assert found == peak.above_start_bytes - kept > 0


def test_the_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {})
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "node",
    [
        call(operator.add, 1, 2),
        call(nets.triple._opoverload, X),
        call(ATEN.mm.default, X, X),
        call(ATEN.sin.default, X),
        call(ATEN.t.default, X),
        call(ATEN.copy_.default, X, X.clone()),
        call(ATEN.bernoulli.p, X, 0.5),
        item(call(ATEN.sort.default, X), 0),
    ],
    ids=["number", "custom op", "mm", "loop", "view", "mutating", "random", "item"],
)
def test_calls_that_need_none(node: torch.fx.Node) -> None:
    spaces = Workspaces(HOST)
    assert spaces.of_node(node) == 0
    assert spaces.file.times == {}


def test_a_call_that_raises_counts_nothing() -> None:
    assert Workspaces(HOST).of_call(CONV_BACKWARD, (X, X), {}) == 0
