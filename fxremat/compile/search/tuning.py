"""What bounds the search: what is near enough, what is out of reach, and how much is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE_ENOUGH = 0.02
"""Of the aim: a plan this near below it is not improved any further."""
NOT_SEEN = 0.01
"""Of the planned time: a plan faster by no more than this is no faster when it is measured."""
VARIANT_DOUBT = 0.03
"""Of the time of a variant's ops: their sum may be too low by as much, so it has to save more. Two
times of a call, taken on different occasions, differ by 5 %; one step of many calls by less."""
NEAR_PEAK = 0.75
"""Of the aim: where a plan takes as much, Inductor's own order may take too much."""
OF_SMALL = 16
"""Times as many bytes as it reads: what an op writes that could as well run far too early."""
FAR_ABOVE = 1.1
"""Times the aim, or the least that is planned: torch's partition, if planned above, is too high."""
OUT_OF_REACH = 1.1
"""Times the aim: where the quick solver's least is above it, so is that of other solvers."""
AS_PLANNED = 0.01
"""Of a planned peak: where a low plan takes more, its order is held near the peak alone, too."""
CHOSEN_ANEW = 0.05
"""Of the least planned peak: where so much more is taken, variants are chosen anew."""
MADE_ANEW = 3
"""Times a plan is made anew by what is live where it took too much."""
CHOICES = 4
"""Times variants are chosen where the quickest plan is to be expected under the aim."""
EXPECTED_ANEW = 5
"""Plans that are asked for until one is expected under the aim."""
EXPECTED_WRONG = 0.002
"""Of the aim: what is expected of a plan may be too little by as much."""
UNIT_SAVED, UNIT_BALANCES = 6, (0.0, 0.25, 0.5, 4.0)
"""Limits of what a unit saves, between the least and all, that plans are offered for; and how much
is held between its halves where the least peak is looked for, in parts of its own."""
MOST_STEP = 4
"""Times the last step: what the next one goes down by, at most."""
LOWEST_PERCENT = (108, 120)
"""Of the least planned peak: what other plans of low peak aim at."""


@dataclass(frozen=True)
class Rehearsals:
    """How many candidates may be judged: under the aim in one attempt and in all, and at least."""

    one_attempt: int
    under: int
    least: int


REHEARSALS = Rehearsals(one_attempt=7, under=24, least=24)
