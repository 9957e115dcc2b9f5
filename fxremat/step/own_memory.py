"""Where the graphs of a budget allocate, and gradients that lie there under the next forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from fxremat.core.layout import NOWHERE, OwnPools, StepLayout
from fxremat.memory.allocator.settings import AllocatorSettings
from fxremat.memory.arena import Arena
from fxremat.memory.reserved_bytes import keep_too_much
from fxremat.runtime.accumulation import will_be_added


@dataclass(eq=False)
class OwnMemory:
    """Where graphs allocate: their arena, and what each of the ``graphs`` by themselves takes.

    These take turns. The gradients in ``to_move`` lie where the next layout has something else.
    """

    arena: Arena | None = None
    graphs: tuple[OwnPools, ...] = ()
    to_move: list[torch.Tensor] = field(default_factory=list)
    in_turn: bool = False
    """Each gives back all that it has before another one runs: together they keep too much."""
    ran: StepLayout = NOWHERE

    def share(self, taken: OwnPools, settings: AllocatorSettings | None) -> None:
        """One more graph takes turns with the others."""
        self.graphs = *(one for one in self.graphs if one != taken), taken
        self.in_turn = settings is not None and keep_too_much(self.graphs, settings)

    def begin(self, layout: StepLayout) -> None:
        """A graph with this layout runs; no other one waits."""
        if self.arena is not None and layout is not self.ran:
            self.arena.in_turn = self.in_turn
            if self.in_turn:
                self.arena.rest(pool=True)
        self.ran = layout


def living_gradients(weights: Iterable[object]) -> list[torch.Tensor]:
    """Of parameters, but those whose gradients are added while a backward runs."""
    own = (x for x in weights if isinstance(x, nn.Parameter) and not will_be_added(x))
    return [one.grad for one in own if one.grad is not None]
