"""The code that Inductor would run, on tensors without memory: counted, named, obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.tensors import without_memory
from fxremat.compile.dry_run.dry_run import AllocatorEvents, DryRun, dry_run
from fxremat.compile.dry_run.meter import CodeMeter, Workspace
from fxremat.core.events import Allocate, Free
from fxremat.core.timeline import Lifetime
from tests.compat_graphs import half
from tests.small import Stack, seeded

pytestmark = pytest.mark.usefixtures("fresh")


# --- generated code on tensors without memory ----------------------------------------------------

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
        results = meter.run(generated, "<test>", [x], made)
    return meter, results


def test_bytes_after_each_allocation() -> None:
    meter, results = counted(CHAIN)
    levels = list(dict.fromkeys(meter.live_bytes))
    # buf0 in buf1's memory; buf2; buf1 gone, the values of the sort; its indices
    assert levels == [100, 130, 30 + 30, 60 + 8 * 30]
    assert meter.peak == 300
    assert meter.current == 30  # a view of the sorted values alone
    assert len(results) == 1


def test_the_peak_is_named_after_what_its_memory_holds_then() -> None:
    meter, _ = counted(CHAIN.replace("(30, )", "(10, )"))
    assert meter.peak == 110
    assert sorted(meter.at_peak) == [("gelu", 100), ("sum_1", 10)]


def test_scratch_memory_of_a_library_call_is_on_top_of_its_results() -> None:
    asked: list[str] = []

    def workspace(op: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        asked.append(str(op))
        return (600, 400) if op is torch.ops.aten.sort.default else ()

    meter, _ = counted(CHAIN, workspace)
    assert meter.peak == 1300
    assert meter.scratch == {"sort": 1000}
    assert "aten.empty_strided.default" in asked


def bytes_at(lifetimes: Iterable[Lifetime], points: int) -> list[int]:
    """What is live at each of so many points."""
    shown = list(lifetimes)
    return [sum(x.nbytes for x in shown if x.start <= k < x.stop) for k in range(points)]


# --- a dry run ------------------------------------------------------------------------------------


def test_lifetimes_add_up_to_what_is_live() -> None:
    """The scratch memory of the sort among them; what is freed in between is not."""

    def workspace(op: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        return (600, 400) if op is torch.ops.aten.sort.default else ()

    meter, _ = counted(CHAIN, workspace)
    shown = [*meter.lifetimes, *map(meter.lifetime, meter.live.values())]
    assert bytes_at(shown, len(meter.live_bytes)) == meter.live_bytes
    assert [one.nbytes for one in shown if one.workspace] == [1000]
    assert {one.value for one in shown} == {"mul", "sum_1", "sort"}


class Two(nn.Module):
    """Two products of matrices that are all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second


def test_what_the_caller_holds_is_there_to_the_end() -> None:
    """Inputs, the result, and the incoming gradient, which the last product does not need.

    Beside them the last product has its operand, its result and the other gradient.
    """
    found: list[DryRun] = []

    def step(forward: Any, backward: Any) -> None:
        asked: dict[str, Any] = {"num_fwd_outputs": 1, "device": "cpu", "workspace": lambda *_: ()}
        found.append(dry_run(forward, backward, **asked))

    half(Two(), step, torch.ones(64, 64))
    (shown,) = found
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
    assert report.dry_runs >= 1
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


def test_code_that_cannot_run_without_data_is_planned_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no fake kernel\nand a long explanation")

    monkeypatch.setattr("fxremat.compile.dry_run.dry_run.dry_run", refuse)
    model, x = seeded(Stack, 512, 32)
    budget = int(0.8 * fxremat.explain(model, x).store_all_peak_bytes)
    report = fxremat.explain(model, x, memory_budget=budget).graphs[0]
    assert report.predicted_peak_bytes == report.planned_peak_bytes <= budget
    assert "could not run without data (NotImplementedError: no fake kernel)" in caplog.text
    assert report.order == "planned"  # the plan is all there is: Inductor has to keep to it
