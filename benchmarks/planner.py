"""Plan every problem of a directory and print added time at fractions of the keep-all peak.

    python -m benchmarks.planner DIR_OF_PROBLEM_JSONS [NAME ...]

Columns: name, ops, seconds for the whole pool, least peak found and proven bound (percent of
keep-all), then added time in percent at fractions of the keep-all peak, as "added>bound", the
bound proven; a "*" says that they are the same to 0.01 points ("-": nothing fits).
"""

from __future__ import annotations

import sys
from pathlib import Path

from fxremat.core.problem import Problem, load_problem
from fxremat.core.timeline import replay
from fxremat.planner import solve

CLOSE = 0.01
FRACTIONS = (90, 80, 66, 60, 50, 40, 33, 25, 20)


def row(name: str, problem: Problem, solver: str = "auto") -> str:
    """One line of the table."""
    full = replay(problem, problem.base_steps()).peak_bytes
    least = solve(problem, 0, solver)
    bound = 100 * (least.peak_bound_bytes or 0) / full
    cells = [_added(problem, full * percent // 100, solver) for percent in FRACTIONS]
    head = f"{name:14} {len(problem.ops):5} {least.seconds:6.2f}"
    return f"{head} {100 * least.peak_bytes / full:6.2f} {bound:6.2f}  " + " ".join(cells)


def _added(problem: Problem, budget: int, solver: str) -> str:
    plan = solve(problem, budget, solver)
    if plan.peak_bytes > budget:
        return f"{'-':>15}"
    added = 100 * (plan.time_us / problem.base_time_us - 1)
    bound = 100 * ((plan.time_bound_us or problem.base_time_us) / problem.base_time_us - 1)
    return f"{added:7.3f}{'*':8}" if added - bound < CLOSE else f"{added:7.3f}>{bound:7.3f}"


def main(arguments: list[str]) -> None:
    """Print the table for the problems of a directory."""
    directory, *names = arguments
    print(f"{'problem':14} {'ops':>5} {'s':>6} {'least':>6} {'bound':>6}  ", end="")
    print(" ".join(f"{f'{percent} %':>15}" for percent in FRACTIONS))
    for path in sorted(Path(directory).glob("*.json")):
        if not names or path.stem in names:
            print(row(path.stem, load_problem(str(path))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
