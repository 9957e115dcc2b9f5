"""The whole way, as a user goes it: torch.compile with our backend and a budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.backend import fxremat as backend
from tests.end_to_end import least, measured
from tests.small import Convolutions, Stack, seeded, train

EAGER: dict[str, Any] = {"executor": "aot_eager"}
RERUNS_ONLY: dict[str, Any] = {**EAGER, "variants": "none"}
"""Ops run again and nothing else, which is the same bit by bit; see test_variants for the rest."""


pytestmark = pytest.mark.usefixtures("fresh")


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options={**EAGER, **options})


def refused(call: Callable[..., Any], x: Tensor) -> Any:
    """The error of ours that compiling ends with."""
    with pytest.raises(BackendCompilerFailed) as caught:
        call(x)
    return caught.value.inner_exception


def store_all_peak(model: nn.Module, *inputs: Any) -> int:
    return fxremat.explain(model, *inputs, options=EAGER).store_all_peak_bytes


def half_way(model: nn.Module, x: Tensor, options: dict[str, Any]) -> int:
    """A budget between the least and what it takes to keep all."""
    plain = fxremat.explain(model, x, options={**options, "solver": "greedy"})
    return (plain.minimum_peak_bytes + plain.store_all_peak_bytes) // 2


@pytest.mark.parametrize("fraction", [1.0, 0.7])
def test_the_budget_is_obeyed_and_predicted_to_the_byte(fraction: float) -> None:
    model, x = seeded(Stack, 256, 32)
    budget = int(fraction * store_all_peak(model, x))
    peak = measured(model, compiled(model, memory_budget=budget), (x,))
    report = fxremat.reports()[-1]
    assert peak <= budget
    assert report.predicted_peak_bytes == peak
    assert bool(report.recomputed or report.variants) == (fraction < 1.0)


def test_a_smaller_budget_never_gives_a_larger_peak() -> None:
    model, x = seeded(lambda: Stack(2), 512, 32)
    full = store_all_peak(model, x)
    peaks = []
    for percent in range(100, 65, -10):
        torch._dynamo.reset()
        peaks.append(measured(model, compiled(model, memory_budget=full * percent // 100), (x,)))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


@pytest.mark.parametrize("make", [Stack, Convolutions, lambda: Stack(dropout=0.2)])
def test_training_is_bitwise_what_it_was(make: Callable[[], nn.Module]) -> None:
    model, x = seeded(make, *((8, 3, 32, 32) if make is Convolutions else (256, 32)))
    other = copy.deepcopy(model)
    budget = half_way(model, x, RERUNS_ONLY)
    ours = train(model, x, compiled(model, memory_budget=budget, **RERUNS_ONLY))
    assert fxremat.reports()[-1].recomputed
    theirs = train(other, x, torch.compile(other, backend="aot_eager"))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


@pytest.mark.parametrize("reserve", [0, 4000])
def test_an_impossible_budget_names_one_that_is_met(reserve: int) -> None:
    """A buffer that nothing reads is no input of the graph, but it is there: the reserve."""
    model, x = seeded(lambda: Stack(2), 1024, 32)
    if reserve:
        model.register_buffer("unread", torch.zeros(reserve // 4))
    options = {**RERUNS_ONLY, "solver": "greedy", "reserve": reserve}
    error = refused(compiled(model, memory_budget="1.1MiB", **options), x)
    assert isinstance(error, fxremat.InfeasibleBudget)
    assert error.budget_bytes == int(1.1 * 2**20)
    assert any("blocks" in what and "small.py" in what for what, _ in error.contributors)
    named = error.minimum_bytes or 0
    torch._dynamo.reset()
    peak = measured(model, compiled(model, memory_budget=named, **options), (x,))
    report = fxremat.reports()[-1]
    assert peak == report.predicted_peak_bytes <= named == report.budget_bytes


def test_a_solver_that_cannot_take_the_graph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.planner.constants.MOST_RUNS", 0)
    model, x = seeded(lambda: Stack(2), 1024, 32)
    budget = half_way(model, x, EAGER)
    call = compiled(model, memory_budget=budget, solver="checkmate", variants="none")
    error = refused(call, x)
    assert isinstance(error, fxremat.SolverRefused)
    assert "checkmate_pruned" in error.reason


@pytest.mark.parametrize(
    "executor", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_backward_may_run_twice(executor: str) -> None:
    """Also after it has run once, when the backward is compiled already."""
    model, x = seeded(lambda: Stack(2), 1024, 32)
    other = copy.deepcopy(model)
    budget = f"{int(0.9 * store_all_peak(model, x))}B"
    planned = compiled(model, memory_budget=budget, executor=executor)
    planned(x).backward()
    model.zero_grad()
    for one, call in ((model, planned), (other, other)):
        loss = call(x)
        loss.backward(retain_graph=True)
        loss.backward()
        assert all(p.grad is not None for p in one.parameters())
    ours, theirs = ([p.grad for p in one.parameters()] for one in (model, other))
    torch.testing.assert_close(ours, theirs)


def test_a_larger_size_is_planned_anew_and_a_smaller_one_is_not() -> None:
    model, _ = seeded(lambda: Stack(2), 1, 32)
    options = {**EAGER, "memory_budget": "8MiB"}
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    counts = []
    for rows in (128, 256, 160):
        assert measured(model, call, (torch.randn(rows, 32),)) <= 8 * 2**20
        counts.append(len(fxremat.reports()))
    assert counts == [1, 2, 2]


def test_without_gradients_the_model_just_runs() -> None:
    """Training compiles the same graph; the report of that, which is kept on disk, is not its."""
    model, x = seeded(Stack, 64, 32)
    compiled(model, memory_budget="8MiB")(x).backward()
    assert len(fxremat.reports()) == 1
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, memory_budget="8MiB")(x), model(x))
    assert fxremat.reports() == []


def test_one_line_is_logged_per_graph(caplog: pytest.LogCaptureFixture) -> None:
    model, x = seeded(lambda: Stack(2), 64, 32)
    with caplog.at_level(logging.INFO, logger="fxremat"):
        compiled(model, memory_budget="8MiB")(x)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("fxremat")]
    assert len(lines) == 1
    assert "nodes" in lines[0]
    assert "8.00 MiB" in lines[0]


def test_a_pass_that_is_left_out_does_nothing() -> None:
    model, x = seeded(Stack, 1024, 32)
    given: dict[str, Any] = {**RERUNS_ONLY, "solver": "greedy"}
    budget = half_way(model, x, given)
    found = fxremat.explain(model, x, memory_budget=budget, options=given)
    assert any(graph.recomputed for graph in found.graphs)
    bare = {**given, "disable_passes": ["recompute", "inplace"]}
    needed = least(model, (x,), budget, **bare)
    kept = fxremat.explain(model, x, memory_budget=needed, options=bare)
    assert not any(graph.recomputed for graph in kept.graphs)


def test_disabled_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_DISABLE", "1")
    x = torch.randn(8, requires_grad=True)
    options: dict[str, Any] = {"memory_budget": "1MiB"}
    call = torch.compile(torch.square, backend=backend, options=options)
    call(x).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert fxremat.reports() == []


class Regions(Stack):
    """A stack whose blocks are one region, of which torch would compile one code."""

    def forward(self, x: Tensor) -> Tensor:
        region: Any = torch.compiler.nested_compile_region(lambda block, x: block(x))
        for block in self.blocks:
            x = region(block, x)
        return x.square().mean()


def test_nested_regions_are_planned_with_all_that_runs() -> None:
    model, x = seeded(lambda: Regions(depth=6), 512, 32)
    budget = store_all_peak(model, x) * 7 // 10
    call = compiled(model, memory_budget=budget, variants="none")
    assert measured(model, call, (x,)) <= budget
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


def test_a_budget_on_another_device_is_an_error_that_names_it() -> None:
    """As is a wrong option. Without a budget nothing is promised there, and nothing refused."""
    x = torch.ones(3, device="meta")
    error = refused(compiled(lambda x: x * 2, memory_budgett="8GiB"), x)
    assert isinstance(error, fxremat.InvalidOption)
    assert "memory_budget" in str(error)
    error = refused(compiled(lambda x: x * 2, memory_budget="1GiB"), x)
    assert isinstance(error, fxremat.UnsupportedDevice)
    assert error.device == "meta"
    assert compiled(lambda x: x * 2)(x).shape == x.shape
