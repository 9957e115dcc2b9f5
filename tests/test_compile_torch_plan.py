"""Torch's own partition as a schedule: what its backward computes runs in front of its readers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.compat.joint_graph import extract_forward_backward
from fxremat.compile.draft import Draft
from fxremat.compile.search.proposals import plan_of_torch, steps_again
from fxremat.core.check import check
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from tests.chains import blocks, chains, homogeneous
from tests.graphs import Net, batch, capture, linear

ATEN = torch.ops.aten


def forward_values(problem: Problem) -> list[str]:
    """What the forward writes."""
    return [name for op in problem.ops if op.phase == "forward" for name in op.writes]


def test_where_nothing_is_computed_nothing_runs_again() -> None:
    problem = blocks(3)
    assert steps_again(problem, set()) == problem.base_steps()


def test_what_is_computed_runs_again_once() -> None:
    problem = homogeneous(3)
    assert steps_again(problem, {"y1"}) == ("f0", "f1", "f2", "loss", "f1", "b2", "b1", "b0")


@given(st.data(), chains().filter(lambda problem: bool(forward_values(problem))))
def test_every_choice_of_values_is_a_schedule(data: st.DataObject, problem: Problem) -> None:
    """The checker takes it; computing less never takes more time."""
    names = forward_values(problem)
    again = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    less = again & set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    steps = steps_again(problem, again)
    verdict = check(problem, steps)
    assert verdict.ok, verdict.failures
    fewer_runs = replay(problem, steps_again(problem, less)).time_us
    assert fewer_runs <= replay(problem, steps).time_us


def test_what_is_saved_as_a_view_is_held() -> None:
    """The forward saves the view, and the problem knows its owner."""
    net = Net(lambda net, x: net.linear(x).view(-1).sin().sum(), linear=linear())
    seen = capture(net, [batch(4, 8)])
    joint = seen.joint
    view = next(n for n in joint.module.graph.nodes if n.target is ATEN.view.default)
    halves = extract_forward_backward(
        joint.module, [*joint.primals, view], num_fwd_outputs=1, static_inputs=()
    )
    draft = Draft(joint.module, 1, joint=joint, estimate=seen.found, halves=halves)
    assert [node.name for node in draft.saved] == [view.name]
    assert plan_of_torch(draft).steps == seen.problem.base_steps()


def test_an_op_of_which_something_inside_is_saved_does_not_run_again() -> None:
    """Torch saves what a layer norm has scaled, and not what it reads: that is not computed."""
    net = Net(lambda net, x: net.last(net.norm(net.first(x))).sum(),
              first=linear(), norm=torch.nn.LayerNorm(8), last=linear())  # fmt: skip
    seen = capture(net, [batch(4, 8)], fused=True)
    joint = seen.joint
    scaled, deviation = (
        next(n for n in joint.module.graph.nodes if n.target is target)
        for target in (ATEN.mul.Tensor, ATEN.rsqrt.default)
    )
    assert scaled.name not in seen.problem.writer_of
    saved = [*joint.primals, scaled, deviation]
    halves = extract_forward_backward(joint.module, saved, num_fwd_outputs=1, static_inputs=())
    draft = Draft(joint.module, 1, joint=joint, estimate=seen.found, halves=halves)
    products = {op for op in seen.problem.op_of if "mm" in op}
    assert products
    assert not products & set(plan_of_torch(draft).repeats())
