"""Places of the runs of a graph that wait for their backward. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class HasUnits(Protocol):
    """The runs of one graph, as they were planned."""

    @property
    def units(self) -> tuple[Any, ...]:
        """What the planner knows of the run at each place, where it knows that."""
        ...


@dataclass(eq=False)
class _Waiting:
    """A run that waits; it is one of these."""

    runs: HasUnits


@dataclass
class Places:
    """The runs of a graph that wait, each at the lowest place that was free when it came.

    Graphs of one frame share places: blocks that differ in what they are given.
    """

    taken: dict[int, _Waiting] = field(default_factory=dict)

    def free(self) -> int:
        """The lowest place that no run has."""
        return next(place for place in range(len(self.taken) + 1) if place not in self.taken)

    def first_units(self) -> tuple[tuple[Any, ...], ...]:
        """What the planner knows of the runs that wait now; nothing where it does not of all.

        Of the graph of each it is what its runs take at each place.
        """
        found = []
        for place in range(len(self.taken)):
            units = self.taken[place].runs.units if place in self.taken else ()
            if place >= len(units):
                return ()
            found.append(units)
        return tuple(found)

    def take(self, place: int, runs: HasUnits) -> Callable[[], None]:
        """A run has the place from now on; it leaves when what is given back is called."""
        run = self.taken[place] = _Waiting(runs)

        def leave() -> None:
            if self.taken.get(place) is run:
                del self.taken[place]

        return leave
