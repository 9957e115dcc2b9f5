"""The judge of the two halves that a joint graph is cut into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxremat import compat
from fxremat.checking.halves import check_halves
from fxremat.errors import VerificationFailed
from tests import nets
from tests.graphs import Capture, calls, capture, everything_again

ATEN = torch.ops.aten


def split(name: str) -> tuple[Capture, fx.Graph, fx.Graph]:
    seen = capture(*nets.make(name), everything_again)
    return seen, seen.forward.graph, seen.backward.graph


def judge(seen: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
    check_halves(
        seen.rewritten.module.graph,
        forward,
        backward,
        num_forward_outputs=seen.joint.num_forward_outputs,
        mutated=[n.name for n in seen.joint.mutated],
    )


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch norm", "old buffer", "several results"])
def test_honest_halves_pass(name: str) -> None:
    judge(*split(name))


def swap_saved(forward: fx.Graph, backward: fx.Graph) -> None:
    """The forward returns another value under the name of one that is saved."""
    results = list(forward.output_node().args[0])  # type: ignore[arg-type]
    old = next(n for n in reversed(results) if isinstance(n, fx.Node) and n.op != "placeholder")
    with forward.inserting_before(forward.output_node()):
        new = forward.call_function(ATEN.neg.default, (old,))
    new.meta = dict(old.meta)
    results[results.index(old)] = new
    forward.output_node().args = (tuple(results),)


def change_the_backward(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(backward, ATEN.mm)[0]
    node.args = (node.args[1], node.args[0])


def change_the_forward(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(forward, ATEN.gelu)[-1]
    node.target = ATEN.relu.default


def run_a_random_call_twice(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(forward, ATEN.native_dropout)[0]
    with forward.inserting_after(node):
        forward.node_copy(node)


def lose_a_result(forward: fx.Graph, backward: fx.Graph) -> None:
    results = list(backward.output_node().args[0])  # type: ignore[arg-type]
    backward.output_node().args = (tuple(results[1:]),)


@pytest.mark.parametrize(
    "sabotage",
    [swap_saved, change_the_backward, change_the_forward, run_a_random_call_twice, lose_a_result],
    ids=lambda f: f.__name__,
)
def test_sabotage_is_noticed(sabotage: Callable[[fx.Graph, fx.Graph], None]) -> None:
    seen, forward, backward = split("dropout")
    judge(seen, forward, backward)
    sabotage(forward, backward)
    with pytest.raises(VerificationFailed, match="halves"):
        judge(seen, forward, backward)


def test_the_partition_of_torch_passes() -> None:
    seen = capture(*nets.make("mlp"))
    forward, backward = compat.torch_partition(
        seen.joint.module, (), num_fwd_outputs=seen.joint.num_forward_outputs
    )
    judge(seen, forward.graph, backward.graph)
