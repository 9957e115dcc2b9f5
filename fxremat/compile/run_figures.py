"""What a plan of a graph takes as a version of its part: bytes that it holds, saves and needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxremat.compile.cost_model import with_between
from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.compile.request import Request, as_asked
from fxremat.core.events import Allocate, RunEvents
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import ops_of
from fxremat.core.step import Interface, Version
from fxremat.core.timeline import replay
from fxremat.passes.joint_graph import JointGraph, root
from fxremat.passes.memory_estimation import TANGENTS, nbytes


def planned_run(draft: Draft, plan: Plan, request: Request) -> tuple[Version, int, int]:
    """What a plan takes, its peak, and what is live between its halves, by its replay."""
    problem = with_between(draft.estimate.problem, 0)
    line = replay(problem, plan.steps)
    between = plan.steps.index(TANGENTS)
    live, parameters, dropped = line.live_bytes, request.inputs.parameters, tuple[int, ...]()
    if request.inputs.passed_on:
        passed = _passed_on(problem, draft.joint, parameters)
        dropped = replay(passed, plan.steps).live_bytes[between + 1 :]
    figures = _figures(draft, plan, parameters, live[:between], live[between:], dropped)
    return figures, line.peak_bytes, line.live_bytes[between]


def _passed_on(problem: Problem, joint: JointGraph, parameters: Sequence[int]) -> Problem:
    """The problem as others have it: they pass on what the part is given and gives.

    They drop results when the forward has ended, and gradients that come in when these are passed;
    then all that lives is what is read later. Inputs of its own live as long.
    """
    given = {node.name for node in _given(joint, parameters)}
    results = {root(node).name for node in joint.forward_outputs} & {*problem.outputs}
    dropped = results | {node.name for node in joint.tangents}
    at = problem.op_of[TANGENTS]
    reading = replace(at, reads=(*at.reads, *sorted(results - {*at.reads})))
    return replace(
        problem,
        ops=tuple(reading if op is at else op for op in problem.ops),
        inputs=tuple(name for name in problem.resident if name in given),
        resident=tuple(name for name in problem.resident if name not in given),
        outputs=tuple(name for name in problem.outputs if name not in dropped),
    )


def version_of(draft: Draft, plan: Plan, shown: DryRun | None, request: Request) -> Version:
    """What a plan takes as a version of its part, by its dry run if there was one."""
    if shown is None:
        return planned_run(draft, plan, request)[0]
    parameters = request.inputs.parameters
    live = list(zip(shown.computed, shown.live_bytes, strict=True))
    between = {TANGENTS, *(node.name for node in draft.joint.tangents)}  # what others hold then
    before, after = (
        [nbytes for name, nbytes in half if name not in between]
        for half in (live[: shown.forward_steps], live[shown.forward_steps :])
    )
    given = {node.name for node in _given(draft.joint, parameters)}
    dropped = shown.live_where_dropped(given) if request.inputs.passed_on else ()
    return _figures(draft, plan, parameters, before, [shown.saved_bytes, *after], dropped)


def run_events_of(draft: Draft, shown: DryRun | None, request: Request) -> RunEvents | None:
    """What a version asks of the device's allocator; None where no dry run counted it."""
    if shown is None or shown.allocator.as_run is None:
        return None
    own = {node.name for node in _given(draft.joint, request.inputs.parameters)}
    names = [e.name for e in shown.events if isinstance(e, Allocate)]
    pairs = zip(names, shown.allocator.as_run.inputs, strict=False)  # what is resident comes first
    inputs = tuple(replace(one, own=name in own) for name, one in pairs)
    return as_asked(replace(shown.allocator.as_run, inputs=inputs), request)


def _figures(
    draft: Draft,
    plan: Plan,
    parameters: Sequence[int],
    forward: Sequence[int],
    backward: Sequence[int],
    dropped: Sequence[int] = (),
) -> Version:
    """By the bytes that are live at each point; the first of the backward is before it begins.

    ``dropped`` are those of the backward where others drop what they pass on.
    """
    own, joint = interface_of(draft, parameters), draft.joint
    again = {
        name
        for op in ops_of(plan.steps[plan.steps.index(TANGENTS) :])
        for name in draft.estimate.problem.op_of[op].reads
    }
    given = sum(nbytes(n.meta["val"]) for n in _given(joint, parameters) if n.name in again)
    kept = _bytes_of({root(n) for n in joint.forward_outputs if root(n).name not in again})
    beside = own.resident + kept + own.incoming - given
    return Version(
        plan.time_us,
        saved_bytes=max(0, backward[0] - beside),
        forward_bytes=max(0, max(forward, default=0) - own.resident),
        backward_bytes=max(
            0,
            (max(backward) if not dropped else backward[0]) - beside,
            max(dropped, default=0) - own.resident - own.incoming + own.given,
        ),
    )


def interface_of(draft: Draft, parameters: Sequence[int]) -> Interface:
    joint, given = draft.joint, set(_given(draft.joint, parameters))
    gradients = joint.results[joint.num_forward_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)
    left = {root(g) for primal, g in pairs if isinstance(g, fx.Node) and primal not in given}
    return Interface(
        resident=_bytes_of(joint.primals),
        given=_bytes_of(given),
        results=_bytes_of({root(n) for n in joint.forward_outputs}),
        incoming=_bytes_of(joint.tangents),
        left=_bytes_of(left),
    )


def _given(joint: JointGraph, parameters: Sequence[int]) -> Iterator[fx.Node]:
    """The inputs that each run has of its own: those with a gradient that are no parameters."""
    gradients, fixed = joint.results[joint.num_forward_outputs :], set(parameters)
    for index, (primal, gradient) in enumerate(zip(joint.primals, gradients, strict=False)):
        if index not in fixed and isinstance(gradient, fx.Node):
            yield primal


def _bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Of the tensors among them that are computed or given, and not seen through views."""
    values = [node.meta.get("val") for node in nodes if node.op != "output"]
    return sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))
