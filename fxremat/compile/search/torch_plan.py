"""Torch's own partition as a plan: what its backward computes again."""

from __future__ import annotations

from fxremat.compile.draft import Draft
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem
from fxremat.core.timeline import replay

NAME = "torch"


def plan_of_torch(draft: Draft) -> Plan:
    """The plan that the halves of a draft come to, by what their backward computes again.

    What it does not compute counts as saved. Torch may save something inside of an op of ours
    instead, from which the op's value follows.
    """
    problem, backward = draft.estimate.problem, draft.halves[1]
    computed = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    line = replay(problem, steps_again(problem, computed))
    return Plan(line.steps, NAME, None, line.peak_bytes, line.time_us)


def steps_again(problem: Problem, again: set[str]) -> tuple[str, ...]:
    """The schedule whose backward computes the values ``again``, and holds all others for it.

    The forward runs in base order, then the backward; in front of each op of it, what it reads
    of these values is computed, once. What may not run again is held.
    """
    op_of_value = {name: problem.op_of[op] for name, op in problem.writer_of.items()}
    steps = [op.name for op in problem.ops if op.phase == "forward"]
    kept = {*problem.inputs, *problem.resident, *problem.outputs}

    def is_again(name: str) -> bool:
        op = op_of_value.get(name)
        return name in again and name not in kept and op is not None and op.repeatable

    done = {name for op in problem.ops if op.phase == "forward" for name in op.writes}
    done = kept | {name for name in done if not is_again(name)}

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
