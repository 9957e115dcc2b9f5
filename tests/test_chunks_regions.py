"""Regions of small graphs: which there are, and that memory of their calls is known."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS, CHUNKED_MLP, RULES
from fxremat.passes.variants.insertion import Rule
from fxremat.runtime import kernels
from fxremat.runtime.chunks.operator import ROWS
from tests.conftest import Golden
from tests.graphs import Net, calls
from tests.row_nets import LOSS, STEPS, D, head, labels, rows, traced_step, up_and_down
from tests.row_sites import Traced, real, taken, trace
from tests.variants import sites


def test_unknown_sizes_are_left_alone() -> None:
    seen, inputs = Traced(), (rows(50, D), labels(50))
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    seen.compiled(LOSS)(*inputs)
    assert sites(CHUNKED_LOSS, seen.joint) == []


class Block(nn.Module):
    """Attention without heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), up_and_down(nn.GELU)

    def forward(self, x: torch.Tensor) -> Any:
        attended = F.scaled_dot_product_attention(x, x, x)
        return x + self.mlp(self.norm(x + attended))


@pytest.mark.slow
def test_a_deep_net_is_looked_at_fast() -> None:
    """Each layer has its own region; the stream between layers is none."""
    torch.manual_seed(1)
    step = nn.Sequential(*(Block() for _ in range(12)))
    started = time.process_time()
    joint = trace(step, (rows(4, 32, D),)).joint
    seen = time.process_time()
    found = {site.name.split()[1] for rule in RULES for site in rule.find(joint)}
    assert len(found) == 12
    # Of twice as many layers it may take as long as the trace: work that grows with the square is
    # seen. In one run, so that a busy machine changes both.
    assert 2 * (time.process_time() - seen) < seen - started


def with_sites(name: str, *rules: Rule) -> list[fx.Graph]:
    """The graphs of a step with one of the first two sites of each rule."""
    joint = traced_step(name)
    found = [site for rule in rules for site in sites(rule, joint)[:2]]
    return [taken(joint, site).module.graph for site in found]


@pytest.mark.parametrize("name", STEPS)
def test_memory_of_every_call_is_known_to_the_byte(name: str) -> None:
    graphs = with_sites(name, CHUNKED_LOSS, CHUNKED_MLP)
    assert graphs
    for graph in graphs:
        for call in calls(graph, ROWS):
            assert_memory_is_known(call)


def assert_memory_is_known(call: fx.Node) -> None:
    """The workspace of a call is what it really takes."""
    args = [real(a) for a in fx.map_arg(call.args, lambda n: n.meta["val"])]
    made = sum(t.nbytes for t in ROWS(*args))
    peak = measure_peak(lambda: ROWS(*args)).above_start_bytes
    assert kernels.WORKSPACES[ROWS](*args, measure=kernels.unmeasured) == peak - made


def test_graph_of_a_loss_before_and_after(golden: Golden) -> None:
    step = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head(False))
    joint = trace(step, (rows(50, D), labels(50))).joint
    texts = [f"before\n\n{joint.module.graph}"]
    for site in sites(CHUNKED_LOSS, joint)[:2]:
        texts.append(f"{site.name}\n\n{taken(joint, site).module.graph}")
    golden("\n\n".join(texts))
