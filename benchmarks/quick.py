"""The figures of the criteria: least peak above the parameters of two GPTs under fxremat.

    python -m benchmarks.quick [--models gpt16,gpt6] [--budget-mib 40]

`--budget-mib` is the total budget (parameters included) of a second run.
"""

import torch

from .commands import parser_for
from .models import build
from .rows import MIB
from .training import Training, prepare
from .ways import VARIANTS

LIMITS_MIB = {"gpt16": 24.0, "gpt6": 60.0}


def describe(name: str, what: str, training: Training) -> str:
    """One line: measured and promised peak, above what is held before the step."""
    peak = training.measure()
    above = (peak.peak_bytes - peak.start_bytes) / MIB
    assert training.report is not None
    promised = (training.report["predicted_peak_bytes"] - peak.start_bytes) / MIB
    budget = training.report["budget_bytes"]
    verdict = "obeyed" if peak.peak_bytes <= budget else "OVER BUDGET"
    return (
        f"{name} {what}: {above:.1f} MiB above the parameters (promised {promised:.1f}, "
        f"limit {LIMITS_MIB.get(name, float('nan')):.0f}); total {peak.peak_bytes / MIB:.1f} of "
        f"{budget / MIB:.1f} MiB, {verdict}; compiled in {training.compile_seconds:.0f} s"
    )


def run(name: str, budget_mib: float | None) -> None:
    """The least budget, and the one given."""
    model, arguments = build(name)
    training = prepare(VARIANTS["fxremat@min"], model, arguments)
    print(describe(name, "at the minimum", training), flush=True)
    if budget_mib is not None:
        training = prepare(VARIANTS["fxremat@knob"], model, arguments, int(budget_mib * MIB))
        print(describe(name, f"at {budget_mib:g} MiB", training), flush=True)


def main() -> None:
    """Run and print."""
    parser = parser_for("benchmarks.quick", __doc__)
    parser.add_argument("--models", default=",".join(LIMITS_MIB))
    parser.add_argument("--budget-mib", type=float)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models.split(","):
        run(name, options.budget_mib)


if __name__ == "__main__":
    main()
