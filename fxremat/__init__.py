"""fxremat: a torch.compile backend that trains within a number of bytes.

torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})
"""

from typing import TYPE_CHECKING

from fxremat.errors import (
    FxrematError,
    InfeasibleBudget,
    InvalidOption,
    SolverRefused,
    VerificationFailed,
)
from fxremat.version import __version__

if TYPE_CHECKING:
    from fxremat.accumulating import accumulate_in_backward
    from fxremat.measure import measure_peak
    from fxremat.offloading import offload
    from fxremat.options import list_options
    from fxremat.report.explain import explain
    from fxremat.session import reports
    from fxremat.stepping import step_in_backward

__all__ = [
    "FxrematError",
    "InfeasibleBudget",
    "InvalidOption",
    "SolverRefused",
    "VerificationFailed",
    "__version__",
    "accumulate_in_backward",
    "explain",
    "list_options",
    "measure_peak",
    "offload",
    "reports",
    "step_in_backward",
]

_LAZY = {
    "accumulate_in_backward": "fxremat.accumulating",
    "explain": "fxremat.report.explain",
    "list_options": "fxremat.options",
    "measure_peak": "fxremat.measure",
    "offload": "fxremat.offloading",
    "reports": "fxremat.session",
    "step_in_backward": "fxremat.stepping",
}


def __getattr__(name: str) -> object:
    """Public functions that need torch are imported when first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
