"""What is predicted to be written to memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxremat.passes.joint_graph import Role, is_repeatable, is_view
from fxremat.passes.materialisation import (
    Materialisation,
    is_fusable,
    is_reduction,
    is_scalar,
    materialise,
    users_through_views,
)
from tests import nets
from tests.conftest import Golden
from tests.graphs import Capture, Net, batch, capture, linear, mlp
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


FUSABLE = [
    call(ATEN.sin.default, X), call(ATEN.sum.default, X), call(ATEN.cat.default, [X, X]),
    call(ATEN.where.self, X > 0, X, X), call(ATEN.clone.default, X),
]  # fmt: skip
EXTERN = [
    call(ATEN.mm.default, X, X), call(ATEN.sort.default, X), call(ATEN.topk.default, X, 2),
    item(call(ATEN.topk.default, X, 2), 0),
]  # fmt: skip


@pytest.mark.parametrize("node", FUSABLE, ids=lambda n: str(n.target))
def test_fusable(node: Any) -> None:
    assert is_fusable(node)


@pytest.mark.parametrize("node", EXTERN, ids=lambda n: str(n.target))
def test_extern(node: Any) -> None:
    assert not is_fusable(node)


def test_reductions() -> None:
    assert is_reduction(call(ATEN.sum.default, X))
    assert is_reduction(call(ATEN.amax.default, X, [1]))
    assert not is_reduction(call(ATEN.sin.default, X))


def test_numbers_take_no_device_bytes() -> None:
    node = call(ATEN.sin.default, X)
    assert not is_scalar(node)
    node.meta["val"] = 3
    assert is_scalar(node)


def test_a_chain_of_loops_is_one_value() -> None:
    chain = capture(Net(lambda n, x: n.linear(x.sin().cos().tanh()), linear=linear()),
                    [batch(4, 8)], fused=True)  # fmt: skip
    assert "tanh" in written(chain)
    assert "sin" not in written(chain)


def test_of_a_converted_sum_only_what_it_becomes_is_written() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x).sum(0, dtype=torch.float64).to(torch.float16)  # type: ignore[no-any-return]

    found = written(capture(Net(run, linear=linear()), [batch(4, 8)], fused=True))
    assert "convert_element_type" in found
    assert "sum_1" not in found


def test_a_sum_that_others_read_too_is_written() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        total = net.linear(x).sum(0, dtype=torch.float64)
        return total.to(torch.float16) + total.sin()  # type: ignore[no-any-return]

    assert "sum_1" in written(capture(Net(run, linear=linear()), [batch(4, 8)], fused=True))


def test_a_loop_read_on_both_sides_of_a_matmul_is_written() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return net.linear(y) + y  # type: ignore[no-any-return]

    assert "sin" in written(capture(Net(run, linear=linear()), [batch(4, 8)], fused=True))


def test_a_mask_that_the_backward_reads_is_written() -> None:
    model = nn.Sequential(linear(), nn.Dropout())
    assert "gt" in written(capture(model, [batch(4, 8)], fused=True))


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


def test_results_are_written() -> None:
    seen = capture(mlp(), [batch(4, 8)], fused=True)
    outputs = (*seen.joint.forward_outputs, *seen.joint.backward_outputs)
    roots = {n if not is_view(n) else n.all_input_nodes[0] for n in outputs}
    assert all(rule(seen).is_value(r) or is_view(r) for r in roots)


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
