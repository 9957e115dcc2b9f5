"""A part of a problem alone: its forward, a pause that needs memory, its backward.

In the pause the rest of the problem runs, so the part may hold only what is left of the budget. The
plans for several pauses and budgets are the ways to run the part (Zhao et al., "Rockmate", ICML
2023, section 3, solves each block for several bytes saved and several peaks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxremat.core.problem import Op, Phase, Problem, Value
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.editable_schedule import EditableSchedule, GapRanking, descend
from fxremat.planner.local.pareto_front import ParetoFront, steps_of
from fxremat.planner.local.stage_schedule import StageSchedule

PAUSE = "pause"


def isolated_problem(
    model: IndexedProblem,
    forward: Sequence[int],
    backward: Sequence[int],
    pause_bytes: int,
    outlives: Callable[[int], bool],
    may_rerun: Callable[[int], bool],
) -> Problem:
    """The problem of these ops alone, with a pause of ``pause_bytes`` between the two halves.

    ``outlives`` says which values are there after the part as well: they are outputs, or resident.
    ``may_rerun`` says which forward ops may run again.
    """
    ops = [_op(model, op, "forward", may_rerun(op)) for op in forward]
    ops.append(Op(PAUSE, (), (), 0.0, pause_bytes, "any", False))
    ops.extend(_op(model, op, "backward", False) for op in backward)
    written = {name for op in ops for name in op.writes}
    names = dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes))
    staying = {name for name in names if outlives(int(name))}
    outside = [name for name in names if name not in written]
    return Problem(
        name="part",
        values=tuple(Value(name, model.bytes[int(name)]) for name in names),
        ops=tuple(ops),
        inputs=tuple(name for name in outside if name not in staying),
        resident=tuple(name for name in outside if name in staying),
        outputs=tuple(name for name in names if name in staying and name in written),
    )


def _op(model: IndexedProblem, op: int, phase: Phase, repeatable: bool) -> Op:
    return Op(
        name=str(op),
        reads=tuple(map(str, model.reads[op])),
        writes=tuple(map(str, model.writes[op])),
        time_us=model.time[op],
        workspace_bytes=model.workspace[op],
        phase=phase,
        repeatable=repeatable,
        inplace=tuple((str(read), str(write)) for read, write in model.inplace[op]),
    )


def eviction_front(model: IndexedProblem, deadline: Deadline) -> ParetoFront:
    """The front that eviction paths from store-all give."""
    front = ParetoFront(model)
    front.offer(StageSchedule(model))
    for length in constants.HALVES:
        if not deadline.running():
            break
        search = EditableSchedule(StageSchedule(model), GapRanking(length))
        descend(
            search,
            front,
            0,
            min(2 * constants.WORK // 5, constants.WORK_PER_OP * model.n),
        )
    return front


def backward_schedules(
    front: ParetoFront, forward: Sequence[int], backward: Sequence[int]
) -> Iterator[list[int]]:
    """The steps after the pause of each schedule, as ops of the whole problem."""
    ops = (*forward, -1, *backward)
    for entry in front.final_entries():
        steps = steps_of(front.model.n, entry.runs())
        yield [ops[k] for k in steps[steps.index(len(forward)) + 1 :]]
