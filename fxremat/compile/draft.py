"""A graph on its way through the passes: the joint graph, what is planned of it, its halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat.core.problem import Problem
from fxremat.core.schedule import Step
from fxremat.passes.halves import Halves, Rewritten
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.variants.insertion import InsertedVariant, Site

NOT_YET: Any = None


@dataclass(frozen=True)
class Draft:
    """A graph, and what the passes have made of it so far, in this order.

    What no pass has made yet is None. ``static`` are the positions of inputs that stay where they
    are from step to step; ``partition`` is torch's own; ``plan_only`` says that nothing of it will
    be compiled. ``sites`` and ``planned`` say what is asked of the passes that come next: the steps
    of a plan, and at which of them its order is held, None: at all. ``taken`` are the variants that
    stand in the joint graph.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    static: tuple[int, ...] = ()
    partition: Callable[[fx.GraphModule], Halves] = NOT_YET
    plan_only: bool = False
    joint: JointGraph = NOT_YET
    sites: tuple[Site, ...] = ()
    taken: tuple[InsertedVariant, ...] = ()
    estimate: Estimate = NOT_YET
    planned: tuple[tuple[Step, ...], frozenset[int] | None] = NOT_YET
    rewritten: Rewritten = NOT_YET
    halves: Halves = NOT_YET

    @property
    def problem(self) -> Problem:
        """What is planned: the ops and the values of the graph."""
        return self.estimate.problem

    @property
    def static_names(self) -> tuple[str, ...]:
        """The static inputs, by the names of their nodes."""
        primals = self.joint.primals
        return tuple(primals[index].name for index in self.static if index < len(primals))

    @property
    def saved(self) -> list[fx.Node]:
        """The nodes of the forward that it keeps for the backward, inputs not among them."""
        results: Any = self.halves[0].graph.output_node().args[0]
        kept = [n for n in results[self.num_forward_outputs :] if isinstance(n, fx.Node)]
        return [node for node in kept if node.op != "placeholder"]
