"""Random nets, the peak of a step under a plan, and the verifier of writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.core.timeline import replay
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.halves import Rewritten
from fxremat.passes.inplace import INTO
from fxremat.passes.joint_graph import root
from fxremat.verify.aliasing import check_in_place
from tests.graphs import Capture, Choose, Net, batch, compiled

SIDE = 6
LAYERS: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda last, other, weight: torch.sin(last),
    lambda last, other, weight: torch.tanh(last),
    lambda last, other, weight: torch.exp(last),
    lambda last, other, weight: last.t(),
    lambda last, other, weight: last + 1,
    lambda last, other, weight: last.relu(),
    lambda last, other, weight: last @ weight,
    lambda last, other, weight: last * other,
    lambda last, other, weight: torch.cat(torch.split(last, 2, 1)[::-1], 1) + other,
    lambda last, other, weight: torch.softmax(last, 1),
    lambda last, other, weight: nn.functional.dropout(last, 0.3),
    lambda last, other, weight: last - last.mean(1, keepdim=True),
)


def _layers(kinds: Sequence[int], net: Any, x: torch.Tensor) -> torch.Tensor:
    values = [x]
    for index, kind in enumerate(kinds):
        other = values[(index * 7 + kind) % len(values)]
        values.append(LAYERS[kind](values[-1], other, net.weight))
    result: torch.Tensor = values[-1] @ net.weight + values[len(values) // 2]
    return result


@st.composite
def random_nets(draw: st.DrawFn) -> Net:
    """A chain of layers with skip connections, over square matrices."""
    kinds = draw(st.lists(st.integers(0, len(LAYERS) - 1), min_size=2, max_size=10))
    weight = nn.Parameter(batch(SIDE, SIDE) / SIDE)
    return Net(lambda net, x: _layers(kinds, net, x), weight=weight)


def peaks(
    model: nn.Module, inputs: Sequence[torch.Tensor], choose: Choose, workspaces: bool = False
) -> tuple[int, int]:
    """Measured and replayed bytes of a step that keeps its result and its tangent."""
    model = copy.deepcopy(model)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    seen = Capture(choose)
    if workspaces:
        seen.workspace = Workspaces(torch.device("cpu")).of_node
    run = compiled(model, seen)

    def step() -> None:
        result = run(*given)
        result.backward(torch.ones_like(result))

    step()
    for leaf in (*model.parameters(), *given):
        leaf.grad = None
    resident = sum(seen.problem.bytes_of[name] for name in seen.problem.resident)
    peak = measure_peak(step, held=[model, *given]).above_start_bytes
    return peak, replay(seen.problem, seen.steps).peak_bytes - resident


def judge(before: Rewritten, now: Rewritten, forward: int = 99) -> None:
    """Fail unless ``now`` computes what ``before`` does."""
    check_in_place(
        before.module.graph,
        now.module.graph,
        saved=[n.name for n in now.saved],
        num_forward_outputs=forward,
    )


def written_over(graph: fx.Graph) -> list[tuple[str, str]]:
    """The calls that write over an operand, each with the node whose memory that is."""
    calls = [node for node in graph.nodes if node.name.endswith(INTO)]
    return [(node.name.removesuffix(INTO), root(node.args[0]).name) for node in calls]
