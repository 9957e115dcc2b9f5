"""What bounds the integer programmes: moments, rounds, nodes and gaps.

`python -m benchmarks.constants` shows what each is worth, halved and doubled.
"""

from __future__ import annotations

# -- highs -------------------------------------------------------------------------

HIGHS_GAP = 1e-6

# -- moments_relaxation ------------------------------------------------------------

RELAXATION_FEW_COLUMNS, RELAXATION_MANY_COLUMNS = 1_500, 4_000
"""With few, the MILP is solved to the end; with many, near its linear relaxation only."""
RELAXATION_NODES, RELAXATION_FEW_NODES, RELAXATION_ROOT = 400, 50, 1
"""For one moment, for several, and for several that leave bytes free, which prove nothing."""
RELAXATION_GAP = 1e-5
"""Of what is added to the time of keep-all."""
RELAXATION_CLOSE = 1e-4
"""Of the time of keep-all: a choice near the relaxation that is so good is not improved."""
RELAXATION_SHORT = 1
"""Stages from a moment to the next, in whose window the bytes of each run count."""

# -- checkmate ---------------------------------------------------------------------

CHECKMATE_MOST_RUNS = 20_000
"""Repeats, of an op in a stage, that the full programme may choose from; the time to solve it
grows faster than their number."""
CHECKMATE_NODES, CHECKMATE_PRUNED_NODES = 1000, 200
"""Nodes of the search tree per programme."""
CHECKMATE_HOPS = (1, 2, 3, 4, 6, 8)
CHECKMATE_PATIENCE = 2
"""Programmes in a row that find nothing better, before more hops are given up."""
CHECKMATE_ROUNDS = 4
"""Programmes with more and more stages in order; then all stages are, in as many again."""

# -- moments -----------------------------------------------------------------------

MOMENTS_ROUNDS = 12
MOMENTS_MOST_MOMENTS = 12
MOMENTS_PROOFS = 6
"""Rounds in which moments are added as they are."""
MOMENTS_PROOF_PART = 0.75
"""Of the time, for these rounds."""
MOMENTS_QUICK_ROUNDS = 2
"""Rounds from what the quick solver found; where these do not prove a plan, that of the greedy
solver joins, which takes longer to find."""
MOMENTS_STRICT_ROUNDS, MOMENTS_EASED = 3, 2.0
"""After so many rounds, a plan may be so many times as far from its bound: programmes of many
moments take seconds each."""
MOMENTS_CHOICE_PART = 0.5
"""Of the gap that is good enough: a choice may be off by as much, for its plan is dearer still."""
MOMENTS_PER_ROUND = 3
"""Stages over the budget that become moments in one round."""
MOMENTS_REPAIR = 200_000
"""Work, in the units of `StageSchedule.work`, to evict from a schedule that does not fit."""
