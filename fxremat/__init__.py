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
    FxrematError,
    InfeasibleBudget,
    InvalidOption,
    PromiseBroken,
    SolverRefused,
    VerificationFailed,
)
from fxremat.version import __version__

if TYPE_CHECKING:
    from fxremat.compiling.session import reports
    from fxremat.cost.peak import measure_peak
    from fxremat.explaining import explain
    from fxremat.figures import metrics
    from fxremat.fitting import fit
    from fxremat.model.accumulating import accumulate_in_backward
    from fxremat.model.loss_only import loss_only
    from fxremat.model.offloading import offload
    from fxremat.model.optimizer_bytes import optimizer_state_bytes
    from fxremat.model.stepping import step_in_backward
    from fxremat.options import list_options
    from fxremat.preparing import prepare

__all__ = [
    "BudgetExceeded",
    "FxrematError",
    "InfeasibleBudget",
    "InvalidOption",
    "PromiseBroken",
    "SolverRefused",
    "VerificationFailed",
    "__version__",
    "accumulate_in_backward",
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
    "accumulate_in_backward": "fxremat.model.accumulating",
    "explain": "fxremat.explaining",
    "fit": "fxremat.fitting",
    "list_options": "fxremat.options",
    "loss_only": "fxremat.model.loss_only",
    "measure_peak": "fxremat.cost.peak",
    "metrics": "fxremat.figures",
    "offload": "fxremat.model.offloading",
    "optimizer_state_bytes": "fxremat.model.optimizer_bytes",
    "prepare": "fxremat.preparing",
    "reports": "fxremat.compiling.session",
    "step_in_backward": "fxremat.model.stepping",
}


def __getattr__(name: str) -> object:
    """Public functions that need torch are imported when first used."""
    from importlib import import_module

    if name == "device":
        return import_module("fxremat.device")
    if name not in _LAZY:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
