"""The rewriting of a plan, and the contracts of passes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import fxremat
from fxremat import VerificationFailed, runtime
from fxremat.core.problem import Problem
from fxremat.core.schedule import store_all as base_steps
from fxremat.cost import second_runs
from fxremat.passes.accumulation import Accumulation
from fxremat.passes.base import Changed, Pass
from fxremat.passes.gradient_sums import GradientSums
from fxremat.passes.halves import INLINED, RECOMPUTED
from fxremat.passes.inplace import WriteInPlace
from fxremat.passes.memory_estimation import TANGENTS
from fxremat.passes.offload import AddBeforePutting
from fxremat.passes.recompute import ApplyPlan
from fxremat.passes.user_tags import ObeyMustRecompute, ProtectMutatedInputs
from fxremat.passes.variants.chunks.inductor_kernels import CompileRows, LayOutRows
from fxremat.runtime.chunks.operator import ROWS
from fxremat.training import host_weights  # noqa: F401  (defines fetch and put)
from tests import nets
from tests.conftest import Golden
from tests.examples import examples
from tests.graphs import (
    Capture,
    Choose,
    Net,
    Steps,
    again_after_tangents,
    assert_plan_changes_nothing,
    at_random,
    batch,
    calls,
    capture,
    compiled,
    everything_again,
    linear,
    mlp,
    store_all,
)
from tests.random_nets import SIDE, peaks, random_nets
from tests.slowness import slow_but

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _few_threads_and_dynamic_outputs() -> Any:
    """Data-dependent sizes are captured, so that no test breaks its graph."""
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        yield


def test_code_of_a_small_plan(golden: Golden) -> None:
    seen = capture(mlp(), [batch(4, 8)], again_after_tangents("addmm", "gelu"))
    golden(seen.rewritten.module.code.strip())


def recomputed(seen: Capture) -> list[str]:
    """The names of what runs again."""
    return [n.name for n in seen.rewritten.module.graph.nodes if RECOMPUTED in n.name]


def saved(seen: Capture) -> list[str]:
    """Names of what the forward saves, inputs of the graph aside."""
    return [n.name for n in seen.rewritten.saved if n.op != "placeholder"]


def test_a_result_is_the_first_copy() -> None:
    """An op runs again before the forward ends; the caller gets what it made first."""

    def top_rows(net: Any, x: torch.Tensor) -> Any:
        top, where = net.linear(x).topk(3, 1)
        return top, where.float() * top.sin()

    def twice(problem: Problem) -> Steps:
        steps = problem.base_steps()
        end = steps.index(TANGENTS)
        return (*steps[:end], "topk", *steps[end:])

    for again in (twice, again_after_tangents("topk")):
        net = Net(top_rows, linear=linear())
        seen = assert_plan_changes_nothing(net, [batch(4, 8)], again)
        assert f"topk{RECOMPUTED}" in recomputed(seen)
        results = seen.rewritten.module.graph.output_node().all_input_nodes
        if again is twice:
            assert not [node.name for node in results if RECOMPUTED in node.name]


NOTHING_TO_REPEAT = ("buffer", "input overwritten", "odd results, input gradient")


def two_readers(m: Any, x: torch.Tensor) -> Any:
    turned = m.linear(x).t()
    return m.first(turned).square().sum() + m.second(turned).square().sum()


def test_equal_views_in_the_backward_are_one() -> None:
    """Each op of the backward has its own copies of what it borrows, but one view for all."""

    parts = {"linear": nn.Identity(), "first": nn.Linear(8, 4), "second": nn.Linear(8, 4)}
    net = Net(two_readers, **parts)
    seen = capture(net, [batch(8, 4).requires_grad_()], everything_again)
    views = [n for n in seen.rewritten.module.graph.nodes if n.target is ATEN.t.default]
    looked_at = [tuple(n.all_input_nodes) for n in views if INLINED in n.name]
    assert looked_at
    assert len(set(looked_at)) == len(looked_at)


def test_a_view_in_the_backward_is_of_the_latest_copy() -> None:
    """One of an older copy would keep that in memory."""

    net = Net(two_readers, linear=linear(), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    seen = capture(net, [batch(4, 8)], everything_again)
    nodes = list(seen.rewritten.module.graph.nodes)
    copies = [n for n in nodes if re.fullmatch(rf"addmm{RECOMPUTED}(_\d+)?", n.name)]
    views = [n for n in nodes if set(n.all_input_nodes) & {*copies} and INLINED in n.name]
    assert len({n.all_input_nodes[0] for n in views}) > 1
    for view in views:
        first = min(map(nodes.index, view.users))
        assert view.all_input_nodes == [[n for n in copies if nodes.index(n) < first][-1]]


# --- what changes nothing -----------------------------------------------------------------


@pytest.mark.parametrize("name", nets.NAMES)
def test_every_net_is_the_same_with_everything_run_again(name: str) -> None:
    model, inputs = nets.make(name)
    seen = assert_plan_changes_nothing(model, inputs, reference=nets.REFERENCE.get(name))
    assert recomputed(seen) or name in NOTHING_TO_REPEAT


@pytest.mark.parametrize(
    "name",
    ["dropout", "batch norm", "old buffer", "input overwritten", "tied", "save nothing", "count",
     *slow_but((), ["random", "buffer", "pieces", "several results", "checkpoint dropout",
                    "save addmms", "attention dropout"])],
)  # fmt: skip
def test_nets_are_the_same_in_inductors_graph(name: str) -> None:
    model, inputs = nets.make(name)
    assert_plan_changes_nothing(model, inputs, fused=True)


def two_runs(seen: Capture, target: Any) -> int:
    """Calls of ``target`` in forward and backward together."""
    return sum(len(calls(g.graph, target)) for g in (seen.forward, seen.backward))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("dropout", ATEN.native_dropout),
        ("random", ATEN.rand_like),
        ("random", ATEN.bernoulli),
        ("random", ATEN.randn),
        ("attention dropout", ATEN.native_dropout),
        ("custom op", torch.ops.fxremat_tests.triple),
        ("batch norm", ATEN.copy_),
    ],
)
def test_what_runs_once_is_never_copied(
    name: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_runs, "is_a_rank", lambda: True)  # custom ops are not tried
    model, inputs = nets.make(name)
    seen = capture(model, inputs, everything_again)
    assert len(seen.calls(target)) > 0
    assert two_runs(seen, target) == len(seen.calls(target))


def test_inductors_random_numbers_come_from_the_saved_seed() -> None:
    model, inputs = nets.make("dropout")
    seen = capture(model, inputs, everything_again, fused=True)
    seeds = seen.calls(torch.ops.prims.inductor_seeds)
    assert len(seeds) == 1
    assert two_runs(seen, torch.ops.prims.inductor_seeds) == 1
    random = [n for n in seen.rewritten.module.graph.nodes if "inductor_random" in n.name]
    assert len(random) > len(seen.calls(torch.ops.prims.inductor_random))
    assert seeds[0].name in [n.name for n in seen.rewritten.saved]


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
def test_eager_random_numbers_are_drawn_once(fused: bool) -> None:
    """torch would draw again, in the backward, what it can draw from a saved input."""
    model = Net(lambda n, x: n.linear(x) * nn.functional.dropout(x), linear=linear())
    with torch._inductor.config.patch(fallback_random=True):
        seen = assert_plan_changes_nothing(model, [batch(4, 8)], fused=fused)
    assert two_runs(seen, ATEN.native_dropout) == 1


def test_numbers_of_elements_are_computed_where_they_are_needed() -> None:
    """BatchNorm's backward divides by one, which is a product of sizes; it may run anywhere."""
    x = batch(20, 3, 8, 8)
    torch._dynamo.mark_dynamic(x, 0, min=17, max=31)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    options: dict[str, Any] = {"executor": "aot_eager"}
    budget = fxremat.explain(model, x, options=options).store_all_peak_bytes * 9 // 10
    explained = fxremat.explain(model, x, options={**options, "memory_budget": f"{budget}B"})
    assert explained.predicted_peak_bytes <= budget
    assert explained.graphs[0].plan.repeats()


@pytest.mark.parametrize("bounded", [True, False], ids=["bound", "no bound"])
def test_dynamic_shapes(bounded: bool) -> None:
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, **({"min": 2, "max": 64} if bounded else {}))
    model = nn.Sequential(linear(), nn.GELU(), linear(), nn.LayerNorm(8))
    seen = Capture(everything_again)
    run = compiled(model, seen)
    reference = copy.deepcopy(model)
    for rows in (6, 9):
        given = x if rows == 6 else batch(rows, 8)
        model.zero_grad()
        reference.zero_grad()
        run(given).square().sum().backward()
        reference(given).square().sum().backward()
        found, expected = ([p.grad for p in one.parameters()] for one in (model, reference))
        torch.testing.assert_close(found, expected)
    if bounded:
        assert seen.problem.bytes_of["addmm"] == 64 * 8 * 4
    assert recomputed(seen)


def test_a_number_read_from_a_tensor() -> None:
    def scale(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.linear(x)
        n = x.gt(0).sum().item()
        torch._check(n > 0)  # type: ignore[no-untyped-call]
        result: torch.Tensor = y.tanh() * n + torch.ones(int(n)).sum()
        return result

    seen = assert_plan_changes_nothing(Net(scale, linear=linear()), [batch(4, 8)])
    assert two_runs(seen, ATEN._local_scalar_dense) == len(seen.calls(ATEN._local_scalar_dense))


# --- properties ---------------------------------------------------------------------------


@examples(12)
@hypothesis.given(net=random_nets(), seed=st.integers(0, 1000), fused=st.booleans())
def test_random_nets_are_the_same_under_random_plans(net: Net, seed: int, fused: bool) -> None:
    assert_plan_changes_nothing(net, [batch(SIDE, SIDE)], at_random(seed), fused=fused)


EXACT = ("mlp", "frozen", "pieces", "custom op", "attention", "gru", "checkpoint",
         "save nothing", "input gradient", "input overwritten", "integers")  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_replayed_peak_is_the_measured_one(name: str) -> None:
    model, inputs = nets.make(name)
    measured, replayed = peaks(model, inputs, everything_again)
    assert measured == replayed


@pytest.mark.parametrize("choose", [store_all, everything_again], ids=["store_all", "again"])
def test_with_workspaces_the_peak_of_library_calls_is_covered(choose: Choose) -> None:
    """A call's scratch memory may overlap its results in time, or not: never too little."""
    model, inputs = nets.make("batch norm")
    measured, replayed = peaks(model, inputs, choose, workspaces=True)
    assert measured <= replayed <= 1.1 * measured


@examples(10)
@hypothesis.given(net=random_nets(), seed=st.integers(0, 1000))
def test_the_replayed_peak_of_random_nets_is_the_measured_one(net: Net, seed: int) -> None:
    measured, replayed = peaks(net, [batch(SIDE, SIDE)], at_random(seed))
    assert measured == replayed


# --- base ---------------------------------------------------------------------------------


class Small:
    """A joint graph: ``y = sin(x)`` in the forward, ``g = y * t`` in the backward."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.t = self.graph.placeholder("primals_1"), self.graph.placeholder("tangents_1")
        self.x.meta["val"] = self.t.meta["val"] = torch.zeros(4, 4)
        self.y = self.call(ATEN.sin.default, self.x)
        self.g = self.call(ATEN.mul.Tensor, self.y, self.t)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call whose result has the one shape of this graph."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.zeros(4, 4)
        return node

    def module(self, *results: fx.Node) -> fx.GraphModule:
        """The graph, which returns these."""
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def refused(one: Pass, module: fx.GraphModule, part: str) -> None:
    """Fail unless the pass refuses the graph, and names itself."""
    with pytest.raises(VerificationFailed, match=f"pass {one.name}"):
        getattr(one, part)(module)


def test_calling_a_pass_checks_its_contract_too() -> None:
    changed = GradientSums()(Small().module())
    assert isinstance(changed, Changed)
    assert (changed.modified, changed.data) == (False, None)


def test_sums_are_joined_before_gradients_are_given_up_and_say_what_they_give() -> None:
    small = Small()
    small.graph.call_function(runtime.accumulated, (small.g, small.x, []))
    refused(GradientSums(), small.module(small.y, small.g), "requires")
    small = Small()
    del small.g.meta["val"]
    refused(GradientSums(), small.module(small.y, small.g), "ensures")


def must_recompute(small: Small) -> fx.Node:
    small.y.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return small.g


def overwritten_input(small: Small) -> fx.Node:
    late = small.call(ATEN.mul.Tensor, small.g, small.x)
    small.call(ATEN.copy_.default, small.x, small.y)
    return late


def sum_of_what_left(small: Small) -> fx.Node:
    parts = [small.call(torch.ops.fxremat.put.default, small.g) for _ in range(2)]
    return small.call(ATEN.add.Tensor, *parts)


@pytest.mark.parametrize(
    ("one", "spoil"),
    [
        (ObeyMustRecompute(1), must_recompute),
        (ProtectMutatedInputs(1), overwritten_input),
        (AddBeforePutting(), sum_of_what_left),
    ],
    ids=lambda given: getattr(given, "__name__", None) or given.name,
)
def test_a_graph_is_refused_until_the_pass_has_run(
    one: Pass, spoil: Callable[[Small], fx.Node]
) -> None:
    small = Small()
    module = small.module(small.y, spoil(small))
    refused(one, module, "ensures")
    assert one.call(module).modified
    one.ensures(module)
    assert not one.call(module).modified


def test_a_gradient_is_given_up_once_and_only_if_asked_for() -> None:
    joint = capture(mlp(), (batch(2, 8),)).joint
    module, outputs = joint.module, joint.num_forward_outputs
    one = Accumulation(outputs, frozenset(range(len(joint.primals))))
    one.requires(module)
    changed = one.call(module)
    assert changed.modified
    assert changed.data.module is module
    one.ensures(module)
    refused(one, module, "requires")
    refused(Accumulation(outputs), module, "ensures")


def test_a_plan_is_for_the_graph_that_was_estimated() -> None:
    found = capture(mlp(), (batch(2, 8),)).found
    joint = found.joint
    one = ApplyPlan(found, base_steps(found.problem))
    one.requires(joint.module)
    changed = one.call(joint.module)
    one.ensures(changed.graph_module)
    refused(one, changed.graph_module, "requires")
    refused(one, Small().module(), "ensures")
    refused(ApplyPlan(found, ()), joint.module, "requires")
    written = WriteInPlace(changed.data, joint.num_forward_outputs)
    written.requires(changed.graph_module)
    written.ensures(written.call(changed.graph_module).graph_module)
    refused(written, joint.module, "requires")


def test_no_input_of_the_graph_is_written_over() -> None:
    found = capture(mlp(), (batch(2, 8),)).rewritten
    small = Small()
    small.call(ATEN.index_put_.default, small.x, [small.y], small.y)._rename("it_into")
    refused(WriteInPlace(found, 1), small.module(small.y, small.g), "ensures")


def test_rows_are_laid_out_before_they_are_compiled() -> None:
    small = Small()
    small.graph.call_function(ROWS, ())
    module = small.module(small.y)
    refused(LayOutRows(), module, "ensures")
    refused(CompileRows(), module, "requires")


def test_rows_are_interpreted_where_nothing_is_compiled() -> None:
    small = Small()
    call = small.graph.call_function(ROWS, (), {"fused": True})
    module = small.module(small.y)
    assert LayOutRows(fused=False).call(module).modified
    assert call.kwargs == {"fused": False}
    assert not LayOutRows(fused=False).call(Small().module()).modified
