"""Every number that tunes the planner, with where it comes from.

`python -m benchmarks.constants` halves and doubles each of them. What it found on GPT, ResNet and
U-Net is named as the sweep (docs/benchmarks.md): changes in added time, in points of the time of
store-all. What is called chosen was not measured alone. Limits count nodes, rounds and work before
they count seconds; work is in the units of `StageSchedule.work`, of about a microsecond. Sizes of
the tables of published solvers stand where these are.
"""

from __future__ import annotations

# -- when a plan is good enough ----------------------------------------------------

NOT_SEEN = 0.01
"""Part of a time or of a peak that makes no difference: measured times of one step vary by it."""
GAP = 1e-3
"""Gap to which programmes are solved that choose and prove nothing, as a part of the time of
store-all: a tenth of what can be seen."""
RELAXATION_GAP = 1e-5
"""The same for programmes that prove a bound, a hundredth of that: it is part of the gap shown."""
LESS = 0.96
"""The next smaller budget to ask for, where a plan does not fit or is to be lower; chosen."""

# -- time --------------------------------------------------------------------------

SECONDS, SECONDS_PER_OP, MOST_SECONDS = 3.0, 0.008, 20.0
"""Time limit of `auto` where the caller gives none: small against the time to compile a graph of so
many ops."""
FIRST_PART = 0.7
"""Part of the time for the first of two phases; the second starts from what the first finds.
Chosen: on the recorded models the first ends before."""

# -- integer programmes ------------------------------------------------------------

PROGRAMME_NODES = 5_000
"""Nodes of the search tree for programmes that are small: a limit that none of them should meet."""
NODES = 400
"""Nodes for a relaxation over one program point; with several, an eighth. Chosen."""
FEW_COLUMNS, MANY_COLUMNS = 1_500, 4_000
"""With few, a programme is solved to the end; with many, near its linear relaxation only, since a
solution takes minutes then and seldom is a better one."""
POINTS = 12
"""Program points of one relaxation at most, and rounds in which they are added. Chosen."""

# -- local search ------------------------------------------------------------------

WORK, WORK_PER_OP = 1_000_000, 6_000
"""Work of one eviction path: six milliseconds per op, but at most a second and a tenth of that per
op, so that the whole grows less than linearly."""
LEVELS = 16
"""Peaks between store-all and the least one at which schedules are improved. Chosen."""
TRIES = 40
"""Tries in vain before a search gives up. Sweep: less than 0.04 by half, no change by double."""
KEEP_EVERY = 8
"""Evictions until runs that became needless are left out. Sweep: -0.5 by half, +0.1 by double, and
the least peak moves the other way."""
EVICTION_CEILING = 8.0
"""An eviction so many times dearer than the best one is not worked out. Sweep: +1.1 by half, no
change by double."""
NOISE = 0.5
"""Standard deviation of the logarithm by which repairs rank gaps at random. Sweep: no change by
half, +1.4 by double."""
LENGTHS = (0.0, 0.5, 1.0)
"""Powers of a gap's length by which its rank is divided: no weight, its root, all of it."""
EXACT_OPS = 10
"""Problems of so few ops are solved exactly. Sweep: no change."""

# -- fronts and variants -----------------------------------------------------------

FRONT_POINTS = 24
"""Plans that are improved for a front of peak and time: as many as a picture shows apart."""
APART = 64
"""Program points that are added together are at least this part of the schedule apart. Chosen."""
NEAR = 0.05
"""Choices of variants are planned by the solver itself if a quick plan is so near to the best one,
or to the budget: it may find them to be the best. Chosen."""
HOPELESS = 1.25
"""A choice of variants whose plan takes so many times the budget is not improved by one variant
more or less, which gains a tenth at most."""
TRIED_OPS = 5_000
"""Ops of all problems that are tried to improve a choice of variants. Chosen: they decide the least
peak, and elsewhere seldom improve the choice."""

# -- addresses ---------------------------------------------------------------------

ADDRESS_BUFFERS = 60_000
"""Buffers that all greedy orders together place, but one order at least: 20,000 take seconds."""
