"""Searches from anew, each with another order of trying buffers and a little more patience.

A wrong choice at the top costs a search all of its tries. Many short searches that differ find
what one long search does not (Gomes, Selman and Kautz, "Boosting Combinatorial Search Through
Randomization", AAAI 1998). The seeds are 0, 1, 2 and so on: the same question, the same answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.placing import limits
from benchmarks.placing.search import Outcome, Search
from benchmarks.placing.valleys import Valleys
from fxremat.planner.addresses import Sections
from fxremat.planner.deadline import Deadline


@dataclass(frozen=True)
class Found:
    """The outcome of all searches together, the offsets in bytes, and the effort that it took."""

    outcome: Outcome
    offsets: tuple[int, ...]
    effort: int


def search_within(sections: Sections, capacity: int, effort: int, deadline: Deadline) -> Found:
    """Offsets within ``capacity`` bytes, if one of the searches finds some.

    ``effort`` bounds that of all searches together (`benchmarks.placing.limits`).

    The ways to rank take turns: by bytes times sections, and by bytes.
    """
    valleys = Valleys(sections)
    patience = limits.TRIES_PER_BUFFER * len(sections.size)
    spent, seed = 0, 0
    while spent < effort and deadline.running():
        for rank in _ranks(sections, seed):
            search = Search(sections, capacity, valleys, rank)
            outcome = search.run(int(patience), effort - spent, deadline)
            spent += max(1, search.effort)
            if outcome is not Outcome.STOPPED:
                return Found(outcome, tuple(search.skyline.offset), spent)
        seed += 1
        patience *= limits.TRIES_GROWTH
    return Found(Outcome.STOPPED, (), spent)


def _ranks(sections: Sections, seed: int) -> list[list[int]]:
    """For each way to rank, the place of every buffer; seed 0 leaves the worth as it is."""
    chance = random.Random(seed)
    columns = zip(sections.begin, sections.end, sections.size, strict=True)
    factors = [1 + limits.JITTER * chance.random() * (seed > 0) for _ in sections.size]
    area = [size * (end - begin) for begin, end, size in columns]
    return [
        _places([worth * factor for worth, factor in zip(worths, factors, strict=True)])
        for worths in (area, sections.size)
    ]


def _places(worths: list[float]) -> list[int]:
    """The place of each buffer when those of most worth come first."""
    places = [0] * len(worths)
    order = sorted(range(len(worths)), key=lambda buffer: -worths[buffer])
    for place, buffer in enumerate(order):
        places[buffer] = place
    return places
