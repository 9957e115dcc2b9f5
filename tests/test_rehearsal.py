"""The kernels that Inductor would make, replayed: merged on CPU, named, obeyed by the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fxremat
from fxremat import compat
from fxremat.compat import Kernel
from tests.small import Stack, seeded


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- the functions of the C++ backend ----------------------------------------------------------


def loop(name: str, reads: str, writes: str, *inplace: tuple[str, str]) -> Kernel:
    """A generated loop over buffers of one letter; it comes from the node of its name."""
    return Kernel(name, tuple(reads), tuple(writes), inplace, (f"node_{name}",))


def library(name: str, reads: str, writes: str) -> Kernel:
    return Kernel(name, tuple(reads), tuple(writes), (), (f"node_{name}",), is_loop=False)


def test_loops_between_library_calls_are_one_function() -> None:
    sizes = dict.fromkeys("xabcde", 8)
    kernels = [
        loop("k0", "x", "a"),
        loop("k1", "ax", "b", ("x", "b")),
        library("mm", "b", "c"),
        library("mm_1", "c", "d"),
        loop("k2", "d", "e"),
    ]
    merged, sized = compat._merge_loops(kernels, sizes)
    one = Kernel("k0+k1", ("x",), ("a", "b"), (("x", "b"),), ("node_k0", "node_k1"))
    assert merged == (one, *kernels[2:])
    assert sized == sizes


def test_a_temporary_that_a_later_loop_overwrites_takes_no_bytes() -> None:
    sizes = dict.fromkeys("xabc", 8)
    kernels = [loop("k0", "x", "a"), loop("k1", "a", "b", ("a", "b")), library("mm", "b", "c")]
    merged, sized = compat._merge_loops(kernels, sizes)
    assert merged[0].inplace == ()
    assert merged[0].writes == ("a", "b")
    assert sized == {**sizes, "a": 0}
    assert sizes["a"] == 8  # what was given stays


def test_what_a_library_call_wrote_keeps_its_bytes() -> None:
    kernels = [library("mm", "x", "a"), loop("k0", "a", "b", ("a", "b"))]
    assert compat._merge_loops(kernels, {"a": 8, "b": 8}) == (tuple(kernels), {"a": 8, "b": 8})
    assert compat._merge_loops([], {}) == ((), {})


# --- a rehearsed step -----------------------------------------------------------------------------


def test_a_rehearsed_plan_names_what_is_live_at_the_peak() -> None:
    model, x = seeded(Stack, 512, 32)
    full = fxremat.explain(model, x)
    budget = int(0.8 * full.keep_all_peak_bytes)
    report = fxremat.explain(model, x, memory_budget=budget).graphs[0]
    assert report.rehearsals >= 1
    assert "rehearse" in report.seconds
    assert report.recomputed
    assert report.predicted_peak_bytes <= budget
    assert max(report.timeline) == report.predicted_peak_bytes
    names = [row.what for row in report.at_peak]
    assert any(name.endswith("[graph input]") for name in names)
    assert any("blocks" in name and "small.py:" in name for name in names)
    assert not any(name.startswith(("f_buf", "b_buf")) for name in names)
    assert sum(row.bytes for row in report.at_peak) <= report.predicted_peak_bytes
    sizes = [row.bytes for row in report.at_peak]
    assert sizes == sorted(sizes, reverse=True)


def test_without_a_budget_nothing_is_rehearsed() -> None:
    model, x = seeded(Stack, 16, 32)
    report = fxremat.explain(model, x).graphs[0]
    assert report.rehearsals == 0
    assert "rehearse" not in report.seconds
