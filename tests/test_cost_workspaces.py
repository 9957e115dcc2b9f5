"""Workspaces of library calls: measured once or estimated, kept on disk, nothing else disturbed."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxremat.compat.configuration import OpOverload
from fxremat.cost import call_times, workspaces
from fxremat.cost.call_times import made_real
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_peak
from fxremat.sizes import format_bytes
from tests import nets
from tests.single_calls import ATEN, X, call, item

HOST = torch.device("cpu")
CONV_BACKWARD = ATEN.convolution_backward.default
IMAGE, GRADIENT, WEIGHT = torch.ones(2, 3, 16, 16), torch.ones(2, 8, 16, 16), torch.ones(8, 3, 3, 3)
ONES, NONE = [1, 1], [0, 0]
ARGS = (GRADIENT, IMAGE, WEIGHT, [8], ONES, ONES, ONES, False, NONE, 1, [True, True, True])


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.cost.workspaces.cache_directory", lambda: str(tmp_path))
    monkeypatch.setattr(workspaces, "_TOLD", set())


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured a second time")


def test_a_convolutions_backward_is_measured() -> None:
    results = CONV_BACKWARD(*ARGS)
    peak = measure_peak(lambda: CONV_BACKWARD(*ARGS))
    kept = sum(result.untyped_storage().nbytes() for result in results)
    assert Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {}) == peak.above_start_bytes - kept


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (ATEN._assert_async.default, (torch.ones(1),)),
        (ATEN._functional_assert_async.msg, (torch.ones(1), "", torch.ones(1))),
        (ATEN.repeat_interleave.Tensor, (torch.tensor([2, 3]),)),
        (ATEN.nonzero.default, (torch.ones(3),)),
    ],
    ids=lambda value: str(value) if isinstance(value, OpOverload) else "",
)
def test_what_checks_its_operands_is_not_run(target: Any, args: Any) -> None:
    """On CUDA a failed check ends the context."""
    assert Workspaces(HOST).of_call(target, args, {}) == 0
    assert not Workspaces(HOST).file.path.exists()


def test_a_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = Workspaces(HOST)
    first = spaces.of_call(CONV_BACKWARD, ARGS, {})
    monkeypatch.setattr("fxremat.cost.workspaces.measure_call", never)
    assert spaces.of_call(CONV_BACKWARD, ARGS, {}) == first
    assert Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {}) == first  # read from disk
    with pytest.raises(AssertionError, match="second time"):
        spaces.of_call(CONV_BACKWARD, (GRADIENT[:1], IMAGE[:1], *ARGS[2:]), {})


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
    assert spaces.file.numbers == {}


def test_a_call_that_raises_counts_nothing_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        spaces = Workspaces(HOST)
        assert spaces.of_call(CONV_BACKWARD, (X, X), {}) == 0
        assert spaces.refused == 1
    (line,) = caplog.messages
    assert "convolution_backward" in line
    assert "TypeError" in line or "RuntimeError" in line


# --- calls for which there is no room -----------------------------------------------------------


def batch_of(images: int) -> tuple[Any, ...]:
    """The arguments of a backward of a convolution of so many images."""
    gradient = torch.ones(images, 8, 16, 16, dtype=torch.float64)
    image, weight = torch.ones(images, 3, 16, 16).double(), WEIGHT.double()
    return (gradient, image, weight, *ARGS[3:])


def no_room_above(images: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on more images than that fail, as if memory did not suffice."""
    made = made_real

    def limited(value: Any, *args: Any) -> Any:
        tensor = made(value, *args)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and len(tensor) > images:
            raise error
        return tensor

    monkeypatch.setattr(workspaces, "made_real", limited)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
    ids=["cuda", "cpu"],
)
def test_a_call_without_room_is_estimated_by_a_part_of_its_batch(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(32), {})
    part = Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(8), {})
    Workspaces(HOST).file.path.unlink()
    assert caplog.messages == []
    no_room_above(8, error, monkeypatch)
    spaces = Workspaces(HOST)
    found = spaces.of_call(CONV_BACKWARD, batch_of(32), {})
    assert 0 < whole <= found == 4 * part
    monkeypatch.setattr(workspaces, "measure_call", never)
    assert spaces.of_call(CONV_BACKWARD, batch_of(32), {}) == found
    assert Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(32), {}) == found  # read from disk
    (line,) = caplog.messages
    assert "convolution_backward" in line
    assert "`reserve`" in line
    assert format_bytes(found) in line


def test_a_call_that_never_has_room_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_room_above(0, torch.OutOfMemoryError(), monkeypatch)
    for _ in range(2):
        spaces = Workspaces(HOST)
        assert spaces.of_call(CONV_BACKWARD, batch_of(32), {}) == 0
        assert spaces.refused == 1
    (line,) = caplog.messages
    assert "convolution_backward" in line
    assert "`reserve`" in line


def test_on_a_cpu_a_call_that_would_fill_the_memory_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linux would give the memory, and kill the process when it is used."""
    part = Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(8), {})
    monkeypatch.setattr(call_times, "_available_memory", lambda: 1_000_000)
    no_room_above(8, AssertionError("tried"), monkeypatch)
    assert Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(32), {}) == 4 * part
    assert len(caplog.messages) == 1
