"""Scratch memory: measured, of reductions, and inside of CUDA's libraries."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.compat.configuration import OpOverload
from fxremat.cost import call_times, cuda_scratch, workspaces
from fxremat.cost.call_times import made_real
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES, round_up
from fxremat.memory.measured_peak import measure_peak
from fxremat.sizes import format_bytes
from tests import nets
from tests.single_calls import ATEN, X, call, item

HOST = torch.device("cpu")
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
CONV_BACKWARD = ATEN.convolution_backward.default
IMAGE, GRADIENT, WEIGHT = torch.ones(2, 3, 16, 16), torch.ones(2, 8, 16, 16), torch.ones(8, 3, 3, 3)
ONES, NONE = [1, 1], [0, 0]
NEVER = mock.Mock(side_effect=AssertionError("measured a second time"))
ARGS = (GRADIENT, IMAGE, WEIGHT, [8], ONES, ONES, ONES, False, NONE, 1, [True, True, True])


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.cost.workspaces.cache_directory", lambda: tmp_path)
    workspaces._tell_once.cache_clear()


@pytest.mark.parametrize(
    ("target", "args"),
    [(CONV_BACKWARD, ARGS), (ATEN.sort.default, (torch.ones(64, 64).t(), 1))],
    ids=["convolution", "sort"],
)
def test_scratch_memory_is_found(target: Any, args: Any) -> None:
    """Sorting what is not contiguous needs a copy; the results are not counted."""
    kept = sum(result.untyped_storage().nbytes() for result in target(*args))
    peak = measure_peak(lambda: target(*args)).above_start_bytes
    found = Workspaces(HOST).of_call(target, args, {})
    assert found == peak - kept
    assert found > 0 or target is CONV_BACKWARD


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (ATEN._assert_async.default, (torch.ones(1),)),
        (ATEN._functional_assert_async.msg, (torch.ones(1), "", torch.ones(1))),
        (ATEN.repeat_interleave.Tensor, (torch.tensor([2, 3]),)),
    ],
    ids=lambda value: str(value) if isinstance(value, OpOverload) else "",
)
def test_what_checks_its_operands_is_not_run(target: Any, args: Any) -> None:
    """On CUDA a failed check ends the context."""
    assert Workspaces(HOST).of_call(target, args, {}) == 0
    assert not Workspaces(HOST).file.path.exists()


def test_what_chooses_among_its_operands_is_run() -> None:
    """What a choice by a mask takes depends on the number of threads."""
    x, mask = torch.ones(512, 512), torch.ones(512, 512, dtype=torch.bool)
    scratch = Workspaces(HOST).of_call(ATEN.masked_select.default, (x, mask), {})
    peak = measure_peak(lambda: ATEN.masked_select.default(x, mask)).above_start_bytes
    assert scratch == peak - x.nbytes > x.numel()
    assert Workspaces(HOST).of_call(ATEN.nonzero.default, (mask,), {}) < 1024


def test_a_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = Workspaces(HOST)
    first = spaces.of_call(CONV_BACKWARD, ARGS, {})
    monkeypatch.setattr(workspaces, "measure_call", NEVER)
    assert spaces.of_call(CONV_BACKWARD, ARGS, {}) == first
    assert Workspaces(HOST).of_call(CONV_BACKWARD, ARGS, {}) == first  # read from disk
    with pytest.raises(AssertionError, match="second time"):
        spaces.of_call(CONV_BACKWARD, (GRADIENT[:1], IMAGE[:1], *ARGS[2:]), {})


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


# --- calls for which there is no room -----------------------------------------------------


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

    monkeypatch.setattr(call_times, "made_real", limited)


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
    monkeypatch.setattr(workspaces, "measure_call", NEVER)
    assert spaces.of_call(CONV_BACKWARD, batch_of(32), {}) == found
    assert Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(32), {}) == found  # read from disk
    (line,) = caplog.messages
    assert "convolution_backward" in line
    assert "`reserve`" in line
    assert format_bytes(found) in line


@pytest.mark.parametrize(
    ("args", "said"), [(batch_of(32), "`reserve`"), ((X, X), r"TypeError|RuntimeError")]
)
def test_a_call_that_never_has_room_or_raises_counts_nothing_and_is_told_once(
    args: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_room_above(0, torch.OutOfMemoryError(), monkeypatch)
    for _ in range(2):
        spaces = Workspaces(HOST)
        assert spaces.of_call(CONV_BACKWARD, args, {}) == 0
        assert spaces.refused == 1
    (line,) = caplog.messages
    assert "convolution_backward" in line
    assert re.search(said, line)


def test_on_a_cpu_a_call_that_would_fill_the_memory_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linux would give the memory, and kill the process when it is used."""
    part = Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(8), {})
    monkeypatch.setattr(call_times, "_available_memory", lambda: 1_000_000)
    no_room_above(8, AssertionError("tried"), monkeypatch)
    assert Workspaces(HOST).of_call(CONV_BACKWARD, batch_of(32), {}) == 4 * part
    assert len(caplog.messages) == 1


# --- cuda reductions ----------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


BLOCKS: dict[str, tuple[list[Any], tuple[Any, ...], tuple[int, ...]]] = {
    # by torch 2.11 on an H200: 16 blocks share a result, and 3 groups of blocks have a counter each
    "a sum of rows": (
        [ATEN.sum.dim_IntList, ATEN.sum.IntList_out], (meta(1024, 300), [0]), (2457600, 12)),
    "enough rows for all threads": (
        [ATEN.sum.dim_IntList, ATEN.amax.default, ATEN.amax.out, ATEN.amin.out],
        (meta(1024, 300), [1]), ()),
    "a number": ([ATEN.amax.default], (meta(),), ()),
    "nothing": ([ATEN.amax.default], (meta(0),), ()),
    "rows of nothing": ([ATEN.amax.default], (meta(4, 0),), ()),
    "products": ([ATEN.mm.default], (meta(4, 4),) * 2, ()),
    "norms of many are added up from pieces": (
        [ATEN._foreach_norm.Scalar], ([meta(65536 * 2 + 1), meta(5)],), (2 * 3 * 4,)),
    # of other widths a tile of attention has one counter, not two: 0.02 % too much are said
    "counters of efficient attention": (
        [ATEN._scaled_dot_product_efficient_attention_backward.default],
        (meta(2, 8, 1000, 80, dtype=BF16),) * 4, (64000, 8390656 + 16 * 16 * 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_calls(name: str) -> None:
    """Also of the forms with ``out``."""
    targets, args, blocks = BLOCKS[name]
    for target in targets:
        assert cuda_scratch.CudaScratch().blocks_of_call(target, args, {}) == blocks


def test_cublas_works_in_32_mebibytes_from_hopper_on() -> None:
    assert cuda_scratch.cublas_workspace((8, 9)) == 8_519_680
    assert cuda_scratch.cublas_workspace((9, 0)) == 32 * 2**20


def test_what_writes_into_given_memory_has_the_same_schema() -> None:
    for out, own in cuda_scratch.IN_FORM_OUT.items():
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
    card = replace(cuda_scratch.HOPPER, multi_processor_count=count)
    blocks = cuda_scratch.scratch_of_reduction(
        inputs, results, itemsize, along=along, contiguous=contiguous, card=card
    )
    if blocks:
        partial, counters = blocks
        assert partial >= 2 * results * itemsize
        assert counters % 4 == 0
        assert 0 < counters <= 4 * results
        assert partial <= max(inputs, cuda_scratch.MOST_THREADS) * results * itemsize
    else:
        assert inputs < 10**6 or results > 1 or count == 1


# --- cuda scratch -------------------------------------------------------------------------


ATTENTION = [
    # kernel, batch, heads, heads of keys, length, width, dtype, blocks
    ("flash", 16, 12, 12, 1024, 64, BF16, (786432, 50331648)),
    ("flash", 8, 16, 4, 2048, 64, BF16, (1048576, 67108864, 33554432, 33554432)),
    ("flash", 2, 8, 8, 1000, 80, HALF, (65536, 6291456)),
    ("flash", 2, 8, 2, 1024, 128, BF16, (65536, 8388608, 4194304, 4194304)),
    ("flash", 1, 4, 4, 300, 40, BF16, (6144, 393216)),
    ("cudnn", 16, 12, 12, 1024, 64, BF16, (51118336,)),
    ("cudnn", 8, 16, 4, 2048, 64, BF16, (135266560,)),
    ("cudnn", 2, 8, 8, 1000, 80, HALF, (5184256,)),
    ("cudnn", 2, 8, 2, 1024, 128, BF16, (16843008,)),
    ("efficient", 16, 12, 12, 1024, 64, BF16, (786432, 50380800)),
    ("efficient", 8, 12, 12, 512, 64, BF16, (196608, 12595200)),
    ("efficient", 16, 12, 12, 1024, 64, FULL, (50331648, 786432, 786432)),
    ("efficient", 8, 12, 12, 512, 64, FULL, (12582912, 196608, 196608)),
    ("efficient", 2, 8, 8, 1000, 80, FULL, (64000, 8392704)),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: "-".join(map(str, case[:6])))
def test_backward_of_attention(case: Any) -> None:
    kernel, batch, heads, key_heads, length, width, dtype, blocks = case
    target = getattr(ATEN, f"_scaled_dot_product_{kernel}_attention_backward").default
    query = meta(batch, heads, length, width, dtype=dtype)
    key = meta(batch, key_heads, length, width, dtype=dtype)
    args = (query, query, key, key)
    assert cuda_scratch.CudaScratch().blocks_of_call(target, args, {}) == blocks
    assert cuda_scratch.CudaScratch().of_call(target, args, {}) == sum(blocks)


@pytest.mark.parametrize(
    ("count", "width", "of_indices", "of_cub"),
    [(16384, 768, 131072, 270847), (4096, 1024, 32768, 71167)],
)
def test_adding_by_an_index(count: int, width: int, of_indices: int, of_cub: int) -> None:
    table, index = meta(50304, width), meta(count, dtype=torch.int64)
    args = (table, [index], meta(count, width), True)
    *sorting, more = cuda_scratch.CudaScratch().blocks_of_call(ATEN.index_put_.default, args, {})
    assert sorting == [of_indices] * 4
    assert round_up(more, MIN_BLOCK_BYTES) == round_up(of_cub, MIN_BLOCK_BYTES)
