"""What the planner's constants are worth: each halved and doubled, the others left as they are.

    python -m benchmarks.constants --ask local --out benchmarks/results/constants.json
    python -m benchmarks.constants --ask variants --models gpt,resnet --budgets 50,33

For each value: the time that plans add to store-all, in points of its time, the least peak found,
in percent of store-all's, both on average over the models, and the seconds to plan, as a multiple
of those with the constants as they are. Budgets are percent of store-all's peak; where one cannot
be met, the plan of least peak counts. Plans are asked for as the rest of the planner does it:
`local` is the whole front of the local search, `variants` a choice of variants and its quick plan,
`auto` the default solver.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxremat.core.problem import Problem
from fxremat.core.timeline import store_all_peak
from fxremat.core.variants import take
from fxremat.planner import SolverOptions, constants, solve
from fxremat.planner.local import greedy

from .commands import write_json
from .machine import describe_machine
from .models import MODELS
from .variants import problem_of

FACTORS = (0.5, 2.0)
NEW = itertools.count()


@dataclass(frozen=True)
class Constant:
    """A number of `fxremat.planner.constants`, or one of several in a tuple."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    def value(self) -> float:
        """As it is now."""
        found: Any = getattr(constants, self.name)
        number: float = found if self.index is None else found[self.index]
        return number

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Another value while the context lasts; whole numbers stay whole, and at least 1."""
        before = getattr(constants, self.name)
        number = self.value() * factor
        new: Any = max(1, round(number)) if isinstance(self.value(), int) else number
        if self.index is not None:
            new = (*before[: self.index], new, *before[self.index + 1 :])
        setattr(constants, self.name, new)
        try:
            yield
        finally:
            setattr(constants, self.name, before)


@dataclass(frozen=True)
class Measure:
    """What came of one value, summed up over models and budgets."""

    constant: str
    value: float
    added_points: float
    least_percent: float
    seconds: float


def all_constants() -> list[Constant]:
    """Every number there is; those of tuples one by one, as far as they can be halved."""
    found: list[Constant] = []
    for name, value in vars(constants).items():
        if name.isupper() and isinstance(value, tuple):
            found += [Constant(name, index) for index, number in enumerate(value) if number]
        elif name.isupper():
            found.append(Constant(name))
    return found


Asked = Callable[[Problem, Sequence[int]], list[tuple[float, int]]]
"""(time, peak) of the plan for each budget, and of the one of least peak."""


def ask_local(problem: Problem, budgets: Sequence[int]) -> list[tuple[float, int]]:
    """The front of the local search."""
    plain = take(problem, ())
    front = greedy.whole_front(plain, SolverOptions())
    plans = [front.choose(budget) for budget in (*budgets, 0)]
    return [(plan.time_us, plan.peak_bytes) for plan in plans]


def ask_variants(problem: Problem, budgets: Sequence[int]) -> list[tuple[float, int]]:
    """The choice of variants, and its quick plan."""
    plans = [solve(problem, budget, "greedy", SolverOptions()) for budget in (*budgets, 0)]
    return [(plan.time_us, plan.peak_bytes) for plan in plans]


def ask_auto(problem: Problem, budgets: Sequence[int]) -> list[tuple[float, int]]:
    """The default solver without variants."""
    plain = take(problem, ())
    plans = [solve(plain, budget, "auto") for budget in (*budgets, 0)]
    return [(plan.time_us, plan.peak_bytes) for plan in plans]


ASK: dict[str, Asked] = {"local": ask_local, "variants": ask_variants, "auto": ask_auto}


def measure(asked: str, problems: Sequence[Problem], percents: Sequence[int]) -> tuple[float, ...]:
    """Points added, percent of the least peak, and seconds."""
    added, least, seconds = [], [], 0.0
    for known in problems:
        problem = replace(known, name=f"{known.name} {next(NEW)}")  # solvers remember problems
        plain = take(problem, ())
        full = store_all_peak(plain)
        started = time.process_time()
        found = ASK[asked](problem, [full * percent // 100 for percent in percents])
        seconds += time.process_time() - started
        added += [100 * (time_us / plain.base_time_us - 1) for time_us, _ in found[:-1]]
        least.append(100 * found[-1][1] / full)
    return sum(added) / len(added), sum(least) / len(least), seconds


def sweep(
    asked: str, problems: Sequence[Problem], percents: Sequence[int], only: str
) -> Iterator[Measure]:
    """As it is, then each constant with each factor."""
    yield Measure(f"{asked}, as it is", 1.0, *measure(asked, problems, percents))
    for constant in all_constants():
        for factor in FACTORS if only in str(constant) else ():
            with constant.scaled(factor):
                yield Measure(str(constant), constant.value(), *measure(asked, problems, percents))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each value, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ask", default=",".join(ASK))
    parser.add_argument("--models", default="gpt,llama,resnet,unet")
    parser.add_argument("--budgets", default="65,50,33")
    parser.add_argument("--only", default="", help="constants with this in their name")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    for word, known in ((given.ask, ASK), (given.models, MODELS)):
        unknown = sorted(set(word.split(",")) - set(known))
        if unknown:
            parser.error(f"unknown {unknown}; there are {', '.join(known)}")
    percents = [int(percent) for percent in given.budgets.split(",")]
    problems = [problem_of(name, "small", "cpu", False) for name in given.models.split(",")]
    results: dict[str, Any] = {"machine": describe_machine("cpu", 1), "budgets": percents}
    rows: list[dict[str, Any]] = results.setdefault("rows", [])
    for asked in given.ask.split(","):
        base: Measure | None = None
        for row in sweep(asked, problems, percents, given.only):
            base = base or row
            rows.append(asdict(row))
            print(
                f"{row.constant:48} {row.value:>10g}  added {row.added_points:7.3f} "
                f"({row.added_points - base.added_points:+.3f})  least {row.least_percent:6.2f} % "
                f"({row.least_percent - base.least_percent:+.2f})  "
                f"seconds x{row.seconds / base.seconds:.2f}",
                flush=True,
            )
    if given.out:
        write_json(given.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
