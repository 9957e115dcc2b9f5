"""A loop deep inside of a compilation takes no memory from the system at every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from fxremat.compat.call_stack import calling_modules, with_stack_room

resource = pytest.importorskip("resource")
CALLS, DEPTHS = 2000, range(0, 400, 5)


def leaf(a: int, b: int, c: int) -> int:
    """A call that takes some slots of the stack."""
    return a + b * c


def faults_of_calls() -> int:
    """Pages that the system had to give while a loop called a function."""
    before = int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    for k in range(CALLS):
        leaf(k, k, k)
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt) - before


def at_depth(depth: int, then: Callable[[], int]) -> int:
    """Call something from so many frames down."""
    return at_depth(depth - 1, then) if depth else then()


def worst(enter: Callable[[int], int]) -> int:
    """The most pages, over all depths; in a thread of its own, which has an empty stack."""
    found: list[int] = []
    thread = Thread(target=lambda: found.extend(map(enter, DEPTHS)))
    thread.start()
    thread.join()
    return max(found)


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_a_loop_at_any_depth_takes_no_pages() -> None:
    assert worst(lambda depth: at_depth(depth, faults_of_calls)) >= CALLS
    roomy = with_stack_room(faults_of_calls)
    assert worst(lambda depth: at_depth(depth, roomy)) < CALLS // 10
    assert worst(with_stack_room(lambda depth: at_depth(depth, faults_of_calls))) < CALLS // 10


def test_modules_whose_call_is_running() -> None:
    seen: list[dict[torch.nn.Module, Any]] = []

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(calling_modules())
            return x

    inner = Inner()
    outer = torch.nn.Sequential(torch.nn.Identity(), inner)
    x = torch.ones(1)
    outer(x)
    (found,) = seen
    assert list(found) == [outer, inner]
    assert all(given is x for (given,) in found.values())
    assert calling_modules() == {}
