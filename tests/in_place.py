"""The verifier of graphs with calls that write over an operand, as the tests ask it."""

from __future__ import annotations

from fxremat.passes.halves import Rewritten
from fxremat.verify.aliasing import check_in_place


def judge(before: Rewritten, now: Rewritten, forward: int = 99) -> None:
    """Fail unless ``now`` computes what ``before`` does."""
    check_in_place(
        before.module.graph,
        now.module.graph,
        saved=[n.name for n in now.saved],
        num_forward_outputs=forward,
    )
