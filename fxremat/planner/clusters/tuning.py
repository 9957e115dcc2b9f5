"""What bounds H-Rockmate's clusters: sizes, options, budgets and programmes.

`python -m benchmarks.constants` shows what each is worth, halved and doubled.
"""

from __future__ import annotations

# -- cluster_problem ---------------------------------------------------------------

CLUSTER_PAUSES = (0.0, 0.5, 1.0)
"""Bytes of the pause, as a part of what is held at most."""
CLUSTER_LENGTHS = (0.0, 0.5, 1.0)
CLUSTER_WORK_PER_OP, CLUSTER_MOST_WORK = 6_000, 400_000
"""Work of one eviction path, in the units of `StageSchedule.work` (about a microsecond each)."""

# -- decomposition -----------------------------------------------------------------

CUT_LEAST, CUT_MOST = 0.5, 1.6
"""Sizes of clusters, as parts of the average."""
CUT_EVEN = 1e-3
"""What a cluster of half the average size costs, as a part of the bytes that cross a cut."""

# -- chain -------------------------------------------------------------------------

CHAIN_MOST_FIXED = 0.5
"""Part of the bytes saved for the backward that may be fixed before it is no chain any more."""
CHAIN_LARGE = 20
"""A block of more ops than this must not have more than half of them all. A problem of fewer is
a chain even if its backward reads the values of one block only."""

# -- hrockmate ---------------------------------------------------------------------

HROCKMATE_LEAF = 24
"""Forward ops of a cluster that is not cut again."""
HROCKMATE_MOST_CLUSTERS, HROCKMATE_FEWEST_CLUSTERS = 12, 6
HROCKMATE_MOST_OPTIONS = 60
HROCKMATE_GRID = (0.75, 0.5, 0.25, 0.0)
"""Budgets of a cluster, between its least peak found and that of keep-all."""
HROCKMATE_FEW = 5
"""Options of a cluster that the programme with repeats has in any case."""
HROCKMATE_NODES, HROCKMATE_INNER_NODES = 400, 30
HROCKMATE_GAP = 1e-4
HROCKMATE_LEAF_ROUNDS = 3
"""Sets of moments tried for a budget of a cluster that is not cut again."""
HROCKMATE_ROUNDS = 3
"""Programmes with less and less room, where the schedule needs more than the budget."""
HROCKMATE_MORE_ROOM = 0.04
"""Part of the budget by which it is exceeded to find a schedule to begin with."""
HROCKMATE_REPAIR = 200_000
"""Work to evict from a schedule that does not fit, in the units of `StageSchedule.work`."""
