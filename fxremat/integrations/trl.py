"""TRL's trainers: the heads of their models as ops that a graph can hold.

TRL gives models a head that computes log-probabilities of the taken words in tiles, with kernels
and buffers of its own. Dynamo cannot trace it: the graph ends there, and what the tiles take is
outside of every plan. Inside of a graph the same numbers come from plain ops here, and it is the
planner that divides them into rows (`docs/variants.md`). Outside, in evaluation and for reference
models, TRL's own code runs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trl.trainer import utils as trl_utils

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 0,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: Collection[str] = OUTPUTS,
) -> tuple[Tensor | None, ...]:
    """For each row of ``hidden`` (rows, width): the log-probability of its target, and `OUTPUTS`.

    Logits are those of ``weight`` (words, width), times ``scale``, capped by ``softcap`` and
    divided by ``temperature``. Only log-probability and entropy have gradients; what ``outputs``
    does not name is None. ``chunk_size`` has no meaning here.
    """
    logits = F.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    logs = torch.log_softmax(logits, -1)
    taken = logs.gather(-1, targets[:, None]).squeeze(-1)
    fixed, still = logits.detach(), logs.detach()
    made = {
        "entropy": lambda: -(logs.exp() * logs).sum(-1),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * still, -1),
        "mean_logits": lambda: fixed.mean(-1),
        "is_top1": lambda: still.argmax(-1) == targets,
    }
    return taken, *(made[name]() if name in outputs else None for name in OUTPUTS)


class _Head:
    """In the place of TRL's function, which is called by its ``apply``."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def apply(self, *args: Any) -> Any:
        """By plain ops in a graph."""
        if torch.compiler.is_compiling():
            return head(*args)
        return self._own.apply(*args)


def use_plain_heads() -> None:
    """Have TRL's heads traced as plain ops from now on; again is no change."""
    own: Any = trl_utils._ChunkedLogProbFunction
    if isinstance(own, _Head):
        return
    trl_utils._ChunkedLogProbFunction = _Head(own)
    picks_rows: Any = trl_utils._use_triton

    def picks(device: torch.device) -> bool:
        """Rows that count are picked first; how many there are, a graph cannot know."""
        return not torch.compiler.is_compiling() and bool(picks_rows(device))

    trl_utils._use_triton = picks
