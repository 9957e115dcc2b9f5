"""What is asked of a graph: its budget, and the bytes that lie beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxremat.compiling import request
from fxremat.compiling.session import Ledger
from fxremat.options import Options, parse_options
from fxremat.sizes import GIB, MIB

GPU = torch.device("cuda", 0)
TOTAL = 80 * GIB
Card = Callable[..., None]


def options(**given: Any) -> Options:
    return parse_options(given, device_total_bytes=TOTAL)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Sets what a card of 80 GiB would say."""

    def say(allocated: int = 0, idle: int = 0, free: int = TOTAL, fraction: float = 1.0) -> None:
        cuda: Any = torch.cuda
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


def test_a_budget_that_nobody_asked_for_leaves_a_margin(card: Card) -> None:
    card(allocated=8 * GIB, idle=2 * GIB, free=60 * GIB)
    assert 0.9 * 70 * GIB < budget() < 0.98 * 70 * GIB


def test_nearly_equal_free_sizes_give_equal_budgets(card: Card) -> None:
    card(free=70 * GIB)
    first = budget()
    card(free=70 * GIB + 3 * MIB)
    assert budget() == first


def test_the_part_of_a_card_that_a_process_may_have(card: Card) -> None:
    card(free=70 * GIB, fraction=0.5)
    assert 0.45 * TOTAL < budget() < 0.5 * TOTAL


def test_a_card_that_is_nearly_full_leaves_what_there_is(card: Card) -> None:
    card(free=MIB)
    assert budget() == MIB


def test_a_budget_that_was_asked_for_is_taken(card: Card) -> None:
    assert request._budget(options(memory_budget="8GiB"), GPU, None) == 8 * GIB
    assert request._budget(options(), torch.device("cpu"), None) is None


def test_of_a_slice_the_rest_is_held(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph counts the slice alone; what overlaps does not count twice."""
    whole = torch.zeros(1024)
    card(allocated=4096)
    here = torch.device("cpu")
    assert request._unseen_bytes([whole], here) == 0
    assert request._unseen_bytes([whole[:256]], here) == 3072
    assert request._unseen_bytes([whole[:256], whole[256:512]], here) == 2048
    assert request._unseen_bytes([whole, whole[:512]], here) == 0


def test_tensors_of_the_first_graph_are_not_held_twice(card: Card) -> None:
    ledger = Ledger()
    card(allocated=100)
    assert request._held_bytes(options(), GPU, [], None, ledger, (0, 0)) == 100
    ledger.peaks[0] = {0: 40}
    card(allocated=130)
    assert request._held_bytes(options(), GPU, [], None, ledger, (1, 0)) == 140
    assert request._held_bytes(options(reserve=7), GPU, [], None, ledger, (1, 0)) == 47
