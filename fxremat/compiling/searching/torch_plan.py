"""Torch's own partition as a plan: what it saves, and what the backward so has to run again."""

from __future__ import annotations

from fxremat.compiling.draft import Draft
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem
from fxremat.core.timeline import replay
from fxremat.passes.joint_graph import root

NAME = "torch"


def plan_of_torch(draft: Draft) -> Plan:
    """The plan that the halves of a draft come to, by what their forward saves."""
    by_name = {node.name: node for node in draft.joint.module.graph.nodes}
    names = [node.name for node in draft.saved]
    saved = {root(by_name[name]).name for name in names if name in by_name}
    problem = draft.estimate.problem
    line = replay(problem, steps_of_saved(problem, saved))
    return Plan(line.steps, NAME, None, line.peak_bytes, line.time_us, energy_uj=line.energy_uj)


def steps_of_saved(problem: Problem, saved: set[str]) -> tuple[str, ...]:
    """The schedule that holds ``saved`` for the backward, and runs again what it lacks.

    The forward runs in base order, then the backward; in front of each op of it, what it reads
    and nobody holds is computed again, once. What may not run again is held.
    """
    op_of_value = {name: problem.op_of[op] for name, op in problem.writer_of.items()}
    steps = [op.name for op in problem.ops if op.phase == "forward"]
    held = {*problem.inputs, *problem.resident, *problem.outputs, *saved}
    held |= {name for name, op in op_of_value.items() if not op.repeatable}
    done = set(held)

    def run(op: Op) -> None:
        for name in op.reads:
            if name not in done:
                run(op_of_value[name])
        steps.append(op.name)
        done.update(op.writes)

    for op in problem.ops:
        if op.phase == "backward":
            run(op)
    return tuple(steps)
