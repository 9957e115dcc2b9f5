"""What an operator variant is: a rule, and the sites of a joint graph that it fits.

A site names nodes of the graph and can put other nodes beside them that compute the same. Nothing
that is there changes: who reads what is decided later, by the plan. A *stand-in* is a new node that
may be read in place of an old one.

    h ── gelu ── y ── ...                before
    h ── gelu ── y ── ...   h ── other ── y'      after `insert`, which returns {y: y'}

Sites that name the same old node exclude one another: at most one of them is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from fxremat.passes.joint_graph import JointGraph

StandIns = dict[fx.Node, fx.Node]


@dataclass(frozen=True)
class Site:
    """One occurrence of a rule, as one variant.

    ``name`` is unique in the graph, and the same in every run. ``insert`` puts the new nodes in,
    with ``meta["val"]``, where everything they read has been computed, and returns the stand-ins:
    sizes, strides and dtypes of old and new are the same. It may be given a copy of the graph:
    the second argument says which node there is which of the nodes that `find` was given.
    """

    rule: str
    name: str
    insert: Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], StandIns]
    backward_only: bool = False
    """Whether the stand-ins are for readers in the backward alone, and computed for these."""
    spares: fx.Node | None = None
    """The call whose workspace is all that the variant saves, if it is that."""


@dataclass(frozen=True)
class Rule:
    """A row of the table of variants. ``line`` says in one line what it is, for the user."""

    name: str
    line: str
    find: Callable[[JointGraph], Iterable[Site]]
    lossy: bool = False
    by_default: bool = True
    """Whether it is tried where no rules are named."""
