"""Ordering through Inductor: what is fixed, and that the pass is good for Inductor's cache."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import fxremat
from fxremat.compat.configuration import SCHEDULER_PASS
from fxremat.compat.inductor.scheduling import (
    Footprint,
    Scheduled,
    in_waiting_order,
    run_after,
    run_in_functions,
    scheduled,
)
from fxremat.passes import fixed_order
from fxremat.passes.halves import RECOMPUTED
from fxremat.passes.recompute import apply_plan
from tests import nets
from tests.compat_graphs import forward_code
from tests.graphs import Capture, Net, batch, capture, everything_again, mlp
from tests.single_calls import ATEN, X


def recomputing() -> Capture:
    """An MLP, as Inductor sees it, with everything run again."""
    return capture(mlp(8, 3), [batch(4, 8)], everything_again, fused=True)


def marked(graph: fx.Graph) -> list[str]:
    """The results that Inductor is made to write."""
    marks = [n for n in graph.nodes if n.target is torch.ops.fxremat.written.default]
    return [n.args[0].name for n in marks]


def constrained(seen: Capture) -> fx.Graph:
    """The backward of a traced net, constrained."""
    fixed_order.WriteResults("1")(seen.backward.graph)
    return seen.backward.graph


# --- results that are written -------------------------------------------------------------


def test_planned_results_of_loops_are_written() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    rows = [
        ("sin_written", ATEN.sin.default, (x,)),
        ("sin_plain", ATEN.sin.default, (x,)),
        ("sin_recompute", ATEN.sin.default, (x,)),
        ("sin_recompute_written", ATEN.sin.default, (x,)),
        ("mm_recompute_written", ATEN.mm.default, (x, x)),  # writes its result anyway
        ("t_recompute_written", ATEN.t.default, (x,)),  # a view
    ]
    for name, target, args in rows:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = X
    assert [n.name for n in fixed_order.results_to_write(graph)] == [
        "sin_written",
        "sin_recompute_written",
    ]


def test_what_a_convolution_reads_through_a_view_is_written_in_a_marked_graph() -> None:
    """It would be written in any case, but not as the image that the convolution wants."""
    for name in ("sin_free", "sin"):
        graph = fx.Graph()
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        sin = graph.create_node("call_function", ATEN.sin.default, (x,), name=name)
        sin.meta["val"] = torch.ones(2, 2, 2, 16)
        image = graph.call_function(ATEN.reshape.default, (sin, [2, 4, 4, 4]))
        arguments = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        graph.call_function(ATEN.convolution.default, arguments)
        assert fixed_order.results_to_write(graph) == ([sin] if name == "sin_free" else [])
        graph.call_function(ATEN.cos.default, (sin,))
        assert fixed_order.results_to_write(graph) == []


def test_a_graph_whose_order_is_not_fixed_is_left_alone() -> None:
    seen = recomputing()
    graph = apply_plan(seen.found, seen.steps, fixed=()).module.graph
    before = str(graph)
    fixed_order.WriteResults("1")(graph)
    assert str(graph) == before


@pytest.mark.parametrize("again", [True, False])
def test_readers_read_through_the_mark(again: bool) -> None:
    """The order is fixed where nothing runs again, too: loops would be in one function there."""
    seen = recomputing() if again else capture(mlp(8, 3), [batch(4, 8)], fused=True)
    graph = constrained(seen)
    names = marked(graph)
    assert names
    assert any(RECOMPUTED in name for name in names) == again
    nodes = {n.name: n for n in graph.nodes}
    for name in names:
        (only,) = nodes[name].users
        assert only.target is torch.ops.fxremat.written.default
        assert only.users
        assert only.meta["val"].shape == nodes[name].meta["val"].shape


def test_constraints_follow_from_the_graph_alone() -> None:
    """Equal text gives equal constraints: Inductor's cache knows the text only."""
    one, other = recomputing(), recomputing()
    assert str(one.backward.graph) == str(other.backward.graph)
    assert str(constrained(one)) == str(constrained(other))


@pytest.mark.parametrize("name", ["mlp", "dropout", "attention", "several results", "pieces"])
def test_the_pass_adds_to_the_graph_and_takes_nothing_away(name: str) -> None:
    seen = capture(*nets.make(name), everything_again, fused=True)
    before = [n.name for n in seen.backward.graph.nodes]
    graph = constrained(seen)
    graph.lint()  # every node stands behind what it reads: there are no cycles
    after = [n.name for n in graph.nodes]
    assert [name for name in after if name in set(before)] == before


# --- fences -------------------------------------------------------------------------------

CALL = Scheduled(is_call=True, is_loop=False, read=100, written=100)
LOOP = Scheduled(is_call=False, is_loop=True, read=100, written=100)
SUM = Scheduled(is_call=False, is_loop=True, read=100, written=4)
NONE = Scheduled(is_call=False, is_loop=False, read=0, written=0)


FIXED = replace(LOOP, names=frozenset(["gelu_written", "mul"]))
FREE_LOOP = replace(LOOP, names=frozenset(["gelu_free"]))


def copying(read: str, written: str) -> Scheduled:
    return replace(LOOP, is_copy=True, reads=frozenset([read]), writes=frozenset([written]))


COPY = copying("x", "y")


@pytest.mark.parametrize(
    ("kernels", "after"),
    [
        ([LOOP, CALL, LOOP, LOOP, CALL], {1: [0], 2: [1], 3: [1], 4: [1, 2, 3]}),
        ([CALL, SUM, CALL], {2: [0, 1]}),  # a small result may be there early, but not late
        ([CALL, NONE, CALL], {2: [0]}),  # what does no work waits for nothing
        ([LOOP, LOOP], {}),
        ([], {}),
        ([FREE_LOOP, CALL, FREE_LOOP, CALL, FREE_LOOP], {3: [1]}),
        (  # loops move where no order is fixed, but not into a fixed stretch
            [FREE_LOOP, CALL, FREE_LOOP, CALL, FIXED, CALL, FREE_LOOP, CALL, FREE_LOOP],
            {3: [1, 0, 2], 4: [3], 5: [3, 4], 6: [5], 7: [5], 8: [5]},
        ),
        # a copy for a call waits for the other loops, but two do not wait for each other
        ([CALL, COPY, LOOP, CALL], {1: [0, 2], 2: [0], 3: [0, 1, 2]}),
        ([COPY, copying("a", "b"), LOOP, CALL], {0: [2], 1: [2], 3: [0, 1, 2]}),
        ([COPY, LOOP, COPY], {}),  # no call reads it
    ],
)
def test_what_kernels_wait_for(kernels: list[Scheduled], after: dict[int, list[int]]) -> None:
    assert fixed_order.fences(kernels) == after


@pytest.mark.parametrize(
    "other",
    [
        replace(LOOP, writes=frozenset(["x"])),  # fused, x need not be there
        replace(LOOP, reads=frozenset(["y"])),
        replace(NONE, reads=frozenset(["y"])),
    ],
)
def test_a_copy_is_not_parted_from_the_loop_that_makes_or_reads_it(other: Scheduled) -> None:
    assert fixed_order.fences([other, COPY, LOOP, CALL]).get(1) is None
    assert fixed_order.fences([COPY, LOOP, other, CALL]).get(0) is None


@given(st.lists(st.sampled_from([CALL, LOOP, SUM, NONE, COPY, copying("y", "z")]), max_size=12))
def test_what_waits_can_be_put_in_order(kernels: list[Scheduled]) -> None:
    """Nothing waits for itself, and calls stay where they are among the loops."""
    after = fixed_order.fences(kernels)
    order = in_waiting_order(len(kernels), after)
    place = {position: index for index, position in enumerate(order)}
    assert sorted(order) == list(range(len(kernels)))
    for later, several in after.items():
        assert all(place[earlier] < place[later] for earlier in several)
    for position, kernel in enumerate(kernels):
        if kernel.is_call:
            assert place[position] == position
        if kernel is LOOP or kernel is SUM:
            assert place[position] <= position


# --- functions ----------------------------------------------------------------------------


def most_at_once(loops: list[Footprint], ends: set[int]) -> int:
    """Bytes there at most, beside what is there before, if functions end behind ``ends``."""
    live, most, begin = 0, 0, 0
    for place in range(len(loops)):
        if place in ends or place == len(loops) - 1:
            function = loops[begin : place + 1]
            most = max(most, live + sum(loop.allocated for loop in function))
            live += sum(loop.allocated - loop.freed for loop in function)
            begin = place + 1
    return most


@given(st.lists(st.builds(Footprint, st.integers(0, 200), st.integers(0, 200)), max_size=10))
def test_functions_take_no_more_than_the_largest_loop(loops: list[Footprint]) -> None:
    ends = fixed_order.last_of_functions(loops)
    alone = most_at_once(loops, set(range(len(loops))))
    assert most_at_once(loops, ends) <= alone
    for one in ends:  # and none could go on
        assert most_at_once(loops, {end for end in ends if end <= one} - {one}) > alone or (
            most_at_once(loops[: one + 2], {end for end in ends if end < one}) > alone
        )


class Always(fixed_order.Fence):
    def hold(self, nodes: list[Any]) -> list[Any]:
        run_in_functions(nodes, lambda loops: set(range(len(loops))))
        return run_after(nodes, fixed_order.fences([scheduled(node) for node in nodes]))


def test_loops_on_either_side_of_a_call_are_not_fused() -> None:
    """A loop, a matrix product, and another loop over what the first one reads."""
    late = Net(lambda net, x: (x.exp() @ net.w, x.sin()), w=nn.Parameter(torch.ones(64, 64)))
    together = forward_code(late, batch(32, 64))
    apart = forward_code(late, batch(32, 64), **{SCHEDULER_PASS: Always("1")})
    assert together.count("async_compile.cpp_pybinding(") == 1
    assert apart.count("async_compile.cpp_pybinding(") == 2


def test_a_copy_into_another_layout_is_the_last_loop_before_its_call() -> None:
    """Its memory is not there while the other loop runs; in one function both results would be."""
    x, convolution = torch.randn(2, 3, 32, 32), nn.Conv2d(3, 16, 3, padding=1)
    net = Net(lambda net, x: (x.exp(), net.convolution(x)), convolution=convolution)
    together = forward_code(net, x)
    apart = forward_code(net, x, **{SCHEDULER_PASS: Always("1")})
    assert "cpp_fused_convolution_exp" in together
    copy = "empty_strided_cpu((2, 3, 32, 32), (3072, 1, 96, 3)"
    places = [
        apart.index(text, apart.index("def call"))
        for text in ("cpp_fused_exp", copy, "cpp_fused_convolution", "extern_kernels.convolution")
    ]
    assert places == sorted(places)


# --- the user's passes, and Inductor's cache ----------------------------------------------


class Named:
    """A pass of the user's with a name for the cache."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, graph: fx.Graph) -> None:
        """Does nothing."""

    def uuid(self) -> Any:
        return self.name


@pytest.mark.parametrize("kind", [fixed_order.WriteResults, fixed_order.Fence])
def test_the_cache_knows_the_version_and_the_users_pass(kind: Any) -> None:
    assert kind("1").uuid() == kind("1").uuid()
    assert kind("1").uuid() != kind("2").uuid()
    assert kind("1", (Named("a"),)).uuid() != kind("1", (Named("b"),)).uuid()
    assert kind("1", (Named("a"),)).uuid() != kind("1").uuid()
    assert kind("1", (Named(None),)).uuid() is None  # nothing is kept then
    assert pickle.loads(pickle.dumps(kind("1"))) == kind("1")


@pytest.mark.parametrize("percent", [60, 75])
def test_masked_gates_take_what_was_planned(percent: int) -> None:
    """What masks a concatenation is no part of the function that writes it, whose reads go first.

    Where the order is held is chosen by what functions take that it does not divide.
    """

    def forward(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for up, down in zip(net.up, net.down, strict=True):
            gate, value = up(x).masked_fill(mask, 0.0).chunk(2, -1)
            x = x + down(nn.functional.silu(gate) * value)
        return x.square().mean()

    up = nn.ModuleList(nn.Linear(64, 512, bias=False) for _ in range(4))
    down = nn.ModuleList(nn.Linear(256, 64, bias=False) for _ in range(4))
    net, inputs = Net(forward, up=up, down=down), (batch(512, 64), batch(512, 1) > 0.9)
    options: dict[str, Any] = {"variants": ()}
    (whole,) = fxremat.explain(net, *inputs, options=options).graphs
    budget = whole.store_all_peak_bytes * percent // 100
    (found,) = fxremat.explain(net, *inputs, memory_budget=budget, options=options).graphs
    assert found.planned_peak_bytes == found.predicted_peak_bytes
    assert found.provenance.dry_runs == 1
