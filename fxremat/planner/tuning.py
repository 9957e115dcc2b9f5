"""What bounds the planner as a whole: seconds, and when a plan is good enough.

`python -m benchmarks.constants` shows what each is worth, halved and doubled.
"""

from __future__ import annotations

# -- auto --------------------------------------------------------------------------

AUTO_CLOSE, AUTO_ENOUGH = 5e-3, 1e-2
"""Of the time of keep-all: where a plan is so near to its bound, the solver over moments stops, and
no further one is asked. Measured times do not tell such plans apart."""
AUTO_FEW_RUNS = 8_000
"""Repeats to choose from in a problem that the full programme of Checkmate mostly solves."""
AUTO_SECONDS, AUTO_SECONDS_PER_OP, AUTO_MOST_SECONDS = 3.0, 0.008, 20.0
"""Time limit where the caller gives none: small against the time to compile such a graph."""
AUTO_FIRST_PART = 0.7
"""Of the time, for the solver over moments."""
AUTO_LITTLE_LESS = 0.96
"""Of the least peak found, a budget that is tried on a problem that is not small."""
AUTO_LEAST_PART = 0.5
"""Of the time left, for one budget on the way to the least."""
AUTO_NEAR = 0.01
"""Of the least peak: a bound so near to it is not worked on any more."""

# -- budget_front ------------------------------------------------------------------

FRONT_MOST_POINTS = 24
"""Peaks at which the greedy solver's plan is improved."""
FRONT_MOVING_POINTS = 12
"""Parts of the way between the two ends, where values may move."""
FRONT_SECONDS = 10.0
"""Time to improve plans where the caller gives none."""

# -- remembered --------------------------------------------------------------------

REMEMBERED = 8
"""Problems kept: one step has a few, each asked for under many budgets."""

# -- units -------------------------------------------------------------------------

UNITS_GAP, UNITS_NODES = 1e-3, 5_000
"""Of the time of all runs: as near to the bound as measured times can tell; and nodes at most."""
UNITS_NOT_SEEN = 0.01
"""Of the time of all runs: so little is no reason to compile one more version."""
UNITS_BYTES_PART = 1e-6
"""Of the budget: by so much HiGHS may exceed it, since it computes in floating point."""
