"""The numbers that bound the search of one graph, and where each of them comes from.

Where no figure decides, the docstring gives the argument. Each number trades dry runs, which take
most of the time of planning (docs/design/search.md), for bytes or time of the plan.
"""

from __future__ import annotations

from fxremat.core.constants import MEASURABLE

CLOSE_ENOUGH = 2 * MEASURABLE
"""Of the aim: a plan this near below it is not improved any further. A formula: each of the two is
known to no more than `MEASURABLE`. Where candidates take so much more than the least that was
planned, variants are chosen anew. A plan that used the rest could keep two more percent of the
bytes; looking for it takes at least one dry run more. Sizes this near fit alike: a few blocks tell
the size of the whole to as much (tests/test_fit.py)."""
NEAR_PEAK = 0.75
"""Of the aim: where a plan takes as much, its order is held. Elsewhere Inductor's own order may
take a third more than planned, and costs no time."""
DRY_RUNS = 24
"""How many candidates are evaluated under the aim, and again for the least peak, of one graph and
of a step of several. An attempt under the aim has a third of them: the least peak of a small ResNet
was found with 7."""
BUDGET_PARTS = 64
"""A budget that nobody asked for is a whole number of such parts of the device's memory, so that
what other programs take now makes no other plan; two parts of what is there are left to others."""
UNIT_SAVED, UNIT_BALANCES = 3, (0.0, 0.25, 0.5, 4.0)
"""How many limits of what a graph of a step saves plans are offered for, between the least and all;
and how much is held between its halves where the least peak is looked for, in parts of its own. A
GPT-2 of two graphs is planned alike with three and with six limits, since what a step leaves is
used."""
LONG_S = 5.0
"""Seconds: a stage of planning that takes longer says so. Users are told of progress within ten
seconds, after which they turn to something else (Nielsen, "Usability Engineering", 1993)."""
