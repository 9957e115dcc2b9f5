"""For which results of a graph somebody has sent gradients, as its backward passes have shown.

A result that got none is compiled as if it were detached, from the next step on, where its gradient
of zeros would be a part of the budget that is worth planning for (`runtime.unsent_gradients`). All
inputs that it is made of have a gradient still: plain ``torch.compile`` gives one of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxremat.core.constants import MUCH_UNUSED
from fxremat.passes.joint_graph import reached
from fxremat.passes.memory_estimation import nbytes
from fxremat.runtime.unsent_gradients import results_of


@dataclass(eq=False)
class SentGradients:
    """The places of results that a backward came for: of all, and of those with a gradient.

    Where one is sent that was ``left_out``, it is ``late``, and from then on none is left out.
    """

    asked: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    left_out: tuple[int, ...] = ()
    late: bool = False
    is_settled: bool = False

    def see(self, place_of: Mapping[int, int], gradients: Sequence[object]) -> None:
        """A backward begins. Where the gradient of each result is, ``place_of`` says."""
        self.asked |= place_of.keys()
        self.sent |= {k for k, place in place_of.items() if gradients[place] is not None}

    def changes(self, gm: fx.GraphModule, limit_bytes: int | None) -> bool:
        """Whether other results of a Dynamo graph are left out from now on, for a budget."""
        if self.late:
            changed, self.left_out = bool(self.left_out), ()
            self.late, self.is_settled = False, True
            return changed
        unsent = self.asked - self.sent
        if self.is_settled or limit_bytes is None or not unsent:
            return False
        of = dict(enumerate(results_of(gm)))
        size = sum(nbytes(of[k].meta["example_value"]) for k in unsent)
        left, kept = (
            _trained_inputs(of[k] for k in which) for which in (unsent, of.keys() - unsent)
        )
        if size <= MUCH_UNUSED * limit_bytes or not left <= kept:
            return False
        self.is_settled = True
        self.left_out = tuple(sorted({*self.left_out, *unsent}))
        return True


def _trained_inputs(results: Iterable[Any]) -> set[fx.Node]:
    """The inputs whose gradients those of the results are added to."""

    def is_trained(node: Any) -> bool:
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        return bool(getattr(value, "requires_grad", False))

    starts = filter(is_trained, results)
    made_of = reached(starts, lambda node: filter(is_trained, node.all_input_nodes))
    return {node for node in made_of if node.op == "placeholder"}
