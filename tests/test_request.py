"""What is asked of a graph: its budget, and the bytes that lie beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxremat.compile import request
from fxremat.options import Options, parse_options
from fxremat.runtime.host_memory import is_on
from fxremat.sizes import GIB, MIB

GPU = torch.device("cuda", 0)
TOTAL, CACHE = 80 * GIB, 1000
Card = Callable[..., None]


def options(**given: Any) -> Options:
    return parse_options(given, device_total_bytes=TOTAL)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Sets what a card of 80 GiB would say."""

    def say(allocated: int = 0, idle: int = 0, free: int = TOTAL, fraction: float = 1.0) -> None:
        cuda: Any = torch.cuda
        monkeypatch.setattr(request, "allocate_cublas", lambda device: None)
        properties = SimpleNamespace(L2_cache_size=CACHE)
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: allocated)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: allocated + idle)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (free, TOTAL))
        monkeypatch.setattr(
            cuda, "get_per_process_memory_fraction", lambda device: fraction, raising=False
        )

    return say


def budget() -> int:
    found = request._budget(options(), GPU, None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("says", "least", "most"),
    [
        ({"allocated": 8 * GIB, "idle": 2 * GIB, "free": 60 * GIB}, 63 * GIB, 68.6 * GIB),
        ({"free": 70 * GIB, "fraction": 0.5}, 0.45 * TOTAL, 0.5 * TOTAL),
        ({"free": MIB}, MIB, MIB),
    ],
    ids=["a margin is left", "the part that a process may have", "a card that is nearly full"],
)
def test_a_budget_that_nobody_asked_for(
    card: Card, says: dict[str, Any], least: float, most: float
) -> None:
    card(**says)
    assert least <= budget() <= most


def test_a_budget_that_was_asked_for_is_taken(card: Card) -> None:
    assert request._budget(options(memory_budget="8GiB"), GPU, None) == 8 * GIB
    assert request._budget(options(), torch.device("cpu"), None) is None


def test_of_a_slice_the_rest_is_held(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph counts the slice alone; what overlaps does not count twice."""
    whole = torch.zeros(1024)
    card(allocated=4096)
    here = torch.device("cpu")
    assert request.unseen_bytes([whole], here) == 0
    assert request.unseen_bytes([whole[:256]], here) == 3072
    assert request.unseen_bytes([whole[:256], whole[256:512]], here) == 2048
    assert request.unseen_bytes([whole, whole[:512]], here) == 0


def test_on_cuda_what_is_allocated_is_what_others_hold(card: Card) -> None:
    """Unless it is said what others hold: then what other graphs hold comes in addition."""

    def held(neighbours: int, **given: Any) -> int:
        return request._held_bytes(options(**given), GPU, [], None, neighbours)

    card(allocated=100 * MIB)
    assert held(40 * MIB) == 100 * MIB
    assert held(40 * MIB, reserve=7) == 40 * MIB + 7


def test_kernels_are_tuned_only_where_there_are_some(card: Card) -> None:
    """In the first step, beside all that is there."""
    eager = options(executor="aot_eager")
    card(allocated=100)
    assert request._size_of_tuning(eager, GPU, None) == 0
    assert request._size_of_tuning(options(), torch.device("cpu"), None) == 0
    assert request._size_of_tuning(options(), GPU, None) == CACHE
    assert request._size_of_tuning(options(reserve=7), GPU, None) == 0


def test_workspaces_of_cublas_are_allocated_before_bytes_are_counted(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(allocated=100)
    monkeypatch.setattr(request, "allocate_cublas", lambda device: card(allocated=5 * MIB))
    weight = torch.empty(8, device="meta")
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    asked = request.request_for(torch.fx.symbolic_trace(torch.nn.Identity()), [weight], options())
    assert asked.budget.held == 6 * MIB


def test_tensors_of_another_device_are_no_inputs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(8, device="meta")
    assert request._size_of_inputs([x], torch.device("meta")) == 32
    assert not is_on(x, torch.device("meta", 1))
    assert request._size_of_inputs([x], torch.device("meta", 1)) == 0
