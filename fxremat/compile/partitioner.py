"""The partitioner that Inductor (or AOTAutograd) calls with the joint graph.

Inductor pickles the object into its cache keys and does not call it when a cache answers. So
it is frozen plain data that holds everything a plan depends on, and nothing else. What plans is
imported when a graph is planned: with full caches nothing of it is needed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from fxremat.compat.configuration import CustomPartitionerFn
from fxremat.compat.joint_graph import is_tangent
from fxremat.compat.partitioning import torch_partition
from fxremat.compile import session
from fxremat.compile.request import Request

if TYPE_CHECKING:
    from fxremat.passes.halves import Halves


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Joint graph to (forward, backward), planned for ``request``.

    Where only the plan is asked for, they are made ready to run uncompiled.
    """

    request: Request
    version: str
    plan_only: bool = False

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Halves:
        """Called once per joint graph; raises fxremat's errors as `planned` does."""
        from fxremat.compile.draft import Draft
        from fxremat.compile.planned import planned

        current = session.STATE.current or session.begin()

        def as_torch_does(module: fx.GraphModule) -> Halves:
            return torch_partition(module, joint_inputs, **kwargs)

        if not any(is_tangent(n) for n in gm.graph.nodes):
            return as_torch_does(gm)
        draft = Draft(
            gm,
            kwargs["num_fwd_outputs"],
            tuple(kwargs.get("static_lifetime_input_indices") or ()),
            as_torch_does,
            self.plan_only,
        )
        return planned(draft, self.request, current)

    def uuid(self) -> str:
        """Everything the partition depends on, as text."""
        return repr((self.version, dataclasses.astuple(self.request)))
