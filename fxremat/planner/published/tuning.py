"""What bounds the solvers of papers: grids of their tables, options and tries."""

from __future__ import annotations

import math

# -- pofo_block_costs --------------------------------------------------------------

POFO_BLOCK_MOST_SENT = 5
"""Values of one block among which those that are sent are chosen."""
POFO_BLOCK_MOST_WAYS = 60

# -- energy ------------------------------------------------------------------------

ENERGY_RATIOS = (math.inf, 4.0, 1.5, 1.0, 0.5, 0.0)
"""A value may move if computing it again costs so many times what moving it does."""

# -- pofo_table --------------------------------------------------------------------

POFO_TABLE_SLOTS = (200, 25, 25, 1)
POFO_TABLE_CAPPED = (100, 16, 16, 8)
"""Slots of the bytes kept, of the time of transfers that leave and that come, and of the bytes
sent; these where the host may have no room for all."""
POFO_TABLE_COARSER = (0.8, 0.9, 0.9, 0.9)
POFO_TABLE_MOST_STATES = 3_000
"""States in front of one block; where there are more, slots are made coarser."""
POFO_TABLE_LONGEST = 24
"""Blocks of one segment that is recomputed."""
POFO_TABLE_ENDS = 3
"""Answers taken from the states of one block."""
POFO_TABLE_LEFT = (1.0, 0.0)
"""Parts of what still leaves at the turn that may have to be waited for: by the programme all of
it, truly what is in the way of the backward."""

# -- pofo --------------------------------------------------------------------------

POFO_MOST_BLOCKS = 60
POFO_BLOCK_OPS = (1, 3, 8)
"""Forward ops per block, on average, that merging goes for."""
POFO_TRIES = ((0.0, 1.0), (0.05, 0.5), (0.1, 2.0))
"""Bytes that the programme is not told of, in units of the largest value that may be sent, and
the worth of a byte: see `Programme`."""
POFO_OVER = (0.1, 0.3, 0.6, 1.0)
"""Bytes too many that it is told of where no plan fits, as a part of those that the best has."""
POFO_ANSWERS = 8
"""Answers of one programme that are placed."""

# -- moccasin ----------------------------------------------------------------------

MOCCASIN_MOST_RUNS = 3
"""Runs of an op, its first among them; with two, good schedules are lost too often."""
MOCCASIN_WORK = 60.0
"""CP-SAT's own, repeatable measure of effort: about seconds of one thread."""
MOCCASIN_BYTES, MOCCASIN_TIMES = 1 << 24, 1 << 40
"""Parts into which budget and base time are divided at most: CP-SAT computes in integers."""
MOCCASIN_GLANCE = 0.1
"""Seconds between two looks at the clock."""

# -- rockmate ----------------------------------------------------------------------

ROCKMATE_BLOCK_OPS = (1, 8, 24)
"""Forward ops per block, on average, that merging goes for."""

# -- rotor_table -------------------------------------------------------------------

ROTOR_TABLE_SLOTS = 500
ROTOR_TABLE_MOST_SLOTS = 4_000
ROTOR_TABLE_CELLS = 5_000_000
"""Cells of the table that are worth more than `ROTOR_TABLE_SLOTS`."""

# -- block_options -----------------------------------------------------------------

BLOCK_GRID = 10
"""Numbers of bytes held for which the integer programme is solved."""
BLOCK_NODES = 2_000
BLOCK_MOST_OPTIONS = 40
"""Options of one block; the table takes time in proportion to them."""

# -- rotor -------------------------------------------------------------------------

ROTOR_MOST_BLOCKS = 100
ROTOR_MOST_PLANS = 250
"""Plans of one table that are replayed."""
