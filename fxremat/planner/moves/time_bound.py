"""A proven bound on the time of every schedule within a budget, moves included.

The relaxation over one program point (`fxremat.planner.milp.relaxation`), with one more way to
bring a value that is not held: it comes from the host. What an engine moves takes time on it, so
that the whole takes no less than ``base + added``:

    fetch[v]   value v comes from the host after the point
    away[v]    value v is on the host alone at the point

    added >= sum(time of q rerun[q])
    time of first runs up to the point + added >= sum(time of v on its way out away[v])
    time of first runs after the point + added >= sum(time of v on its way back fetch[v])

The last two hold because what is away at the point has left before, and what is fetched after it
starts no sooner; stalls and repeats before and after are parts of what is added.
"""

from __future__ import annotations

from fxremat.core.problem import Problem
from fxremat.core.schedule import Kind
from fxremat.core.timeline import transfer_us
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp.highs import SCALE, Milp, Term, present
from fxremat.planner.milp.relaxation import Relaxation


def relax(problem: Problem, budget_bytes: int, deadline: Deadline) -> tuple[float, set[str]]:
    """What every schedule within the budget takes, and which values come back in the cheapest.

    It is the relaxation at the highest step of store-all. The time in microseconds is infinite if
    there is no schedule.
    """
    model = IndexedProblem(problem)
    if not model.n:
        return 0.0, set()
    peak = int(StageSchedule(model).peak.argmax())
    relaxation = MovingRelaxation(model, budget_bytes, peak)
    solution = relaxation.solve(deadline)
    fetched = (value for value, column in relaxation.fetch.items() if solution.chosen(column))
    return relaxation.time_bound_us(solution), {model.value_names[value] for value in fetched}


class MovingRelaxation(Relaxation):
    """The MILP of one budget and one program point, with moves."""

    def __init__(self, model: IndexedProblem, budget: int, point: int) -> None:
        problem, milp, host = model.problem, Milp(), {*model.problem.host}
        assert problem.copies is not None
        self.copies = copies = problem.copies
        may_leave = copies.to_host and copies.to_device and not copies.only_host
        self.lives_there = [name in host for name in model.value_names]
        self.may_move = [
            not model.is_output[value] and bool(there or (may_leave and op != INPUT))
            for value, (op, there) in enumerate(zip(model.writer, self.lives_there, strict=True))
        ]
        self.added = milp.real(cost=1.0, high=float("inf"))
        self.fetch = {
            value: milp.binary()
            for value, op in enumerate(model.writer)
            if op <= point < model.last_needs[value] and self.may_move[value]
        }
        super().__init__(model, budget, [point], milp)
        self.per_us = SCALE / max(problem.base_time_us, 1e-9)
        self._work_takes_time()

    def _may_go(self, value: int) -> bool:
        return self.may_move[value] or super()._may_go(value)

    def _other_sources(self, value: int) -> list[Term]:
        return present(self.fetch.get(value))

    def _cost(self, op: int) -> float:
        return 0.0

    def _us(self, value: int, kind: Kind) -> float:
        """Time of a value on its engine, in the units of the MILP."""
        takes = transfer_us(self.copies, kind, self.model.bytes[value])
        return min(takes, 1e15) * self.per_us

    def _work_takes_time(self) -> None:
        """added >= sum(time of q rerun[q]), and what both engines do before and after the point.

        away[v] >= fetch[v] - held[v] - rerun[writer of v]
        """
        (point,), (held,), (rerun,) = self.points, self.held, self.rerun
        before = sum(self.model.time[: point + 1]) * self.per_us
        work = [(column, -self.model.time[op] * self.per_us) for op, column in rerun.items()]
        out: list[Term] = [(self.added, 1.0)]
        back: list[Term] = [(self.added, 1.0)]
        self.milp.row([(self.added, 1.0), *work], low=0.0)
        for value, column in self.fetch.items():
            back.append((column, -self._us(value, "to device")))
            is_held = held.get(value, -1) is None
            if not is_held and not self.lives_there[value]:
                away = self.milp.real()
                out.append((away, -self._us(value, "to host")))
                others = present(rerun.get(self.model.writer[value]), held.get(value))
                self.milp.row([(away, 1.0), (column, -1.0), *others], low=0.0)
        self.milp.row(out, low=-before)
        self.milp.row(back, low=before - SCALE)
