"""Dry runs: what Inductor would allocate, what is kept, and operators of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import fxremat
from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.tensors import without_memory
from fxremat.compile.dry_run.dry_run import (
    AllocatorEvents,
    DryRun,
    GeneratedStep,
    dry_run_once,
    generate_step,
)
from fxremat.compile.dry_run.meter import CodeMeter, Workspace
from fxremat.core.events import Allocate, Free, Given, RunEvents
from fxremat.core.json_data import from_data, to_data
from fxremat.core.timeline import Lifetime
from fxremat.cost.cuda_scratch import CudaScratch
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES, round_up
from fxremat.runtime import kernels
from fxremat.runtime.chunks.buffers import adds_straight, of_total, while_adding
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import parse
from fxremat.whatif.device import absent
from fxremat.whatif.explanation import Explanation
from tests.compat_graphs import half, shared
from tests.end_to_end import QUICK, measured, step
from tests.graphs import Net
from tests.loss_program import CLASSES, FEATURES, program
from tests.small import Convolutions, Stack, seeded

pytestmark = pytest.mark.usefixtures("fresh")


# --- generated code on tensors without memory ---------------------------------------------

HEADER = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
loop = async_compile.cpp_pybinding(['float*'], 'no C++')
def call(args):
"""
CHAIN = """
    x, = args
    args.clear()
    buf0 = empty_strided_cpu((100, ), (1, ), torch.uint8)
    loop(x, buf0)
    buf1 = buf0; del buf0  # reuse
    loop(buf1)
    buf2 = empty_strided_cpu((30, ), (1, ), torch.uint8)
    loop(buf1, buf2)
    del buf1
    buf3 = torch.ops.aten.sort.default(buf2)
    buf4 = buf3[0]
    del buf3
    return (reinterpret_tensor(buf4, (10, ), (1, ), 0), )
"""
ORIGINS = {"buf0": "mul", "buf1": "gelu", "buf2": "sum_1", "buf3": "sort"}


def counted(body: str, workspace: Workspace = lambda op, args, kwargs: ()) -> tuple[CodeMeter, Any]:
    """The meter and the results after ``body`` has run on 8 bytes."""
    meter = CodeMeter(workspace=workspace)
    generated = Generated(HEADER + body, {}, ORIGINS, ())
    with without_memory() as made:
        x = torch.empty(8, dtype=torch.uint8)
        meter.ignore([x])
        results = meter.run(generated, "<test>", [x], made, fx.Graph())
    return meter, results


def sorting(op: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Scratch memory of a sort, and of nothing else."""
    return (600, 400) if op is torch.ops.aten.sort.default else ()


def test_bytes_after_each_allocation() -> None:
    """The peak is named after what its memory holds then."""
    meter, results = counted(CHAIN)
    levels = list(dict.fromkeys(meter.live_bytes))
    # buf0 in buf1's memory; buf2; buf1 gone, the values of the sort; its indices
    assert levels == [100, 130, 30 + 30, 60 + 8 * 30]
    assert meter.peak == 300
    assert meter.current == 30  # a view of the sorted values alone
    assert len(results) == 1
    meter, _ = counted(CHAIN.replace("(30, )", "(10, )"))
    assert (meter.peak, sorted(meter.at_peak)) == (110, [("gelu", 100), ("sum_1", 10)])


def bytes_at(lifetimes: Iterable[Lifetime], points: int) -> list[int]:
    """What is live at each of so many points."""
    shown = list(lifetimes)
    return [sum(x.nbytes for x in shown if x.start <= k < x.stop) for k in range(points)]


# --- a dry run ----------------------------------------------------------------------------


def test_lifetimes_add_up_to_what_is_live() -> None:
    """The scratch memory of the sort among them, beside its results; what is freed is not."""
    meter, _ = counted(CHAIN, sorting)
    assert (meter.peak, meter.scratch) == (1300, {"sort": 1000})
    shown = [*meter.lifetimes, *map(meter.lifetime, meter.live.values())]
    assert bytes_at(shown, len(meter.live_bytes)) == meter.live_bytes
    assert [one.nbytes for one in shown if one.workspace] == [1000]
    assert {one.value for one in shown} == {"mul", "sum_1", "sort"}


def test_what_the_caller_holds_is_there_to_the_end() -> None:
    """Inputs, the result, and the incoming gradient, which the last product does not need."""

    def step(forward: Any, backward: Any) -> DryRun:
        return generate_step(forward, backward, num_fwd_outputs=1).dry_run("cpu", lambda *_: ())

    weights = {name: nn.Parameter(torch.ones(64, 64)) for name in ("first", "second")}
    products = Net(lambda net, x: x @ net.first @ net.second, **weights)
    shown = half(products, step, torch.ones(64, 64))
    assert shown.peak_bytes == 8 * 64 * 64 * 4
    held = {"primals_1", "primals_2", "primals_3", "mm_1", "tangents_1"}
    assert held <= dict(shown.at_peak).keys()
    assert bytes_at(shown.lifetimes, len(shown.live_bytes)) == list(shown.live_bytes)
    ends = {one.value: one.stop for one in shown.lifetimes}
    assert all(ends[name] == len(shown.live_bytes) for name in held)


def test_what_others_hold_between_the_halves_is_live_there_and_nowhere_else() -> None:
    shown = DryRun(
        peak_bytes=90,
        live_bytes=(50, 70, 60, 90),
        at_peak=(("b", 90),),
        scratch={},
        allocator=AllocatorEvents(
            (Allocate("0", 50), Allocate("1", 20), Free("1"), Allocate("3", 30)), forward_events=2
        ),
        computed=("a", "t", "b", "c"),
        forward_steps=2,
        saved_bytes=70,
        lifetimes=(
            Lifetime("a", 50, 0, 2),
            Lifetime("t", 20, 1, 3),
            Lifetime("b", 40, 2, 4),
            Lifetime("c", 50, 3, 4),
        ),
    )
    assert shown.with_between(0) == shown
    assert shown.with_between(20).peak_bytes == 90
    more = shown.with_between(40)
    assert more.peak_bytes == 110
    assert more.at_peak == (("tangents", 40),)
    assert more.live_bytes == (50, 70, 110, 60, 90)
    assert more.computed == ("a", "t", "tangents", "b", "c")
    assert more.events[2:4] == (Allocate("4", 40), Free("4"))
    assert (more.saved_bytes, more.forward_steps) == (70, 3)
    stays = [(one.value, one.start, one.stop) for one in more.lifetimes]
    assert stays == [("a", 0, 2), ("t", 1, 4), ("b", 3, 5), ("c", 4, 5), ("tangents", 2, 3)]


def test_a_plan_names_what_is_live_at_the_peak() -> None:
    model, x = seeded(Stack, 512, 32)
    full = fxremat.explain(model, x)
    budget = int(0.8 * full.store_all_peak_bytes)
    options = {"memory_budget": budget, "variants": "none"}
    report = fxremat.explain(model, x, options=options).graphs[0]
    assert report.provenance.dry_runs >= 1
    assert "dry run" in report.seconds
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


@pytest.mark.usefixtures("kept")
def test_code_that_cannot_run_without_data_is_planned_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no fake kernel\nand a long explanation")

    monkeypatch.setattr("fxremat.compile.dry_run.dry_run.generate_step", refuse)
    model, x = seeded(Stack, 512, 32)
    budget = int(0.8 * fxremat.explain(model, x).store_all_peak_bytes)
    report = fxremat.explain(model, x, memory_budget=budget).graphs[0]
    assert report.predicted_peak_bytes == report.planned_peak_bytes <= budget
    assert "could not run without data (NotImplementedError: no fake kernel)" in caplog.text
    assert report.order == "planned"  # the plan is all there is: Inductor has to keep to it


def first_rows(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    count = keep.sum().item()
    check: Any = torch._check
    check(count >= 2)
    check(count <= len(x))
    return x[: int(count)]


def indexed(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    places = torch.nonzero(keep).squeeze(-1)
    return torch.zeros_like(x).index_add(0, places, x[places])


def selected(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x[:, 0], keep)[:, None].expand(-1, x.shape[1])


def distinct(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    unique: Any = torch.unique(torch.where(keep, x[:, 0], 0))
    rows: torch.Tensor = unique[:, None].expand(-1, x.shape[1])
    return rows


@pytest.mark.parametrize(
    "choose", [lambda x, keep: x[keep], first_rows, indexed, selected, distinct]
)
def test_what_only_data_tells_the_size_of_is_as_large_as_it_may_be(
    choose: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Where all rows are chosen it is, and what is promised is measured."""
    torch.manual_seed(0)
    model = Net(lambda net, x, keep: net.layers(choose(x, keep)).square().mean(), layers=Stack(2))
    given = torch.randn(512, 32), torch.ones(512, dtype=torch.bool)
    data = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(data):
        call = torch.compile(model, backend="fxremat", options={**QUICK, "memory_budget": "1GiB"})
        step(model, call, given)
        peak = measured(model, call, given)
        (report,) = fxremat.reports()
    assert "could not run without data" not in caplog.text
    assert 0.95 * report.predicted_peak_bytes <= peak <= report.predicted_peak_bytes


# --- dry run kept -------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where dry runs are kept."""
    monkeypatch.setattr("fxremat.compile.search.candidates.cache_directory", lambda: tmp_path)
    return tmp_path / "dry_runs"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[GeneratedStep]:
    """The steps whose code was really generated, to be run."""
    found = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(generate_step(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr("fxremat.compile.dry_run.dry_run.generate_step", noting)
    return found


def explain(model: Any = None, rows: int = 512, **options: Any) -> Explanation:
    torch._dynamo.reset()
    made, x = seeded(model or (lambda: Stack(2)), rows, 32)
    return fxremat.explain(made, x, options={"memory_budget": "1.3MiB", **options})


def images() -> Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"memory_budget": "1000kB", "variants": "none", "solver": "greedy"}
    return fxremat.explain(Convolutions(), torch.randn(4, 3, 32, 32), options=options)


def unchanging(explanation: Explanation) -> Any:
    """What does not depend on the clock."""
    [report] = explanation.graphs
    peak = report.predicted_peak_bytes, report.at_peak
    return report.plan.steps, report.variants, report.provenance.dry_runs, *peak


@pytest.mark.parametrize("ask", [explain, images])
def test_no_dry_run_is_made_twice(
    kept: Path, made: list[Any], ask: Callable[[], Explanation]
) -> None:
    first, count = ask(), len(made)
    assert 0 < len(list(kept.iterdir())) == count
    second = ask()
    assert len(made) == count
    assert unchanging(second) == unchanging(first)


@pytest.mark.parametrize(
    ("change", "threads", "count"),
    [
        ({}, 2, 1),
        ({"num_fwd_outputs": 2}, 2, 2),
        ({"device": "cuda"}, 2, 2),
        ({"card": "H100"}, 2, 2),
        ({}, 1, 2),
        (None, 2, 2),
    ],
    ids=["nothing", "results", "device", "card", "threads", "no caches"],
)
def test_the_same_graphs_are_counted_anew_where_something_else_differs(
    kept: Path, made: list[Any], change: dict[str, Any] | None, threads: int, count: int
) -> None:
    """Graphs that differ, and other options of Inductor, have another `code_key`."""

    def step(forward: Any, backward: Any) -> None:
        asked: dict[str, Any] = {"num_fwd_outputs": 1, "device": "cpu"}
        asked |= {"workspace": lambda *_: (), "directory": kept}
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            dry_run_once(forward, backward, **asked)
            torch.set_num_threads(threads)
            dry_run_once(forward, backward, **{**asked, **(change or {})})
        finally:
            torch.set_num_threads(before)

    with inductor_config.patch(force_disable_caches=change is None):
        half(shared(), step)
    assert len(made) == count
    assert kept.exists() == (change is not None)


SIZES = st.integers(0, 2**50)
EVENTS = st.lists(st.builds(Allocate, st.text(), SIZES) | st.builds(Free, st.text())).map(tuple)
RUNS = st.builds(RunEvents, EVENTS, EVENTS, st.lists(st.builds(Given, SIZES)).map(tuple))
DRY_RUNS = st.builds(
    DryRun,
    peak_bytes=SIZES,
    live_bytes=st.lists(SIZES).map(tuple),
    at_peak=st.lists(st.tuples(st.text(), SIZES)).map(tuple),
    scratch=st.dictionaries(st.text(), SIZES),
    lifetimes=st.lists(st.builds(Lifetime, st.text(), SIZES, SIZES, SIZES, st.booleans())).map(
        tuple
    ),
    allocator=st.builds(AllocatorEvents, EVENTS, SIZES, st.none() | RUNS),
)


@given(DRY_RUNS)
def test_every_dry_run_is_read_back(shown: DryRun) -> None:
    found = from_data(DryRun, json.loads(json.dumps(to_data(shown))))
    assert (found, found.allocator) == (shown, shown.allocator)


# --- dry run operators --------------------------------------------------------------------

BF16 = torch.bfloat16


def meter() -> CodeMeter:
    """Of CUDA."""
    return CodeMeter(device="cuda", workspace=CudaScratch().blocks_of_call)


def loss_on_cuda(count: int, chunk: int, *, fused: bool) -> tuple[Any, ...]:
    """Arguments of the operator, without memory."""
    x = torch.empty(count, FEATURES, dtype=BF16, device="cuda")
    y = torch.zeros(count, 1, dtype=torch.int64, device="cuda")
    w = torch.empty(CLASSES, FEATURES, dtype=BF16, device="cuda")
    return [x, y], [w.t(), w], program(BF16, "cuda"), chunk, chunk, fused


@pytest.mark.parametrize("fused", [False, True])
def test_events_have_the_peak_that_the_operator_declares(fused: bool) -> None:
    """The results come first, each with its own memory; all else is freed at the end."""
    count, chunk = 4096, 1024
    with absent("H100"), without_memory():
        args = loss_on_cuda(count, chunk, fused=fused)
        declared = kernels.WORKSPACES[ROWS](*args, measure=CudaScratch().of_call)
        found = meter().inside(ROWS, args, {})
        results = [t.untyped_storage().nbytes() for t in ROWS(*args)]
    assert found is not None
    live: dict[str, int] = {}
    current = peak = 0
    for event in found.events:
        if isinstance(event, Allocate):
            live[event.name] = round_up(event.nbytes, MIN_BLOCK_BYTES)
            current += live[event.name]
            peak = max(peak, current)
        elif isinstance(event, Free):
            current -= live.pop(event.name)
    assert sorted(live) == sorted(str(name) for name in found.results)
    assert [live[str(name)] for name in found.results] == [
        round_up(size, MIN_BLOCK_BYTES) for size in results
    ]
    assert found.scratch == peak - current
    assert 0 <= found.scratch - declared <= 20 * MIN_BLOCK_BYTES  # rounded up, each


def test_products_add_to_the_sum_in_float32() -> None:
    """On CUDA no partial sum exists: beside the result, in low precision, the sum so far."""
    one = next(s for s in parse(program(BF16)).loop if s.kind == "sum")
    size = CLASSES * FEATURES
    assert adds_straight(one, "cuda")
    assert not adds_straight(one, "cpu")
    assert of_total(one) == 4 * size
    assert while_adding(one, "cuda") == 0
    assert while_adding(one, "cpu") == (4 + 2) * size


def test_a_dry_run_names_the_results_of_an_operator() -> None:
    """What it freed inside is gone; its results are freed when the code drops them."""
    with absent("H100"), without_memory():
        args = loss_on_cuda(2048, 512, fused=False)
        outer = meter()
        outer.ignore([*args[0], *args[1]])
        made = ROWS(*args)
        outer.call(ROWS, args, {}, made)
        held = outer.current
        assert held == sum(round_up(t.untyped_storage().nbytes(), MIN_BLOCK_BYTES) for t in made)
        assert outer.peak > held
        del made
        outer.sweep()
    allocated = [event.name for event in outer.events if isinstance(event, Allocate)]
    freed = [event.name for event in outer.events if isinstance(event, Free)]
    assert outer.current == 0
    assert sorted(allocated) == sorted(freed)
    assert len(set(allocated)) == len(allocated)


def test_an_operator_that_looks_at_its_data_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with absent("H100"), without_memory():
        args = loss_on_cuda(2048, 512, fused=False)

        def looks(*_: Any, **__: Any) -> Any:
            return [float(args[0][0].sum())]

        monkeypatch.setitem(kernels.IMPLEMENTATIONS, ROWS, looks)
        assert meter().inside(ROWS, args, {}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_bytes_on_a_gpu(fused: bool) -> None:
    """Against float64, and what the allocator says against what the operator declares."""
    from fxremat.memory.measured_peak import measure_call
    from tests.loss_program import expected, inputs

    x, y, w = (t.cuda() for t in inputs(4096, BF16))
    args = ([x, y], [w.t(), w], program(BF16, "cuda"), 1024, 1024, fused)
    found = ROWS(*args)
    for one, best in zip(found, expected(x.cpu(), y.cpu(), w.cpu()), strict=True):
        assert (one.cpu().double() - best).abs().max() <= 2e-2 * best.abs().max()
    made = sum(round_up(t.nbytes, MIN_BLOCK_BYTES) for t in found)
    del found
    declared = kernels.WORKSPACES[ROWS](*args, measure=Workspaces(x.device).of_call)
    torch.cuda.empty_cache()  # a free block that is a little larger would count in full
    above = measure_call(lambda: ROWS(*args), x.device) - made
    assert 0 <= above - declared <= 20 * MIN_BLOCK_BYTES
