"""For which results of a graph somebody has sent gradients, as its backward passes have shown.

A result that got none is compiled as if it were detached, from the next step on, where its gradient
of zeros would be a part of the budget that is worth planning for (`runtime.unsent_gradients`). The
graph must be one that may run again, should a gradient come late, and each input that needs a
gradient has to have one still: plain ``torch.compile`` gives one of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxremat.compat.tensors import is_view
from fxremat.core.constants import MUCH_UNUSED
from fxremat.passes.memory_estimation import nbytes
from fxremat.runtime.unsent_gradients import reads_all, results_of, writes_nothing


@dataclass(eq=False)
class SentGradients:
    """The places of results that a backward came for: of all, and of those with a gradient.

    Where one is sent that was ``left_out``, it is ``late``, and from then on none is left out. It
    ``is_settled`` whether more are.
    """

    asked: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    left_out: tuple[int, ...] = ()
    late: bool = False
    came_late: bool = False
    is_settled: bool = False

    def see(self, place_of: Mapping[int, int], gradients: Sequence[object]) -> None:
        """A backward begins. Where the gradient of each result is, ``place_of`` says."""
        self.asked |= place_of.keys()
        self.sent |= {k for k, place in place_of.items() if gradients[place] is not None}

    def changes(self, gm: fx.GraphModule, limit_bytes: int | None) -> bool:
        """Whether other results of a Dynamo graph are left out from now on, for a budget."""
        if self.late:
            changed, self.left_out = bool(self.left_out), ()
            self.came_late = True
            self.late, self.is_settled = False, True
            return changed
        if self.is_settled or limit_bytes is None or not self.asked:
            return False
        self.is_settled = True
        of = dict(enumerate(results_of(gm)))
        values = {k: of[k].meta["example_value"] for k in self.asked - self.sent}
        unsent = {k: nbytes(value) for k, value in values.items() if not is_view(value)}
        if sum(unsent.values()) <= MUCH_UNUSED * limit_bytes or not writes_nothing(gm):
            return False
        if not reads_all(gm, (of[k] for k in of.keys() - unsent)):
            return False
        self.left_out = tuple(sorted({*self.left_out, *unsent}))
        return True
