"""What is predicted to be written to memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxremat.passes.joint_graph import Role, is_repeatable, is_view
from fxremat.passes.materialisation import (
    Materialisation,
    is_fusable,
    is_reduction,
    materialise,
    users_through_views,
)
from tests import nets
from tests.conftest import Golden
from tests.graphs import Capture, Net, batch, capture, linear
from tests.single_calls import ATEN, X, call, item


def rule(seen: Capture) -> Materialisation:
    return materialise(seen.joint, fused=seen.fused)


def written(seen: Capture) -> list[str]:
    """Names of what is written, in graph order."""
    found = rule(seen).written
    return [n.name for n in seen.joint.module.graph.nodes if n in found]


def test_written_values_of_a_block(golden: Golden) -> None:
    model = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(8), linear(), nn.Softmax(1))
    seen = capture(model, [batch(4, 8)], fused=True)
    found = rule(seen).written
    rows = [("* " if n in found else "  ") + n.name for n in seen.joint.module.graph.nodes]
    golden("\n".join(rows))


@pytest.mark.parametrize("name", ["mlp", "several results", "attention", "pieces", "dropout"])
def test_node_by_node_everything_but_views_is_written(name: str) -> None:
    seen = nets.traced(name)
    found = rule(seen).written
    for node in seen.joint.module.graph.nodes:
        plain = node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        assert (node in found) == (plain and not is_view(node))


CHOICES = {
    # a step: what is written of it, and what is not
    "a chain of loops is one value": (lambda n, x: n.linear(x.sin().cos().tanh()), "tanh", "sin"),
    "of a converted sum what it becomes": (
        lambda n, x: n.linear(x).sum(0, dtype=torch.float64).to(torch.float16),
        "convert_element_type", "sum_1"),
    "a sum that others read too": (
        lambda n, x: (s := n.linear(x).sum(0, dtype=torch.float64)).to(torch.float16) + s.sin(),
        "sum_1", "sin"),
    "a loop read on both sides of a matmul": (lambda n, x: n.linear(y := x.sin()) + y, "sin", ""),
    "a mask that the backward reads": (lambda n, x: F.dropout(n.linear(x)), "gt", "mul"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_which_loops_are_written(name: str) -> None:
    step, yes, no = CHOICES[name]
    found = written(capture(Net(step, linear=linear()), [batch(4, 8)], fused=True))
    assert yes in found
    assert no not in found


@pytest.mark.parametrize(
    ("node", "fusable", "reduction"),
    [
        (call(ATEN.sin.default, X), True, False),
        (call(ATEN.sum.default, X), True, True),
        (call(ATEN.amax.default, X, [1]), True, True),
        (call(ATEN.cat.default, [X, X]), True, False),
        (call(ATEN.where.self, X > 0, X, X), True, False),
        (call(ATEN.clone.default, X), True, False),
        (call(ATEN.mm.default, X, X), False, False),
        (call(ATEN.sort.default, X), False, False),
        (call(ATEN.topk.default, X, 2), False, False),
        (item(call(ATEN.topk.default, X, 2), 0), False, False),
    ],
    ids=lambda value: str(getattr(value, "target", "")),
)
def test_kinds_of_kernels(node: fx.Node, fusable: bool, reduction: bool) -> None:
    assert (is_fusable(node), is_reduction(node)) == (fusable, reduction)


def test_loops_of_the_backward_centre_again_what_a_norm_reads() -> None:
    """A sum over the gradient and the gradient itself, on both sides of nothing but loops."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3))
    seen = capture(model, [batch(2, 2, 8, 8)], fused=True)
    lazy = [n for n in seen.joint.module.graph.nodes if seen.joint.role.get(n) is Role.LAZY]
    centred = [n for n in lazy if n.name.startswith("sub")]
    assert centred
    assert not {n for n in lazy if is_fusable(n) and not is_reduction(n)} & rule(seen).written


def test_what_must_not_run_twice_is_written() -> None:
    """A buffer's old content, read through loops by both halves, with no matmul between."""
    model, inputs = nets.make("buffer")
    seen = capture(model, inputs, fused=True)
    readers = [n for n in seen.joint.module.graph.nodes
               if any(i in seen.joint.mutated for i in n.all_input_nodes)
               and n.op == "call_function" and n.name != "copy_"]  # fmt: skip
    assert readers
    assert all(r in rule(seen).written for r in readers)


@pytest.mark.parametrize("name", nets.NAMES)
def test_what_both_halves_read_may_run_twice_or_is_written(name: str) -> None:
    seen = nets.traced(name, fused=True)
    found = rule(seen)
    for node in seen.joint.module.graph.nodes:
        once = not is_repeatable(node, seen.joint.mutated)
        tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op == "call_function" and once and tensor and not is_view(node):
            assert node in found.written or seen.joint.role[node] is Role.BACKWARD


def test_dynamic_sizes_leave_no_guards() -> None:
    """Comparing symbolic sizes would make the graph valid for one size alone."""
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    seen = capture(nn.Sequential(linear(), nn.ReLU(), linear()), [x], fused=True)
    symbols = [n for n in seen.joint.primals if isinstance(n.meta["val"], torch.SymInt)]
    env = symbols[0].meta["val"].node.shape_env
    before = len(env.guards)
    rule(seen)
    assert len(env.guards) == before


def reused(*layers: nn.Module, x: torch.Tensor) -> set[str]:
    """What is written although only loops of one group read it."""
    seen = capture(nn.Sequential(*layers), [x], fused=True)
    loops = [n for n in seen.joint.module.graph.nodes if n in rule(seen).written and is_fusable(n)]
    return {
        n.name
        for n in loops
        if seen.joint.role[n] is Role.BACKWARD
        and not is_reduction(n)
        and all(is_fusable(user) for user in users_through_views(n))
    }


def test_a_dear_result_that_two_loops_read_is_written() -> None:
    """The gradient of a group norm needs sums of sums: the loop that ends it comes later."""
    image = batch(2, 8, 4, 4)
    ends = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
    assert len(reused(*ends[:2], nn.SiLU(), ends[2], x=image)) == 1
    assert reused(*ends, x=image) == set()  # the gradient is read as it is


def test_rows_share_a_loop_with_what_follows() -> None:
    """In a layer norm sums are of rows: nothing is written between them and what reads them."""
    assert reused(linear(), nn.LayerNorm(8), nn.SiLU(), linear(), x=batch(4, 8)) == set()
    assert reused(linear(), nn.SiLU(), nn.Softmax(1), linear(), x=batch(4, 8)) == set()
