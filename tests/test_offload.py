"""Moves in the graph: same numbers, the bytes of the plan, and every wait in its place."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import fx, nn

import fxremat
from benchmarks import copying
from fxremat.compat.configuration import CUDAGRAPHS
from fxremat.compile.driver import patches_for
from fxremat.compile.request import Budget, Request
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.errors import VerificationFailed
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.options import parse_options
from fxremat.passes.memory_estimation import TANGENTS
from fxremat.passes.offload import MOVED
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.runtime.copies import host_copy
from fxremat.verify.data_flow import check_data_flow, check_waits
from tests import end_to_end, nets
from tests.examples import examples
from tests.graphs import (
    Capture,
    Steps,
    assert_plan_changes_nothing,
    batch,
    capture,
    mlp,
    moved_at_random,
)
from tests.random_nets import SIDE, peaks, random_nets
from tests.small import Stack, seeded

EAGER_NUMBER = 12  # bytes that eager torch needs for a moment to make tensors of numbers: x + 1
PLANNED = 4 * 10**9  # bytes per second that plans count on
SLOW = 2e7  # bytes per second: a copy takes longer than the op beside it


@pytest.fixture(autouse=True)
def _slow_copies() -> Iterator[None]:
    """A missing wait gives NaN; nothing is left in host memory."""
    torch._dynamo.reset()
    gc.collect()
    before = copying.host_bytes().now_bytes
    with copying.set_copy_speed(SLOW, SLOW):
        yield
    gc.collect()
    assert copying.host_bytes().now_bytes <= before
    torch._dynamo.reset()


def host_peak_of(step: Callable[[], object]) -> int:
    """Bytes of host memory that a step holds at most, beyond what was held before."""
    copying.reset_host_peak()
    before = copying.host_bytes().now_bytes
    step()
    return copying.host_bytes().peak_bytes - before


def saved_values_away(problem: Problem) -> Steps:
    """What the forward saves for the backward goes to the host, and comes back once."""
    half = problem.base_steps().index(TANGENTS)
    made = {v for op in problem.ops[:half] for v in op.writes} - {*problem.outputs}
    there: set[str] = set()
    items: list[Item] = []
    for index, op in enumerate(problem.ops):
        if index > half:
            items += [Fetch(v) for v in op.reads if v in made - there and problem.bytes_of[v]]
            there |= {*op.reads}
        items.append(op.name)
    return place(problem, items, None).steps


def test_the_graph(golden: Any) -> None:
    """Copies to the host in the forward, back in the backward; the forward saves host tensors."""
    seen = capture(mlp(8, 2), [batch(4, 8)], saved_values_away)
    lines = seen.rewritten.module.code.splitlines()
    golden("\n".join(line.strip() for line in lines if "_moved" in line))


@pytest.mark.parametrize("name", nets.NAMES)
def test_nothing_changes(name: str) -> None:
    """Random ops, buffers that change, tied weights, views as tuples, user checkpoints, ..."""
    model, inputs = nets.make(name)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        reference = nets.REFERENCE.get(name)
        assert_plan_changes_nothing(model, inputs, saved_values_away, reference=reference)


@examples(12)
@hypothesis.given(
    net=random_nets(),
    seed=hypothesis.strategies.integers(0, 1000),
    fused=hypothesis.strategies.booleans(),
)
def test_random_nets_are_the_same_under_random_moves(net: Any, seed: int, fused: bool) -> None:
    assert_plan_changes_nothing(net, [batch(SIDE, SIDE)], moved_at_random(seed), fused=fused)


@examples(10)
@hypothesis.given(net=random_nets(), seed=hypothesis.strategies.integers(0, 1000))
def test_the_replayed_peak_is_the_measured_one(net: Any, seed: int) -> None:
    measured, replayed = peaks(net, [batch(SIDE, SIDE)], moved_at_random(seed))
    assert measured - replayed in (0, EAGER_NUMBER)


# --- the verifier -------------------------------------------------------------------------


def rewritten() -> tuple[Capture, fx.Graph]:
    seen = capture(mlp(8, 2), [batch(4, 8)], saved_values_away)
    return seen, copy.deepcopy(seen.rewritten.module.graph)


def the_moves(graph: fx.Graph, kind: str) -> list[fx.Node]:
    return [node for node in graph.nodes if MOVED in node.name and kind in str(node.target)]


@pytest.mark.parametrize(
    ("kind", "which", "said"),
    [("wait_device", 0, "transfers"), ("wait_host", -1, "never waited for")],
    ids=["before it is read", "of what nobody reads: its source may change meanwhile"],
)
def test_a_missing_wait_is_found(kind: str, which: int, said: str) -> None:
    _, graph = rewritten()
    graph.erase_node(the_moves(graph, kind)[which])
    with pytest.raises(VerificationFailed, match=said):
        check_waits(graph)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_late_wait_is_found(through_a_view: bool) -> None:
    """To make a view reads nothing; to read it does."""
    _, graph = rewritten()
    wait = the_moves(graph, "wait_device")[0]
    moved: Any = wait.args[0]
    reader = next(n for n in moved.users if n is not wait)
    if through_a_view:
        with graph.inserting_after(moved):
            view = graph.call_function(torch.ops.aten.view.default, (moved, [-1]))
        reader.replace_input_with(moved, view)
    check_waits(graph)
    reader.append(wait)
    with pytest.raises(VerificationFailed, match=f"{reader.name} reads {moved.name} before"):
        check_waits(graph)


def test_the_wrong_value_from_the_host_is_found() -> None:
    seen, graph = rewritten()
    first, second = the_moves(graph, "to_device")[:2]
    first.args, second.args = second.args, first.args
    if first.args[0].meta["val"].shape != second.args[0].meta["val"].shape:  # type: ignore[union-attr]
        pytest.fail("choose a model whose saved values have one shape")
    with pytest.raises(VerificationFailed, match="data flow"):
        check_data_flow(seen.joint.module.graph, graph, ())


# --- the whole way ------------------------------------------------------------------------


class Step:
    """A model compiled with a budget, and its training step."""

    def __init__(self, model: nn.Module, x: torch.Tensor, **options: Any) -> None:
        self.model, self.x = copy.deepcopy(model), x
        self.run_model = torch.compile(self.model, backend="fxremat", options=options)

    def __call__(self) -> None:
        end_to_end.step(self.model, self.run_model, (self.x,))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def offloading(model: nn.Module, x: Any, fraction: float, executor: str, **options: Any) -> Step:
    """A step that can move values but not take other forms, which would do without moves."""
    explained = fxremat.explain(model, x, options={"executor": executor, "variants": "none"})
    return Step(
        model, x, executor=executor, offload=True, host_bandwidth=PLANNED, solver="greedy",
        memory_budget=f"{int(fraction * explained.store_all_peak_bytes)}B", variants="none",
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_a_budget_with_offload_is_obeyed_and_predicted_to_the_byte(executor: str) -> None:
    """The backward may run twice."""
    model, x = seeded(lambda: Stack(2), 512, 32)
    step = offloading(model, x, 0.6, executor)
    plain = copy.deepcopy(model)
    plain(x).backward()
    step()
    found, expected = (_gradients(one) for one in (step.model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    report = fxremat.reports()[-1]
    peak = end_to_end.measured(step.model, step.run_model, (x,))
    assert report.moved
    assert peak == report.predicted_peak_bytes
    assert report.budget_bytes is not None
    assert peak <= report.budget_bytes
    assert host_peak_of(step) == report.memory.host_peak_bytes
    assert "moved to host memory" in str(report)
    replayed = replay(report.problem, report.plan.steps)
    assert replayed.host_peak_bytes == report.memory.host_peak_bytes
    step.model.zero_grad()
    loss = step.run_model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(
        _gradients(step.model), [2 * one for one in expected], rtol=1e-4, atol=1e-6
    )


def test_the_host_memory_budget_is_obeyed() -> None:
    model, x = seeded(lambda: Stack(2), 512, 32)
    step = offloading(model, x, 0.8, "aot_eager", host_memory_budget="100kB")
    assert host_peak_of(step) <= 100_000


@pytest.mark.parametrize("what", ["activations", "weights", "a budget", "the CPU"])
def test_cudagraphs_are_off_with_a_message(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU without one: Inductor would put loops in another order for them all the same."""
    asked = 1 << 30 if what in ("a budget", "the CPU") else None
    given = {"offload": what == "activations", "memory_budget": asked}
    options = parse_options(given, device_total_bytes=None)
    x = torch.zeros(4)
    inputs = [host_copy(x, x.device) if what == "weights" else x]
    allocator = AllocatorSettings() if what == "a budget" else None
    request = Request(Budget(asked, allocator=allocator))
    with caplog.at_level(logging.WARNING):
        patches = patches_for(options, request, "reduce-overhead", inputs)
    assert patches[CUDAGRAPHS] is False
    assert ("cudagraphs are off" in caplog.text) == (what != "the CPU")
