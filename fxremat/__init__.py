"""fxremat: a torch.compile backend that trains within a number of bytes.

    torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})

To plan without compiling there is `explain`, for a GPU that is not here `device.absent`, to find
the largest batch that fits `fit`; to look back `reports`, to measure `measure_peak`, for loggers
`metrics`, and `list_options` describes every option. `prepare` plans parts together that are
compiled one by one. `offload`, `accumulate_in_backward`, `step_in_backward` and `loss_only` change
a model before it is compiled; `optimizer_state_bytes` says what to reserve. `fxremat.integrations`
is for trainers. All errors are subclasses of `FxrematError`.
"""

from typing import TYPE_CHECKING

from fxremat.errors import (
    BudgetExceeded,
    CannotVary,
    FxrematError,
    GraphsDiffer,
    HostMemoryExceeded,
    InfeasibleBudget,
    InvalidOption,
    LeftOut,
    NeedsTriton,
    NotTraceable,
    PromiseBroken,
    RankMissing,
    SolverRefused,
    UnknownDevice,
    UnknownOption,
    UnsupportedDevice,
    VerificationFailed,
)
from fxremat.version import __version__

if TYPE_CHECKING:
    from fxremat.compile.session import reports
    from fxremat.logged_metrics import metrics
    from fxremat.memory.measured_peak import measure_peak
    from fxremat.memory.optimizers import optimizer_state_bytes
    from fxremat.options import list_options
    from fxremat.step.preparation import prepare
    from fxremat.training.accumulate import accumulate_in_backward
    from fxremat.training.loss_only import loss_only
    from fxremat.training.offload import offload
    from fxremat.training.step_in_backward import step_in_backward
    from fxremat.whatif import device
    from fxremat.whatif.batches import check_batches
    from fxremat.whatif.explanation import explain
    from fxremat.whatif.fit import fit

__all__ = [
    "BudgetExceeded",
    "CannotVary",
    "FxrematError",
    "GraphsDiffer",
    "HostMemoryExceeded",
    "InfeasibleBudget",
    "InvalidOption",
    "LeftOut",
    "NeedsTriton",
    "NotTraceable",
    "PromiseBroken",
    "RankMissing",
    "SolverRefused",
    "UnknownDevice",
    "UnknownOption",
    "UnsupportedDevice",
    "VerificationFailed",
    "__version__",
    "accumulate_in_backward",
    "check_batches",
    "device",
    "explain",
    "fit",
    "list_options",
    "loss_only",
    "measure_peak",
    "metrics",
    "offload",
    "optimizer_state_bytes",
    "prepare",
    "reports",
    "step_in_backward",
]

_LAZY = {
    "accumulate_in_backward": "fxremat.training.accumulate",
    "check_batches": "fxremat.whatif.batches",
    "explain": "fxremat.whatif.explanation",
    "fit": "fxremat.whatif.fit",
    "list_options": "fxremat.options",
    "loss_only": "fxremat.training.loss_only",
    "measure_peak": "fxremat.memory.measured_peak",
    "metrics": "fxremat.logged_metrics",
    "offload": "fxremat.training.offload",
    "optimizer_state_bytes": "fxremat.memory.optimizers",
    "prepare": "fxremat.step.preparation",
    "reports": "fxremat.compile.session",
    "step_in_backward": "fxremat.training.step_in_backward",
}


def __getattr__(name: str) -> object:
    """Public functions that need torch are imported when first used."""
    from importlib import import_module

    if name == "device":
        return import_module("fxremat.whatif.device")
    if name not in _LAZY:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
