"""Collectives in a joint graph: what they are, what they cost, and which of them run again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxremat.compat.ranks import is_collective, is_wait, number_of_ranks
from fxremat.core.problem import problem_to_json
from fxremat.cost.op_timers import Roofline
from fxremat.cost.roofline import scratch_of, sent_by
from fxremat.passes.joint_graph import is_repeatable, waits_for
from fxremat.verify import predicates
from tests.conftest import Golden
from tests.graphs import Capture, again_after_tangents, capture, everything_again
from tests.single_calls import call
from tests.test_cost_roofline import SPEC

RANKS, ROWS, WIDTH = 4, 4, 8
OPS: Any = torch.ops._c10d_functional
X = torch.empty(ROWS, WIDTH)
PART, WHOLE = X.nbytes, X.nbytes * RANKS


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[str]:
    """This process is a rank of four, and the others are not there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield name()
    distributed.destroy_process_group()


def name() -> Any:
    """Of the group; only some versions of torch have a type for it."""
    return distributed.group.WORLD.group_name  # type: ignore[union-attr]


class Gathered(nn.Module):
    """Layers whose weights lie in parts on the ranks."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = (torch.randn(WIDTH // RANKS, WIDTH) for _ in range(count))
        self.parts = nn.ParameterList(nn.Parameter(part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            weight: Any = functional.all_gather_tensor_autograd(part, 0, name())
            x = torch.relu(x @ weight)
        return x


def nodes() -> dict[str, fx.Node]:
    """A call of each collective, and of what waits for it."""
    return {
        "gather": call(OPS.all_gather_into_tensor.default, X, RANKS, name()),
        "gather several": call(OPS.all_gather_into_tensor_coalesced.default, [X, X], RANKS, name()),
        "exchange": call(OPS.all_to_all_single.default, X, [1] * RANKS, [1] * RANKS, name()),
        "broadcast": call(OPS.broadcast.default, X, 0, name()),
        "sum to parts": call(OPS.reduce_scatter_tensor.default, X, "sum", RANKS, name()),
        "sum for all": call(OPS.all_reduce.default, X, "sum", name()),
        "in place": call(OPS.all_reduce_.default, X, "sum", name()),
        "wait": call(OPS.wait_tensor.default, X),
    }


@pytest.mark.parametrize(
    ("kind", "again", "sent", "scratch"),
    [
        ("gather", True, 3 * PART, WHOLE),
        ("gather several", True, 6 * PART, 2 * WHOLE + 2 * PART),
        ("exchange", True, 3 * PART // 4, 0),
        ("broadcast", True, 3 * PART // 4, 0),
        ("sum to parts", False, 3 * PART // 4, PART),
        ("sum for all", False, 3 * PART // 2, 0),
        ("in place", False, 0, 0),
        ("wait", True, 0, 0),
    ],
)
def test_each_collective(kind: str, again: bool, sent: int, scratch: int) -> None:
    """Whether it runs again, the bytes that it sends, and what gloo allocates inside."""
    node = nodes()[kind]
    assert is_collective(node)
    assert is_wait(node) == (kind == "wait")
    assert is_repeatable(node, frozenset()) == again
    assert predicates.is_repeatable(node, frozenset()) == again
    assert sent_by(node) == sent
    args = fx.map_arg(node.args, lambda one: one.meta["val"])
    assert scratch_of(node.target, args) == scratch


@pytest.mark.parametrize("kind", ["sum to parts", "sum for all"])
def test_a_sum_runs_again_where_a_checkpoint_says_so(kind: str) -> None:
    node = nodes()[kind]
    for tag in torch.utils.checkpoint.CheckpointPolicy:
        node.meta["recompute"] = tag
        again = "RECOMPUTE" in tag.name
        assert is_repeatable(node, frozenset()) == again, tag
        assert predicates.is_repeatable(node, frozenset()) == again, tag


def test_other_nodes_are_no_collectives() -> None:
    node = call(torch.ops.aten.mm.default, torch.empty(2, 2), torch.empty(2, 2))
    assert (is_collective(node), sent_by(node), number_of_ranks(node)) == (False, 0, None)
    assert scratch_of(node.target, node.args) == 0


def test_bytes_over_the_link_take_time() -> None:
    """Beside the time of the memory that is read and written."""
    timer = Roofline(SPEC, on_cpu=True, fused=False)
    gather, wait = nodes()["gather"], nodes()["wait"]
    expected = SPEC.launch_us + 1e6 * (PART + WHOLE) / SPEC.bytes_per_s
    expected += SPEC.link_us + 1e6 * 3 * PART / SPEC.link_bytes_per_s
    assert timer((gather, wait), PART + WHOLE) == pytest.approx(expected)
    slower = replace(timer, spec=replace(SPEC, link_bytes_per_s=SPEC.link_bytes_per_s / 2))
    more = 1e6 * 3 * PART / SPEC.link_bytes_per_s
    assert slower((gather,), PART + WHOLE) == pytest.approx(expected + more)


def seen(choose: Any = None, fused: bool = False) -> Capture:
    more = {} if choose is None else {"choose": choose}
    return capture(Gathered(), [torch.ones(ROWS, WIDTH)], fused=fused, **more)


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
def test_a_collective_and_its_wait_are_one_op(golden: Golden, fused: bool) -> None:
    problem = replace(seen(fused=fused).problem, copies=None)
    data = problem_to_json(problem)
    ops = [op for op in data["ops"] if "all_gather" in op["name"] or "reduce" in op["name"]]
    golden("\n".join(json.dumps(op) for op in ops))


def test_a_collective_that_more_than_a_wait_reads_is_an_op_by_itself() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gather = graph.call_function(OPS.all_gather_into_tensor.default, (x, RANKS, name()))
    gather.meta["val"] = torch.empty(WHOLE // 4)
    assert waits_for(gather) == ()
    wait = graph.call_function(OPS.wait_tensor.default, (gather,))
    assert waits_for(gather) == (wait,)
    assert waits_for(wait) == ()
    graph.call_function(torch.ops.aten.sin.default, (gather,))
    assert waits_for(gather) == ()


def test_each_half_waits_for_what_it_starts() -> None:
    """And for nothing twice, as torch would have it: it repeats what has an effect if it can."""
    again = seen(again_after_tangents("all_gather_into_tensor_1"))
    for half, waited in ((again.forward, 2), (again.backward, 3)):
        calls = [node for node in half.graph.nodes if is_collective(node)]
        waits = [node for node in calls if is_wait(node)]
        assert len(waits) == waited
        started = [wait.all_input_nodes[0] for wait in waits]
        assert sorted(map(str, [*started, *waits])) == sorted(map(str, calls))
    assert not any("wait" in node.name for node in again.rewritten.saved)


def test_sums_run_once() -> None:
    for fused in (False, True):
        again = seen(everything_again, fused)
        sums = [step for step in map(str, again.steps) if step.startswith("reduce_scatter")]
        assert len(sums) == len(set(sums)) == 2
        gathers = [step for step in map(str, again.steps) if step.startswith("all_gather")]
        assert len(gathers) > len(set(gathers)) == 2
