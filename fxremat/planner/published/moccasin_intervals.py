"""Moccasin's programme, built and solved by CP-SAT in a process of its own.

Run as a script: the problem comes as JSON on the standard input, and every answer goes as a line of
JSON to the standard output. It imports nothing of fxremat, as OR-Tools and highspy cannot be loaded
into one process: each brings a HiGHS of its own. See `fxremat.planner.published.moccasin` for what
the programme says.

The problem: ``stages[k]``, those in which op k may run, its own first; ``reads[k]``, values;
``shares[k]``, the bytes of each value that op k may take over, in its first run and in others;
``writer[v]``, an op or -1; ``kept[v]``; ``bytes[v]``; ``workspace[k]``; ``room``; ``cost[k]``;
``hint``, the stages in which each op runs, or null; and the limits of the search.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from typing import Any

INPUT = -1
RunOrCopy = tuple[int, int]
"""Run i of an op; copy i of a value."""


def slot_of(stage: int, op: int) -> int:
    """Stage t has a slot for each op up to t."""
    return stage * (stage + 1) // 2 + op


class Retention:
    """The constraint programme: variables by run and by copy."""

    def __init__(self, cp: Any, problem: dict[str, Any]) -> None:
        self.cp, self.problem, self.programme = cp, problem, cp.CpModel()
        self.present = dict[RunOrCopy, Any]()
        self.start = dict[RunOrCopy, Any]()
        self.end = dict[RunOrCopy, Any]()
        self.reads = dict[tuple[RunOrCopy, RunOrCopy], Any]()
        self.taken = defaultdict[RunOrCopy, list[tuple[int, Any]]](list)
        self.always = self.programme.new_constant(1)
        count = len(self.problem["stages"])
        self.last_slot = slot_of(count - 1, count - 1)
        self._add_runs()
        self._add_copies()
        self._provide_reads()
        self._take_over()
        self._fit()
        self._minimise()
        self._hint()

    def _copies(self, value: int) -> list[RunOrCopy]:
        """Copies of a value: one for each run, but one of an input or an output."""
        writer = self.problem["writer"][value]
        if writer == INPUT or self.problem["kept"][value]:
            return [(value, 0)]
        return [(value, i) for op, i in self.present if op == writer]

    def _born(self, copy: RunOrCopy) -> tuple[Any, Any]:
        """Whether there is this copy, and the slot that makes it; inputs are there at slot 0."""
        writer = self.problem["writer"][copy[0]]
        if writer == INPUT:
            return self.always, 0
        return self.present[writer, copy[1]], self.start[writer, copy[1]]

    # -- variables -------------------------------------------------------------------------

    def _add_runs(self) -> None:
        """Run 0 of an op is in its own stage; the others, if there are any, in order."""
        programme = self.programme
        for op, stages in enumerate(self.problem["stages"]):
            self.present[op, 0] = self.always
            self.start[op, 0] = programme.new_constant(slot_of(op, op))
            slots = self.cp.Domain.from_values([slot_of(stage, op) for stage in stages[1:]])
            for i in range(1, min(self.problem["runs"], len(stages))):
                here = self.present[op, i] = programme.new_bool_var("")
                self.start[op, i] = programme.new_int_var_from_domain(slots, "")
                programme.add_implication(here, self.present[op, i - 1])
                programme.add(self.start[op, i - 1] < self.start[op, i]).only_enforce_if(here)

    def _add_copies(self) -> None:
        """A copy ends before the next one begins; outputs never end."""
        for value, kept in enumerate(self.problem["kept"]):
            before: RunOrCopy | None = None
            for copy in self._copies(value):
                first = self.last_slot if kept else 0
                self.end[copy] = self.programme.new_int_var(first, self.last_slot, "")
                here, begin = self._born(copy)
                self.programme.add(self.end[copy] >= begin).only_enforce_if(here)
                if before is not None:
                    self.programme.add(self.end[before] < begin).only_enforce_if(here)
                before = copy

    # -- constraints -----------------------------------------------------------------------

    def _provide_reads(self) -> None:
        """Every run that reads a value reads a copy: made in an earlier slot, not yet ended."""
        programme = self.programme
        for run in self.present:
            for value in self.problem["reads"][run[0]]:
                choices = []
                for copy in self._copies(value):
                    here, begin = self._born(copy)
                    read = self.reads[run, copy] = programme.new_bool_var("")
                    programme.add_implication(read, here)
                    programme.add(self.start[run] <= self.end[copy]).only_enforce_if(read)
                    if self.problem["writer"][value] != INPUT:
                        programme.add(begin < self.start[run]).only_enforce_if(read)
                    choices.append(read)
                programme.add_bool_or([*choices, self.present[run].negated()])

    def _take_over(self) -> None:
        """Where a copy ends with a run that writes over it, the two share their bytes there.

        taken[copy] has (bytes, literal) for each run that may take over the copy; at most one of
        the literals is true, as the runs are in different slots.
        """
        programme = self.programme
        for run in self.present:
            for value, size in self.problem["shares"][run[0]][min(run[1], 1)]:
                for copy in self._copies(value):
                    here = programme.new_bool_var("")
                    programme.add_implication(here, self.present[run])
                    programme.add_implication(here, self.reads[run, copy])
                    programme.add(self.end[copy] == self.start[run]).only_enforce_if(here)
                    self.taken[copy].append((size, here))

    def _fit(self) -> None:
        """The copies and workspaces of every slot are within the room.

        A copy that is taken over ends one slot sooner for the bytes that are. Where it may share
        several sizes, it is cut into pieces, each of which ends sooner or not.
        """
        intervals: list[Any] = []
        demands: list[int] = []
        for copy in self.end:
            done, size = 0, self.problem["bytes"][copy[0]]
            for cut in sorted({cut for cut, _ in self.taken[copy]} | {size}):
                if cut > done:
                    sooner = [literal for taken, literal in self.taken[copy] if taken >= cut]
                    intervals.append(self._interval(copy, sooner))
                    demands.append(cut - done)
                    done = cut
        for run, here in self.present.items():
            if self.problem["workspace"][run[0]]:
                begin = self.start[run]
                intervals.append(
                    self.programme.new_optional_fixed_size_interval_var(begin, 1, here, "")
                )
                demands.append(self.problem["workspace"][run[0]])
        self.programme.add_cumulative(intervals, demands, self.problem["room"])

    def _interval(self, copy: RunOrCopy, sooner: list[Any]) -> Any:
        """The slots in which a copy takes up bytes."""
        here, begin = self._born(copy)
        length = self.programme.new_int_var(0, self.last_slot + 1, "")
        stop = self.programme.new_int_var(0, self.last_slot + 1, "")
        self.programme.add(stop == self.end[copy] + 1 - sum(sooner))
        return self.programme.new_optional_interval_var(begin, length, stop, here, "")

    def _minimise(self) -> None:
        """The time of all runs but the first of each op."""
        cost = self.problem["cost"]
        self.programme.minimize(sum(here * cost[op] for (op, i), here in self.present.items() if i))

    def _hint(self) -> None:
        """The runs of a known schedule."""
        for op, stages in enumerate(self.problem["hint"] or ()):
            for i in range(1, self.problem["runs"]):
                if (op, i) in self.present:
                    self.programme.add_hint(self.present[op, i], i < len(stages))
                    if i < len(stages):
                        self.programme.add_hint(self.start[op, i], slot_of(stages[i], op))

    # -- search ----------------------------------------------------------------------------

    def search(self) -> None:
        """Write down each schedule found, as (op, stage) of its extra runs; on one thread."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = self.problem["work"]
        if self.problem["seconds"] is not None:
            solver.parameters.max_time_in_seconds = self.problem["seconds"]
        solver.solve(self.programme, _printer(self))

    def runs(self, callback: Any) -> list[RunOrCopy]:
        """Extra runs of the schedule that the callback is told of, by stage and then by op."""
        found = []
        for (op, i), here in self.present.items():
            if i and callback.boolean_value(here):
                slot = callback.value(self.start[op, i])
                stages = self.problem["stages"][op]
                found.append((next(s for s in stages if slot_of(s, op) == slot), op))
        return [(op, stage) for stage, op in sorted(found)]


def _printer(retention: Retention) -> Any:
    """A callback that writes a line for every solution."""

    class Printed(retention.cp.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            print(json.dumps(retention.runs(self)), flush=True)

    return Printed()


def main() -> None:
    """Read the problem, solve it."""
    cp_model = importlib.import_module("ortools.sat.python.cp_model")
    Retention(cp_model, json.load(sys.stdin)).search()


if __name__ == "__main__":
    main()
