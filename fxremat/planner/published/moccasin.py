"""Moccasin: retention intervals in place of a column for every stage, solved by CP-SAT.

Bartan et al., "Moccasin: efficient tensor rematerialization for neural networks"
(arXiv 2304.14463). Time is made of slots: stage ``t`` has one for each op up to ``t``, in base
order, and an op can run in its own slot of a stage only. Each op runs at most `MOCCASIN_RUNS`
times, and a copy of a value is kept from the slot of its run to some later slot. The copies kept in
a slot must fit the budget together, and every read must fall within a copy.

    start[k, i]   slot of run i of op k; run 0 is its first, in stage k
    end[v, i]     last slot in which copy i of value v is kept
    reads[...]    run j of op k reads copy i of v: start[w, i] < start[k, j] <= end[v, i]

Precedence is by literals, not by the paper's reservoirs, and lengths of copies are free. Storage
taken over in place is modelled for pairs that no earlier pair of the op can stand in the way of.
As runs are limited, what CP-SAT proves is no bound on the time of all schedules.

CP-SAT is part of OR-Tools, which ``pip install 'fxremat[cpsat]'`` brings. It runs in a process of
its own, see `fxremat.planner.published.moccasin_intervals`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule, steps_of
from fxremat.planner.published import moccasin_intervals
from fxremat.planner.published.known_schedule import (
    Incumbent,
    all_runs,
    pairs_apart,
    without_unread,
)
from fxremat.planner.solvers import ProblemRefused, SolverOptions

NAME = "moccasin"
BYTE_PARTS, TIME_PARTS = 1 << 24, 1 << 40
"""Parts into which budget and base time are divided at most: CP-SAT computes in integers."""


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The best plan found with few runs of each op."""
    if importlib.util.find_spec("ortools") is None:
        raise ProblemRefused(
            f"solver {NAME!r} needs OR-Tools. What to do: pip install 'fxremat[cpsat]', "
            "or use another solver"
        )
    call = Incumbent(NAME, problem, budget_bytes, options)
    model = call.model
    if budget_bytes is not None and not call.is_decided():
        for runs in _answers(_question(call, budget_bytes), call.deadline):
            for its in (without_unread(model, runs), runs):
                call.keep_if_better(model.names(steps_of(model.n, its)))
            call.tell(problem.base_time_us)
    return call.plan()


def _question(call: Incumbent, budget: int) -> dict[str, Any]:
    """The problem in integers, as `fxremat.planner.published.moccasin_intervals` reads it.

    Bytes are rounded so that what fits in these units fits in bytes.
    """
    model, ops = call.model, range(call.model.n)
    unit = max(1, budget // BYTE_PARTS)
    tick = max(1e-9, model.problem.base_time_us) / TIME_PARTS
    stages = [[op] for op in ops]
    for stage, again in enumerate(all_runs(model)):
        for op in again:
            stages[op].append(stage)
    left = call.deadline.left()
    return {
        "stages": stages,
        "reads": model.reads,
        "shares": [[_shares(model, op, first, unit) for first in (True, False)] for op in ops],
        "writer": model.writer,
        "kept": model.is_output,
        "bytes": [-(-size // unit) for size in model.bytes],
        "workspace": [-(-size // unit) for size in model.workspace],
        "room": max(0, (budget - model.problem.resident_bytes) // unit),
        "cost": [round(time / tick) for time in model.time],
        "hint": _hint(call),
        "runs": constants.MOCCASIN_RUNS,
        "work": constants.MOCCASIN_WORK,
        "seconds": None if left == float("inf") else max(0.0, left),
    }


def _hint(call: Incumbent) -> list[list[int]] | None:
    """The stages in which each op runs in the best plan, if no op runs too often there."""
    if not call.fits():
        return None
    runs = StageSchedule(call.model, call.runs).runs
    return None if any(len(stages) > constants.MOCCASIN_RUNS for stages in runs) else runs


def _shares(model: IndexedProblem, op: int, first: bool, unit: int) -> list[tuple[int, int]]:
    """Reads that the op may write over, and how many bytes of them."""
    pairs = pairs_apart(model, op, first)
    return [(read, min(model.bytes[read], model.bytes[write]) // unit) for read, write in pairs]


def _answers(question: dict[str, Any], deadline: Deadline) -> Iterator[list[ExtraRun]]:
    """The schedules that CP-SAT finds, one after the other, each better than those before."""
    # -P keeps the script's folder out of the way of modules of the same names.
    command = [sys.executable, "-P", moccasin_intervals.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        threading.Thread(target=_stop_in_time, args=(process, deadline), daemon=True).start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # of a process that failed, or was stopped, meanwhile
                json.dump(question, process.stdin)
                process.stdin.close()
            for line in process.stdout:
                yield [(op, stage) for op, stage in json.loads(line)]
            if process.wait() != 0 and deadline.running():
                said = "" if process.stderr is None else process.stderr.read()
                raise ProblemRefused(
                    f"solver {NAME!r} failed; use another solver. CP-SAT's process said:\n{said}"
                )
        finally:
            process.kill()


def _stop_in_time(process: subprocess.Popen[str], deadline: Deadline) -> None:
    """End the process when the clock stops."""
    while process.poll() is None:
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            if not deadline.running():
                process.kill()
