"""A proven bound on the time of every schedule within a budget, moves included.

The relaxation over program points (`fxremat.planner.milp.relaxation`), with one more way to bring
a value that is not held: it comes from the host. What an engine moves takes time on it, so that the
whole takes no less than ``base + added``:

    fetch[v, j]   value v comes from the host in the window after point j
    away[v, j]    value v is on the host alone at point j

    added >= sum(time of q rerun[q, j])
    base + added >= sum(time of v on its way back fetch[v, j])
    time of first runs up to point j + added >= sum(time of v on its way out away[v, j])
    time of first runs after point j + added >= sum(time of v on its way back fetch[v, i], i >= j)

The last two hold because what is away at a point has left before, and what is fetched in a
window after it starts no sooner; stalls and repeats before and after are parts of what is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.core.problem import Problem
from fxremat.core.timeline import transfer_us
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT, IndexedProblem, build_model
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp.highs import SCALE, Milp, Term, present
from fxremat.planner.milp.relaxation import Relaxation


def relax(problem: Problem, budget_bytes: int, deadline: Deadline) -> tuple[float, set[str]]:
    """What every schedule within the budget takes, and which values come back in the cheapest.

    It is the relaxation at the highest step of store-all. The time in microseconds is infinite if
    there is no schedule.
    """
    model = build_model(problem)
    if not model.n:
        return 0.0, set()
    peak = int(StageSchedule(model).peak.argmax())
    relaxation = MovingRelaxation(model, budget_bytes, [peak])
    solution = relaxation.solve(deadline)
    bound = max(relaxation.time_bound_us(solution), problem.base_time_us)
    fetched = {
        model.value_names[value]
        for window in relaxation.fetch
        for value, column in window.items()
        if solution.chosen(column)
    }
    return bound, fetched


class MovingRelaxation(Relaxation):
    """The MILP of one budget and some program points, with moves."""

    def __init__(self, model: IndexedProblem, budget: int, points: Sequence[int]) -> None:
        problem, milp = model.problem, Milp()
        self.copies = problem.copies
        assert self.copies is not None
        names = model.value_names
        host = set(problem.host)
        can_return = bool(self.copies.to_host and self.copies.to_device)
        self.may_move = [
            not model.is_output[value]
            and (name in host or (not self.copies.only_host and can_return))
            and (model.writer[value] != INPUT or name in host)
            for value, name in enumerate(names)
        ]
        self.lives_there = [name in host for name in names]
        self.added = milp.real(cost=1.0, high=float("inf"))
        self.fetch = [
            {
                value: milp.binary()
                for value, op in enumerate(model.writer)
                if op <= stage < model.last_needs[value] and self.may_move[value]
            }
            for stage in points
        ]
        super().__init__(model, budget, points, milp)
        self.per_us = SCALE / max(problem.base_time_us, 1e-9)
        self._ops_take_time()
        for j in range(len(points)):
            self._engines_take_time(j)

    def _may_go(self, value: int) -> bool:
        return self.may_move[value] or super()._may_go(value)

    def _other_sources(self, j: int, value: int) -> list[Term]:
        return present(self.fetch[j].get(value))

    def _cost(self, op: int) -> float:
        return 0.0

    def _are_neighbours(self, j: int) -> bool:
        return False  # what comes from the host may go again

    def _us(self, value: int, back: bool) -> float:
        """Time of a value on its engine, in the units of the MILP."""
        assert self.copies is not None
        kind = "to device" if back else "to host"
        size = self.model.bytes[value]
        return min(transfer_us(self.copies, kind, size), 1e15) * self.per_us  # type: ignore[arg-type]

    def _ops_take_time(self) -> None:
        """added >= sum(time of q rerun[q, j]);  base + added >= sum(time back of v fetch[v, j])"""
        runs = (item for window in self.rerun for item in window.items())
        work = [(column, -self.model.time[op] * self.per_us) for op, column in runs]
        self.milp.row([(self.added, 1.0), *work], low=0.0)
        fetches = (item for window in self.fetch for item in window.items())
        back = [(column, -self._us(value, back=True)) for value, column in fetches]
        self.milp.row([(self.added, 1.0), *back], low=-SCALE)

    def _engines_take_time(self, j: int) -> None:
        """away[v, j] >= fetch[v, i] - held[v, j] - sum(rerun[writer of v, k], k >= j)

        and what both engines do before and after the point.
        """
        before = sum(self.model.time[: self.points[j] + 1]) * self.per_us
        out: list[Term] = [(self.added, 1.0)]
        back: list[Term] = [(self.added, 1.0)]
        for value in {v for window in self.fetch[j:] for v in window}:
            columns = [window[value] for window in self.fetch[j:] if value in window]
            back += [(column, -self._us(value, back=True)) for column in columns]
            held = self.held[j].get(value)
            certain = value in self.held[j] and held is None
            if certain or self.lives_there[value] or self.model.writer[value] > self.points[j]:
                continue
            away = self.milp.real()
            out.append((away, -self._us(value, back=False)))
            runs = (window.get(self.model.writer[value]) for window in self.rerun[j:])
            others = present(*runs, held)
            for column in columns:
                self.milp.row([(away, 1.0), (column, -1.0), *others], low=0.0)
        self.milp.row(out, low=-before)
        self.milp.row(back, low=before - SCALE)
