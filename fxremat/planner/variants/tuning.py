"""What bounds the choice of variants: programmes, rounds and tries.

`python -m benchmarks.constants` shows what each is worth, halved and doubled.
"""

from __future__ import annotations

# -- choice_milp -------------------------------------------------------------------

CHOICE_NODES = 1
"""Of the search tree, without restarts: the heuristics at the root find the choice, and what comes
after mostly raises the bound, which proves nothing here."""
CHOICE_GAP, CHOICE_GAP_OF_LEAST = 1e-3, 1e-2
"""Of keep-all's time, and of the least peak."""
CHOICE_LITTLE = 1e-3
"""What time counts where the peak is to be least."""

# -- choose_and_plan ---------------------------------------------------------------

SEARCH_ROUNDS = 5
SEARCH_MANY_COLUMNS = 6_000
"""Of a MILP after the second: it takes minutes, and seldom finds something better."""
SEARCH_LESS = 0.96
"""Of the MILP's budget where what is left of its choice does not fit: it sees moments only."""
SEARCH_IN_VAIN, SEARCH_IN_VAIN_OF_LEAST = 1, 2
"""Choices in a row that are no better than one that fits: then no more are looked for. With one
variant more or less most of what the next ones would find is found sooner."""
SEARCH_PER_ROUND, SEARCH_APART = 3, 64
"""Highest stages of a schedule that become moments, and the part of it they are apart."""
SEARCH_CLOSE = 0.03
"""Of the time of the best choice: choices so near to it are planned with the solver as well."""
SEARCH_A_LITTLE = 0.05
"""Of the budget: choices that are over it by no more are planned with the solver if faster."""
SEARCH_MOST_SOLVED = 2
SEARCH_TRIED_OPS = 5_000
"""Ops of all problems that are tried by taking one variant more, or one less. Where nothing fits,
they decide the least peak; elsewhere they seldom improve the choice."""
SEARCH_HOPELESS = 1.25
"""Times the budget: a choice whose plan is so far over it is not improved: that gains a tenth."""
SEARCH_ALIKE = 2
"""Equal variants that are tried in vain, one after the other, before the rest are left out."""
SEARCH_SETTLED = 2e-3
"""Of the time of keep-all: a choice so near to it is not improved."""
