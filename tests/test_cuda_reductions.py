"""Scratch memory of reductions that no Triton kernel does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.cost.cuda_scratch import (
    IN_FORM_OUT,
    MOST_THREADS,
    CudaScratch,
    Multiprocessors,
    scratch_of_reduction,
)

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_sum_of_rows_as_an_h200_recorded_it() -> None:
    """By torch 2.11: 16 blocks share a result, and 3 groups of blocks have a counter each."""
    for target in (ATEN.sum.dim_IntList, ATEN.sum.IntList_out):
        assert CudaScratch().blocks_of_call(target, (meta(1024, 300), [0]), {}) == (2457600, 12)


def test_each_row_by_itself_takes_none() -> None:
    """There are enough rows for all threads, also in the form with ``out``."""
    for target in (ATEN.sum.dim_IntList, ATEN.amax.default, ATEN.amax.out, ATEN.amin.out):
        assert CudaScratch().blocks_of_call(target, (meta(1024, 300), [1]), {}) == ()


def test_what_writes_into_given_memory_has_the_same_schema() -> None:
    for out, own in IN_FORM_OUT.items():
        assert [a.name for a in out._schema.arguments if not a.is_out] == [
            a.name for a in own._schema.arguments
        ]


@given(
    st.integers(1, 10**6), st.integers(1, 10**5), st.sampled_from([2, 4, 8]),
    st.booleans(), st.booleans(), st.integers(1, 200),
)  # fmt: skip
def test_there_is_room_for_each_result(
    inputs: int, results: int, itemsize: int, along: bool, contiguous: bool, count: int
) -> None:
    """At least two blocks share each result, where any do; and never more than have values."""
    card = Multiprocessors(count, 2048)
    blocks = scratch_of_reduction(
        inputs, results, itemsize, along=along, contiguous=contiguous, card=card
    )
    if blocks:
        partial, counters = blocks
        assert partial >= 2 * results * itemsize
        assert counters % 4 == 0
        assert 0 < counters <= 4 * results
        assert partial <= max(inputs, MOST_THREADS) * results * itemsize
    else:
        assert inputs < 10**6 or results > 1 or count == 1


@pytest.mark.parametrize("shape", [(), (0,), (4, 0)])
def test_nothing_of_nothing(shape: tuple[int, ...]) -> None:
    assert CudaScratch().blocks_of_call(ATEN.amax.default, (meta(*shape),), {}) == ()
