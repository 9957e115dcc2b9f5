"""The table of operator variants: each row a rule, by name.

A row finds the sites of a joint graph where an op, or several, may take another variant
(`fxremat.passes.variants.rule`); the planner decides where it does. Exact rows compute the same,
bit for bit or up to rounding. Lossy rows store something inexactly and are used only if that is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxremat.passes.variants import from_outputs, lossy_saved, packed_bits, pool_gradient
from fxremat.passes.variants.attention import fused
from fxremat.passes.variants.chunks import rules
from fxremat.passes.variants.convolutions import split_gradients, workspace
from fxremat.passes.variants.rule import Rule

RULES: tuple[Rule, ...] = (
    *rules.RULES,
    *fused.RULES,
    *pool_gradient.RULES,
    *split_gradients.RULES,
    *workspace.RULES,
    *from_outputs.RULES,
    *packed_bits.RULES,
    *lossy_saved.RULES,
)


def rules_named(names: Iterable[str] | None, *, allow_lossy: bool) -> tuple[Rule, ...]:
    """The rows of these names (None: all), without the lossy ones where they are not allowed."""
    wanted = None if names is None else set(names)
    return tuple(
        rule
        for rule in RULES
        if (wanted is None or rule.name in wanted) and (allow_lossy or not rule.lossy)
    )
