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
from fxremat.compiling.costs import cost_model
from fxremat.compiling.draft import Draft
from fxremat.compiling.pipeline import FINISH, PREPARE, Runner
from fxremat.compiling.reporting import refusal_of, report_of
from fxremat.compiling.request import Request
from fxremat.compiling.searching.candidates import Judge
from fxremat.compiling.searching.planning import Planning
from fxremat.compiling.searching.search import Search
from fxremat.compiling.stage_times import StageTimes
from fxremat.passes.halves import Halves


@dataclass(frozen=True)
class Partitioner(compat.CustomPartitionerFn):
    """Joint graph to (forward, backward), planned for ``request``.

    They are not made ready for the compiler where only the plan is asked for.
    """

    request: Request
    version: str
    plan_only: bool = False

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Halves:
        """Called once per joint graph; raises fxremat's errors.

        `InfeasibleBudget` where not even the candidate of least peak fits the budget,
        `VerificationFailed` where the judge finds a mistake of ours.
        """
        current = session.STATE.current or session.begin()

        def as_torch_does(module: fx.GraphModule) -> Halves:
            return compat.torch_partition(module, joint_inputs, **kwargs)

        if not any(compat.is_tangent(n) for n in gm.graph.nodes):
            return as_torch_does(gm)
        draft = Draft(
            gm,
            kwargs["num_fwd_outputs"],
            tuple(kwargs.get("static_lifetime_input_indices") or ()),
            as_torch_does,
        )
        return self._planned(draft, current)

    def _planned(self, draft: Draft, current: session.Session) -> Halves:
        """The halves of the best candidate; its report goes to the session."""
        request = self.request
        times = StageTimes({"trace": time.perf_counter() - current.started})
        if request.budget_bytes is not None:
            compat.plan_for_sizes_seen(draft.module.graph)
        costs = cost_model(request, draft.module.graph, f"graph {current.graph}")
        runner = Runner(costs, times)
        prepared = runner.run("prepare", PREPARE, draft)
        judge = Judge(runner, self.plan_only)
        found = Search(runner, Planning(request, times), judge, prepared).run()
        refusal = refusal_of(found, request)
        if refusal is None and not self.plan_only:
            found.judged.hand_over()
            runner.run("kernels", FINISH, found.judged.draft)
        current.report = report_of(found, request, current.graph, times.seconds)
        if refusal is not None:
            raise refusal
        if current.study is not None:
            current.study(found, runner)
        return found.judged.draft.halves

    def uuid(self) -> str:
        """Everything the partition depends on, as text."""
        return repr((self.version, dataclasses.astuple(self.request)))
