"""What bounds the local search: tries, rounds and work.

`python -m benchmarks.constants` shows what each is worth, halved and doubled.
"""

from __future__ import annotations

# -- greedy ------------------------------------------------------------------------

GREEDY_MOST_PLANS = 64
"""Plans that `front` gives; `solve` chooses from all that were found."""

# -- repeated_changes --------------------------------------------------------------

REPEAT_REACH = 4
"""How far from the offset position an alike op may lie."""

# -- eviction_paths ----------------------------------------------------------------

PATH_KEEP_EVERY = 8
"""At least so many steps, until needless runs are looked for again."""
PATH_KEEP_EVERY_RUNS = 25
"""One more step for every so many extra runs: to look at them all takes time in proportion."""
PATH_GRAIN = 512
"""States are offered when the peak fell by this part of what it was at the start."""

# -- segment_starts ----------------------------------------------------------------

SEGMENT_WINDOW = 0.5
"""A cut may move by this part of a segment to where fewer bytes cross."""

# -- editable_schedule -------------------------------------------------------------

EVICTION_CEILING = 8.0
"""An eviction this many times dearer than the best so far is not worked out: what it spares
afterwards is seldom more."""
EVICTION_TRIES = 40
"""Gaps tried at one peak before it is given up."""

# -- level_sweep -------------------------------------------------------------------

SWEEP_LENGTHS = (0.0, 0.5, 1.0)
ADAPTED_NEAR = 0.01
"""Of the time of a plan: what it becomes in another problem is improved only if so near to it."""

# -- ruin_and_repair ---------------------------------------------------------------

RUIN_LENGTHS = (0.0, 0.0, 0.5, 1.0)
RUIN_NOISE = 0.5
RUIN_MOST_EVICTIONS = 40
RUIN_SLACK = 0.02
"""A repair is given up once it costs this part of the schedule's time more than before."""
RUIN_IN_VAIN = 40
"""Rounds in a row that win nothing, before the rest are left out: most are in vain where a problem
is small. Figures are in docs/benchmarks.md."""
POLISH_ROUNDS = 200
POLISH, POLISH_PER_OP = 600_000, 100
"""Work of `polish`, in the units of `StageSchedule.work`."""

# -- least_peak --------------------------------------------------------------------

EXACT_MOST_OPS = 10
EXACT_MOST_VALUES = 16
EXACT_MOST_NODES = 20_000
