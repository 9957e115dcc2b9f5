"""Train a small GPT in eager mode, under torch.compile, and under a byte budget of fxremat.

    python -m benchmarks.demo [--budget-mib 20] [--steps 10]

Prints peak bytes, step time and losses of each side by side, and the plan; then what happens when
the budget cannot be met.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from .commands import parser_for
from .models import build
from .rows import format_table
from .training import IMPOSSIBLE_BYTES, Infeasible, Training, prepare
from .ways import VARIANTS

MIB = 2**20
BUDGET_PART = 0.5
TIMED_STEPS = 11


@dataclass(frozen=True)
class Outcome:
    """What one way of training costs, and what it learns."""

    name: str
    peak_bytes: int
    step_ms: float
    compile_seconds: float
    losses: list[float]

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            self.name,
            f"{self.peak_bytes / MIB:.1f}",
            f"{self.step_ms:.0f}",
            f"{self.compile_seconds:.0f}",
            f"{self.losses[0]:.5f}",
            f"{self.losses[-1]:.5f}",
        ]


def train(name: str, start: Callable[[], Training], steps: int) -> tuple[Outcome, Training]:
    """Compile, measure, then train for some steps."""
    print(f"{name} ...", flush=True)
    training = start()
    peak = training.measure().peak_bytes
    step_ms = 1e3 * median(training.time_steps(TIMED_STEPS))
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    losses = list(training.train(optimizer, steps))
    return Outcome(name, peak, step_ms, training.compile_seconds, losses), training


def starter(variant: str, budget: int | None = None) -> Callable[[], Training]:
    """A fresh copy of the model, to be compiled the variant's way."""

    def start() -> Training:
        torch.compiler.reset()
        return prepare(VARIANTS[variant], *build("gpt"), budget)

    return start


def refusal() -> str:
    """The error that an impossible budget gives."""
    try:
        starter("fxremat@knob", IMPOSSIBLE_BYTES)()
    except Infeasible as error:
        return error.message
    return "a budget of one MiB was met, which cannot be"


def main() -> None:
    """Run and print."""
    parser = parser_for("benchmarks.demo", __doc__)
    parser.add_argument("--budget-mib", type=float, help="default: half of torch.compile's peak")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    eager, _ = train("eager", starter("eager"), options.steps)
    compiled, _ = train("torch.compile", starter("compile"), options.steps)
    budget = int((options.budget_mib or BUDGET_PART * compiled.peak_bytes / MIB) * MIB)
    name = f'fxremat, memory_budget="{budget / MIB:.1f}MiB"'
    planned, training = train(name, starter("fxremat@knob", budget), options.steps)
    head = ["", "peak MiB", "step ms", "compile s", "first loss", "last loss"]
    print("\n" + format_table([head, *(o.cells() for o in (eager, compiled, planned))]))
    print(f"\n{training.explanation}\n\nAnd with a budget that cannot be met:\n{refusal()}")


if __name__ == "__main__":
    main()
