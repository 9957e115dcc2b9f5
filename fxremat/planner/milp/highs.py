"""Mixed integer linear programmes on HiGHS: build, start, solve, and read the outcome.

Minimisation only. Rows and columns are plain arrays, handed over in one piece. HiGHS runs on one
thread, with its own seed, so that the same programme under the same node limit gives the same
outcome. Only a limit in seconds can change it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import highspy
import numpy as np
import numpy.typing as npt

from fxremat.core.constants import CORE_TURN_S
from fxremat.planner.deadline import Deadline

Term = tuple[int, float]
"""A column and its coefficient."""
OnProgress = Callable[[float, float], None]
"""Called now and then with the objective of the best solution so far, and with the bound."""

TOLERANCE = 1e-6
"""HiGHS may exceed a row by as much (its `mip_feasibility_tolerance`), so programmes are solved as
exactly as that."""
FREE = math.inf
"""The limit of a row that has none on this side."""
SCALE = 1000.0
"""What the budget, and the time of store-all, are in the units of a programme. HiGHS's tolerances
are absolute: a budget of so many units is exceeded by a billionth of it at most."""
BOUND_MARGIN = 1e-7
"""A bound is lowered by this part, because HiGHS computes in floating point. A plan that is no
further above its bound is optimal."""


def present(*columns: int | None, factor: float = 1.0) -> list[Term]:
    """The terms of those columns that there are."""
    return [(column, factor) for column in columns if column is not None]


@dataclass(frozen=True)
class Solution:
    """The outcome: the best values found, if any, and a bound that holds in any case.

    ``bound`` is a proven lower bound on the objective; infinite where the programme is proven
    to have no solution, minus infinity where nothing is proven.
    """

    values: npt.NDArray[np.float64] | None
    objective: float
    bound: float

    def chosen(self, column: int) -> bool:
        """Whether an integer column of bounds 0 and 1 is 1."""
        return self.values is not None and bool(self.values[column] > 0.5)


@dataclass
class Milp:
    """Columns and rows under construction; rows are stored one after the other (CSR)."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=lambda: [0])
    row_columns: list[int] = field(default_factory=list)
    row_factors: list[float] = field(default_factory=list)
    may_restart: bool = True
    """Whether HiGHS may presolve once more at the root and begin anew."""

    def real(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0) -> int:
        """A continuous column."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(False)
        return len(self.cost) - 1

    def binary(self, cost: float = 0.0) -> int:
        """A column that is 0 or 1."""
        column = self.real(cost)
        self.integer[column] = True
        return column

    def row(self, terms: Iterable[Term], low: float = -FREE, high: float = FREE) -> None:
        """low <= sum of the terms <= high; a column may occur in several terms."""
        together: dict[int, float] = {}
        for column, factor in terms:
            together[column] = together.get(column, 0.0) + factor
        self.row_columns.extend(together)
        self.row_factors.extend(together.values())
        self.row_starts.append(len(self.row_columns))
        self.row_low.append(low)
        self.row_high.append(high)

    def solve(
        self,
        deadline: Deadline,
        *,
        nodes: int = highspy.kHighsIInf,
        gap: float = TOLERANCE,
        absolute_gap: float = 0.0,
        start: Sequence[float] | npt.NDArray[np.float64] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Solution:
        """The best solution found within the limits.

        At most ``nodes`` of the search tree are looked at. A solution is good enough if it is as
        near to the bound as ``gap`` of itself, or as ``absolute_gap``. ``start`` is a solution to
        begin with: a value for each column, infinite for continuous ones that HiGHS is to find.
        """
        if not self.cost:  # HiGHS calls such a programme empty, whatever its rows say
            rows = zip(self.row_low, self.row_high, strict=True)
            if all(low <= 0 <= high for low, high in rows):
                return Solution(np.zeros(0), 0.0, 0.0)
            return Solution(None, FREE, FREE)
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, bool | int | float] = {
            "output_flag": False,
            "threads": 1,
            "mip_rel_gap": gap,
            "mip_abs_gap": absolute_gap,
            "mip_allow_restart": self.may_restart,
            "mip_max_nodes": nodes,
            "time_limit": max(0.0, deadline.left()),
        }
        for name, value in options.items():
            highs.setOptionValue(name, value)
        highs.passModel(self._lp())
        if start is not None:
            start_solution = highspy.HighsSolution()
            start_solution.col_value = [float(value) for value in start]
            highs.setSolution(start_solution)

        def on_interrupt_check(event: highspy.highs.HighsCallbackEvent) -> None:
            if on_progress is not None:
                on_progress(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)
            if not deadline.running():
                event.interrupt()

        highs.cbMipInterrupt += on_interrupt_check
        _run(highs)
        return self._outcome_of(highs)

    def solve_near(
        self, deadline: Deadline, *, nodes: int, gap: float, absolute_gap: float
    ) -> Solution:
        """The best solution that agrees with the linear relaxation wherever that is integral.

        Its bound is that of the relaxation. This is relaxation enforced neighbourhood search
        (Berthold, "RENS", Mathematical Programming Computation 2014).
        """
        relaxed = replace(self, integer=[False] * len(self.integer)).solve(deadline)
        if relaxed.values is None:
            return relaxed
        low, high = list(self.low), list(self.high)
        for column, value in enumerate(relaxed.values):
            if self.integer[column] and abs(value - round(value)) < 1e-6:
                low[column] = high[column] = round(value)
        near = replace(self, low=low, high=high)
        found = near.solve(deadline, nodes=nodes, gap=gap, absolute_gap=absolute_gap)
        return replace(found, bound=relaxed.bound)

    def _lp(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.row_low)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.array(self.low), np.array(self.high)
        lp.row_lower_ = np.array(self.row_low, dtype=np.float64)
        lp.row_upper_ = np.array(self.row_high, dtype=np.float64)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.row_starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self.row_columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self.row_factors, dtype=np.float64)
        if any(self.integer):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[integer] for integer in self.integer]
        return lp

    def _outcome_of(self, highs: highspy.Highs) -> Solution:
        """What HiGHS found. At a limit a solution is no optimum, and no solution is no proof."""
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, FREE, FREE)
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(highs.getSolution().col_value) if feasible else None
        objective = info.objective_function_value if feasible else FREE
        of_lp = objective if status == highspy.HighsModelStatus.kOptimal else -FREE
        bound = info.mip_dual_bound if any(self.integer) else of_lp
        return Solution(values, objective, bound)


def _run(highs: highspy.Highs) -> None:
    """Run HiGHS; Ctrl-C raises `KeyboardInterrupt` at once, and HiGHS ends when it looks next,
    or at its time limit.

    It runs in a thread of its own, for Python answers Ctrl-C only between its own instructions,
    and only in the main thread.
    """
    given_up = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            highs.run()
        except BaseException as error:  # for the thread that waits
            raised.append(error)

    def look(event: highspy.highs.HighsCallbackEvent) -> None:
        if given_up.is_set():
            event.interrupt()

    highs.cbMipInterrupt += look  # those of its linear programmes ask so often that it is slower
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(CORE_TURN_S)  # another thread may have been told of Ctrl-C
    except BaseException:
        given_up.set()
        raise
    if raised:
        raise raised[0]
