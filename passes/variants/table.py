"""The table of operator variants: each row a rule, by name.

A row finds the sites of a joint graph where an op, or several, may take another variant (see
`insertion`); the planner decides where it does. Exact rows compute the same, bit for bit or up to
rounding. Lossy rows store something inexactly and are used only if that is
allowed. A row that saves nothing beside the others, or with which training diverged, is tried only
if it is named, or all are; the row says which figures show it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxremat.passes.variants import (
    convolutions,
    from_outputs,
    lossy_saved,
    packed_bits,
    pool_gradient,
)
from fxremat.passes.variants.attention import fused
from fxremat.passes.variants.chunks import rules
from fxremat.passes.variants.insertion import Rule

ALL = "all"
"""It stands for the names of all rows."""

RULES: tuple[Rule, ...] = (
    *rules.RULES,
    *fused.RULES,
    *pool_gradient.RULES,
    *convolutions.RULES,
    *from_outputs.RULES,
    *packed_bits.RULES,
    *lossy_saved.RULES,
)


def rules_named(names: Iterable[str] | None, *, allow_lossy: bool) -> tuple[Rule, ...]:
    """The rows of these names, without the lossy ones where they are not allowed.

    None are those that are tried by default, and (`ALL`,) is all rows.
    """
    wanted = None if names is None else set(names)
    return tuple(
        rule
        for rule in RULES
        if (rule.by_default if wanted is None else not wanted.isdisjoint((rule.name, ALL)))
        and (allow_lossy or not rule.lossy)
    )
