"""Every number that tunes the planner and its solvers, with where it comes from.

`python -m benchmarks.constants` halves and doubles each of them. What it found on GPT, ResNet and
U-Net is named as the sweep (docs/benchmarks.md): changes in added time, in points of the time of
store-all. Limits count nodes, rounds and work before they count seconds; work is in the units of
`StageSchedule.work`, of about a microsecond. What a paper's own code sets stands where it is used.
"""

from __future__ import annotations

from fxremat.core import constants as core

# -- when a plan is good enough ----------------------------------------------------

GAP = core.MEASURABLE / 10
"""Gap to which programmes are solved that choose and prove nothing, as a part of the time of
store-all: a tenth of what can be measured."""
RELAXATION_GAP = GAP / 100
"""The same for programmes that prove a bound, a hundredth of that: it is part of the gap shown."""
LESS = 0.96
"""The next smaller budget to ask for, where a plan does not fit or is to be lower. A choice of
variants is planned by the solver itself where a quick plan is as near to the best one, or to the
budget: `auto` adds up to 4 % less time than a quick plan (docs/benchmarks.md, K_ENCDEC4: 1.3)."""

# -- time --------------------------------------------------------------------------

SECONDS = 0.33
"""Time limit of `auto` where the caller gives none, times the root of the number of ops. A formula:
that is small against the time to compile a graph of so many ops, which grows as their number."""

# -- integer programmes ------------------------------------------------------------

NODES = 400
"""Nodes of the search tree of a relaxation over one program point; an eighth for several points,
and a dozen times as many for small programmes, which should not meet a limit."""
MANY_COLUMNS = 4_000
"""With half as many, a programme is solved to the end; with more, near its linear relaxation only,
since a solution takes minutes then and seldom is a better one."""
MOST_RUNS = 20_000
"""Repeats, of an op in a stage, that Checkmate's full programme may choose from; the time to solve
it grows faster than their number."""
POINTS = 12
"""Program points of one relaxation at most, a quarter of which is added in one round; clusters
of one level of H-Rockmate at most. `benchmarks.planner`, auto: with
half as many, plans of CM_UNET and ResNet stay, that of K_ENCDEC4 at 40 % takes 0.08 points less."""

# -- local search ------------------------------------------------------------------

WORK, WORK_PER_OP = 1_000_000, 6_000
"""Work of one eviction path. A formula: six milliseconds per op, but at most a second and a tenth
of that per op, so that the whole grows less than linearly."""
LEVELS = 16
"""Peaks between store-all and the least one at which schedules are improved. `benchmarks.planner`,
greedy at 60 and 40 % on seven problems: with 24 six of the fourteen plans take longer, that of
K_ENCDEC4 at 40 % by 0.7 points, and one takes less."""
TRIES = 40
"""Tries in vain before a search gives up. Sweep: less than 0.04 by half, no change by double."""
KEEP_EVERY = 8
"""Evictions until runs that became needless are left out. Sweep: -0.5 by half, +0.1 by double, and
the least peak moves the other way."""
NOISE = 0.5
"""Standard deviation of the logarithm by which repairs rank gaps at random. Sweep: no change by
half, +1.4 by double. Without it K_ENCDEC4 at 40 % takes 1.4 points more (`benchmarks.planner`)."""
HALVES = (0.0, 0.5, 1.0)
"""Nothing, half and all of what no formula gives. Of the weight of a gap's length in its rank:
sweep, +0.1 by half. Of the bytes that may be needed while a part of a problem waits, and of those
that POFO's programme does not see."""
FEW_OPS = 20
"""So few ops are not cut into parts, and half as many are planned exactly. It is the size of a
cluster in HiRemate's code (`PartitionerBottomToTop`, ``max_estimate_per_sub_graph=20``)."""

# -- fronts and variants -----------------------------------------------------------

FRONT_POINTS = 24
"""Plans that are improved for a front of peak and time: as many as a picture shows apart."""
APART = 64
"""Program points that are added together are at least this part of the schedule apart.
`benchmarks.planner`, auto: with 16 K_ENCDEC4 at 40 % takes 0.11 points more."""
TRIED_OPS = 5_000
"""Ops of all problems that are tried to improve a choice of variants: they decide the least peak,
and elsewhere seldom improve the choice."""
MOST_SOLVED = 2
"""Choices of each kind, within the budget and a little over it, that the solver itself plans."""
REMEMBERED = 8
"""Problems that are remembered: one step has a few, each asked for under many budgets."""

# -- published solvers -------------------------------------------------------------

MOST_BLOCKS = 100
"""Blocks of a chain; where there are more, neighbours are merged."""
MOST_OPTIONS = 60
"""Options of one block of a chain; tables and programmes take time in proportion to them."""
SLOTS = (200, 25, 25, 8)
"""POFO: slots of the bytes kept, of the time of transfers that leave and that come, and of the
bytes sent."""
MOST_STATES = 3_000
"""POFO: states in front of one block; where there are more, slots are made coarser. A tenth of them
gives the same plans for GPT at 40, 30 and 25 % (`benchmarks.planner`, with a link of 25 GB/s)."""
MOCCASIN_RUNS = 3
"""Runs of an op, its first among them; with two, good schedules are lost too often."""
MOCCASIN_WORK = 60.0
"""CP-SAT's own, repeatable measure of effort: about seconds of one thread."""

# -- addresses ---------------------------------------------------------------------

ADDRESS_BUFFERS = 60_000
"""Buffers that all greedy orders together place, but one order at least: 20,000 take seconds."""
