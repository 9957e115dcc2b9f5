"""The partitioner that Inductor (or AOTAutograd) calls with the joint graph.

Inductor pickles the object into its cache keys and does not call it when a cache answers. So
it is frozen plain data that holds everything a plan depends on, and nothing else.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat import compat
from fxremat.compiling import session
from fxremat.compiling.pipeline import transform
from fxremat.compiling.request import Request


@dataclass(frozen=True)
class Partitioner(compat.CustomPartitionerFn):
    """Joint graph to (forward, backward), planned for ``request``."""

    request: Request
    version: str

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called once per joint graph; raises fxremat's errors."""
        current = session.STATE.current or session.begin()
        if not any(compat.is_tangent(n) for n in gm.graph.nodes):
            return compat.torch_partition(gm, joint_inputs, **kwargs)
        outcome = transform(
            gm,
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            static_input_indices=kwargs.get("static_lifetime_input_indices") or (),
            request=self.request,
            graph=current.graph,
            trace_seconds=time.perf_counter() - current.started,
        )
        current.report = outcome.report
        if outcome.refusal is not None:
            raise outcome.refusal
        return outcome.forward, outcome.backward

    def uuid(self) -> str:
        """Everything the partition depends on, as text."""
        return repr((self.version, dataclasses.astuple(self.request)))
