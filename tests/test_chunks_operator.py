"""The operator that computes rows a few at a time, its fused kernels, and rows that it counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils.flop_counter import FlopCounterMode

from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor import kernels as kernels_of_inductor
from fxremat.compat.tensors import Watching
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS
from fxremat.passes.variants.chunks.rules import RULES as ROW_RULES
from fxremat.runtime import kernels
from fxremat.runtime.chunks import fused_kernels
from fxremat.runtime.chunks.buffers import MATMULS
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Program, Ref, dump, parse
from tests import row_sites
from tests.graphs import Net, calls
from tests.loss_program import CLASSES, FEATURES, SIZES, expected, inputs, one, program, run
from tests.row_nets import STEPS, D, head, labels, rows, traced_step
from tests.row_sites import Traced, given_to_rows, real, taken, trace, workspace_too_large
from tests.slowness import slow_but
from tests.variants import sites


def assert_close(
    found: list[torch.Tensor], best: list[torch.Tensor], tolerance: float = 1e-5
) -> None:
    for one_, other in zip(found, best, strict=True):
        row_sites.assert_close(one_, other, tolerance)


def assert_the_same(found: list[torch.Tensor], best: list[torch.Tensor]) -> None:
    """In double precision."""
    for pair in zip(found, best, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-14)


@given(st.integers(0, 40), st.integers(1, 50), st.integers(1, 20))
def test_any_split_gives_the_same(count: int, chunk: int, tile: int) -> None:
    assert_close(run(inputs(count), chunk, tile), expected(*inputs(count)))


def test_low_precision_is_added_up_in_float32() -> None:
    """A thousand chunks of bfloat16: the sums are as good as one matmul's."""
    given_ = inputs(1000, torch.bfloat16)
    assert_close(run(given_, 1, 1), expected(*given_), 2e-2)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fused", [False, True])
def test_memory_is_known_to_the_byte(sizes: tuple[int, int, int], fused: bool) -> None:
    """Matmuls of low precision may take scratch memory of their own, on some processors."""
    count, chunk, tile = sizes
    x, y, w = inputs(count)
    assert workspace_too_large([x, y], [w.t(), w], program(), chunk, tile, fused) == 0


def test_flops_are_those_of_the_matmuls() -> None:
    with FlopCounterMode(display=False) as counted:
        run(inputs(32), 8, 4)
    assert counted.get_total_flops() == 3 * 2 * 32 * FEATURES * CLASSES


def test_fake_results_are_alike_and_nothing_given_is_written() -> None:
    x, y, w = inputs(20, torch.bfloat16)
    args = ([x, y], [w.t(), w], program(torch.bfloat16), 8, 4)
    torch.library.opcheck(ROWS, args, test_utils=("test_schema", "test_faketensor"))


def inside(count: int, chunk: int, tile: int, on_cpu: bool = True, **how: bool) -> Any:
    """What a call on so many rows calls and moves inside."""
    x, y, w = inputs(count)
    args = ([x, y], [w.t(), w], program(), chunk, tile)
    return kernels.INSIDE[ROWS](*args, on_cpu=on_cpu, **how)


def test_every_chunk_reads_the_weights_anew() -> None:
    """And a GPU the sum that it adds to."""
    w = inputs(8)[2]
    matmuls = [one for one in parse(program()).loop if one.op in MATMULS]
    read = sum(any(n in (2, 3) for n in one.reads) for one in matmuls) * w.nbytes
    added = sum(2 * one.numel * w.itemsize for one in matmuls if one.kind == "sum")
    assert read > 0
    assert inside(8, 8, 8).again == inside(8, 8, 8, on_cpu=False).again == 0
    assert inside(8, 2, 2).again == 3 * read
    assert inside(8, 2, 2, on_cpu=False).again == 3 * (read + added)


def test_what_a_tile_moves_stays_in_the_cache() -> None:
    of_chunks, of_tiles = inside(8, 8, 8), inside(8, 8, 2)
    assert of_tiles.bytes < of_chunks.bytes
    assert of_tiles.calls > of_chunks.calls
    assert inside(8, 8, 2, on_cpu=False) == of_chunks


def test_an_operator_with_a_temporary_is_known_to_the_byte() -> None:
    """A fused multiplication and addition makes its product on the way."""
    pytest.importorskip("torch._inductor.inductor_prims")  # which registers it
    if not hasattr(torch.ops.prims, "fma"):
        pytest.skip("this torch has no such operator")
    steps = (one("prims.fma.default", Ref(0), Ref(0), Ref(0), row_shape=(CLASSES,)),)
    text = dump(Program(1, 0, steps, (1,)))
    x = torch.randn(64, CLASSES)
    assert workspace_too_large([x], [], text, 16, 16) == 0
    torch.testing.assert_close(ROWS([x], [], text, 16, 16)[0], x * x + x)


# --- fused kernels ------------------------------------------------------------------------


NUMBER_BYTES = 12
"""A number that stands beside a tensor, in the last rows: counted as if beside a partial sum."""


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((sizes, torch.float32) for sizes in SIZES),
        *(pytest.param(sizes, torch.bfloat16, marks=pytest.mark.slow) for sizes in SIZES),
    ],
)
def test_kernels_compute_what_the_operators_do(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, chunk, tile = sizes
    given = inputs(count, dtype)
    found, alone = run(given, chunk, tile, fused=True), run(given, chunk, tile)
    assert [t.dtype for t in found] == [t.dtype for t in alone]
    assert_close(found, expected(*given), 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.fixture
def new_kernels() -> Iterator[None]:
    """None are known that were written before, nor are those of the test to others."""
    fused_kernels.kernels_of.cache_clear()
    yield
    fused_kernels.kernels_of.cache_clear()


@pytest.mark.usefixtures("new_kernels")
def test_adding_at_an_index_as_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one loop over all elements, and no memory for the row that is added to."""
    x, y, w = tensors = inputs(64)
    shapes = tuple(fused_kernels.Shape.of(t) for t in (x, y, w.t(), w))
    monkeypatch.setattr(fused_kernels._KernelWriter, "by_comparison", True)
    [kernel] = filter(None, fused_kernels.kernels_of(program(), shapes, 16))
    assert_close(run(tensors, 16, 16, fused=True), expected(*tensors))
    assert kernel.scratch <= 4 * CLASSES + 4 * 16 * 4  # a sum over rows, a few numbers a row


@pytest.mark.parametrize("name", slow_but(["loss", "gated"], STEPS))
def test_calls_of_real_graphs(name: str) -> None:
    """Values and memory; of 50 rows the last tile is no whole one, and runs by operators."""
    joint = traced_step(name)
    found = [site for rule in ROW_RULES for site in sites(rule, joint)[:2]]
    assert found
    for site in found:
        for call in calls(taken(joint, site).module.graph, ROWS):
            torch.manual_seed(0)
            args = [real(a) for a in fx.map_arg(call.args, lambda n: n.meta["val"])]
            assert_close(ROWS(*args, fused=True), ROWS(*args))
            assert workspace_too_large(*args) == 0
            assert workspace_too_large(*args, fused=True) in (0, NUMBER_BYTES)


def test_a_fused_stage_is_one_call() -> None:
    """Nothing but matmuls, and what cuts rows out, is called from Python."""
    from torch.profiler import ProfilerActivity, profile

    given = inputs(64)
    run(given, 16, 16, fused=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(given, 16, 16, fused=True)
    names = {event.key for event in seen.key_averages()}
    assert {"aten::mm", "aten::addmm"} <= names
    assert not names & {"aten::exp", "aten::sub", "aten::amax", "aten::sum", "aten::gather"}


@pytest.mark.usefixtures("new_kernels")
def test_a_stage_that_inductor_cannot_write_runs_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, fails = inputs(64), mock.Mock(side_effect=KeyError("buf0"))
    monkeypatch.setattr(fused_kernels, "unbuilt_kernel", fails)
    monkeypatch.setattr(fused_kernels, "kernel_key", lambda _: None)
    assert_close(run(given, 16, 4, fused=True), expected(*given))


def test_what_a_kernel_allocates_is_asked_once_for_all_processes_that_share_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, counted = inputs(80), mock.Mock(side_effect=kernels_of_inductor.unbuilt_kernel)
    monkeypatch.setattr(fused_kernels, "unbuilt_kernel", counted)
    with inductor_config.patch(allow_buffer_reuse=False), _use_lazy_graph_module(True):
        fused_kernels.kernels_of.cache_clear()  # as while a graph is compiled under a budget
        assert_close(run(given, 16, 16, fused=True), expected(*given))
    counted.reset_mock()
    fused_kernels.kernels_of.cache_clear()
    assert_close(run(given, 16, 16, fused=True), expected(*given))
    assert not counted.called


def test_time_counts_one_call_for_each_tile() -> None:
    fused = inside(64, 16, 4, by_inductor=True)
    matmuls = 4 * 3
    assert fused.calls == matmuls + 16
    assert fused.bytes < inside(64, 16, 4).bytes
    assert fused.bytes > 64 * CLASSES * 4 * 2  # logits in and d_logits out, at the least


# --- counted rows -------------------------------------------------------------------------


ROWS_OF_ALL, IGNORED = 50, -100
Call = tuple[Any, Any]


@cache
def traced(dtype: torch.dtype) -> Traced:
    """The step of a loss in float32 or more, whatever the type of its head."""
    wide = torch.promote_types(dtype, torch.float32)
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x).to(wide), y), head=head().to(dtype))
    return trace(net, (rows(ROWS_OF_ALL, D).detach().to(dtype).requires_grad_(), labels(50)))


@cache
def in_chunks(dtype: torch.dtype) -> JointGraph:
    """The joint graph with the loss and its gradients in one loop."""
    joint = traced(dtype).joint
    (site,) = (site for site in sites(CHUNKED_LOSS, joint) if "at once 16" in site.name)
    return taken(joint, site)


def with_labels(y: torch.Tensor, dtype: torch.dtype = torch.float64, **changed: Any) -> Call:
    """What the loop is given; some inputs of the graph may change."""
    step = traced(dtype)
    (name,) = (n for n, v in step.inputs.items() if getattr(v, "dtype", None) is torch.int64)
    (call,) = given_to_rows(in_chunks(dtype), {**step.inputs, name: y, **changed})
    return call


def ignoring(ignored: Any) -> torch.Tensor:
    """Labels, some of which are ignored."""
    chosen = torch.as_tensor(ignored)
    return torch.where(chosen, IGNORED, labels(ROWS_OF_ALL))


def of_all_rows(call: Call) -> list[torch.Tensor]:
    """What the call gives where it leaves nothing out."""
    args, kwargs = call
    text = dump(replace(parse(args[2]), ignored=None))
    found: list[torch.Tensor] = ROWS(*args[:2], text, *args[3:], **kwargs)
    return found


def results_of(call: Call) -> list[torch.Tensor]:
    args, kwargs = call
    found: list[torch.Tensor] = ROWS(*args, **kwargs)
    return found


@given(st.lists(st.booleans(), min_size=ROWS_OF_ALL, max_size=ROWS_OF_ALL), st.integers(1, 20),
       st.integers(1, 20))  # fmt: skip
def test_any_rows_may_be_ignored(ignored: list[bool], chunk: int, tile: int) -> None:
    args, kwargs = with_labels(ignoring(ignored))
    call = (*args[:3], chunk, tile), kwargs
    assert_the_same(results_of(call), of_all_rows(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 20, 33, 49, 50])
def test_in_low_precision(dtype: torch.dtype, count: int) -> None:
    """Labels in any order; memory is to the byte what is said, the same for any number."""
    order = torch.randperm(ROWS_OF_ALL, generator=torch.Generator().manual_seed(0))
    call = with_labels(ignoring(order >= count), dtype)
    most = 1e-5 if dtype is torch.float32 else 2e-2
    assert_close(results_of(call), of_all_rows(call), most)
    args, kwargs = call
    assert dtype is not torch.float32 or workspace_too_large(*args, **kwargs) == 0


@pytest.mark.parametrize(
    ("count", "computed"), [(50, 50), (49, 50), (33, 39), (14, 26), (13, 13), (1, 13), (0, 50)]
)
def test_what_is_ignored_is_not_computed(count: int, computed: int) -> None:
    """A chunk, and here a tile, has 13 rows. Where no row counts, all are computed."""
    args, kwargs = with_labels(ignoring(torch.arange(ROWS_OF_ALL) >= count))
    assert args[3:5] == (16, 16)
    rows = 0

    def seen(op: Any, given: Any, *_: Any) -> None:
        nonlocal rows
        is_product = op.overloadpacket is torch.ops.aten.addmm and given[1].shape[1:] == (D,)
        rows += len(given[1]) if is_product else 0  # with the head

    with Watching(seen):
        kernels.IMPLEMENTATIONS[ROWS](*args, **kwargs)
    assert rows == computed


def test_a_row_that_is_ignored_may_hold_anything() -> None:
    """It adds nothing; computed, it would make NaN of every sum."""
    step = traced(torch.float64)
    (name,) = (n for n, v in step.inputs.items() if getattr(v, "shape", ()) == (ROWS_OF_ALL, D))
    x = step.inputs[name].clone()
    x[3], x[7] = float("nan"), float("inf")
    y = ignoring([row in (3, 7, 8) or row > 20 for row in range(ROWS_OF_ALL)])
    call = with_labels(y, **{name: x})
    assert any(one.isnan().any() for one in of_all_rows(call))
    assert_the_same(results_of(call), of_all_rows(with_labels(y)))


def test_a_small_call_on_a_gpu_looks_for_nothing() -> None:
    """There it would have to wait for the labels."""
    args, _ = with_labels(labels(ROWS_OF_ALL))
    program_ = parse(args[2])
    assert program_.ignored is not None
    on_gpu = [[one.to("meta") for one in part] for part in args[:2]]
    without = dump(replace(program_, ignored=None))
    said = (
        kernels.WORKSPACES[ROWS](*on_gpu, text, *args[3:], measure=kernels.unmeasured)
        for text in (args[2], without)
    )
    assert len({*said}) == 1
