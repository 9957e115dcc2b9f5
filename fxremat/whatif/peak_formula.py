"""The peak of a plan as an expression of the sizes that are symbols in its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxremat.compat.sizes import size_ranges, sizes_at
from fxremat.compile.dry_run.dry_run import written
from fxremat.compile.pipeline import PLAN, Runner
from fxremat.compile.search.search import Found
from fxremat.core.timeline import replay
from fxremat.whatif.peak_expression import PeakExpression, SizeRange, peak_expression


def expression_of(found: Found, runner: Runner) -> PeakExpression:
    """Allocated bytes at the peak of what was found, with what is held beside the graph.

    The code is generated once more and rehearsed at a few sizes; a plan that is not compiled is
    replayed. Raises `CannotVary` as `peak_expression` does.
    """
    judged, costs = found.judged, runner.costs
    ranges = size_ranges(judged.draft.joint.module.graph)
    symbols = {name: symbol for symbol, (name, _, _) in ranges.items()}
    held = costs.request.budget.held
    scene = None
    if costs.request.compiled:
        scene = written(*judged.draft.halves, num_fwd_outputs=judged.draft.num_forward_outputs)

    def live(sizes: Mapping[str, int]) -> tuple[int, ...]:
        with sizes_at({symbols[name]: size for name, size in sizes.items()}):
            shown: Any
            if scene is not None:
                shown = scene.run(costs.device.type, costs.workspaces.blocks_of_call)
            else:
                again = runner.run("estimate", PLAN, replace(found.plain, sites=judged.draft.sites))
                shown = replay(again.estimate.problem, judged.plan.steps)
        return tuple(held + nbytes for nbytes in shown.live_bytes)

    return peak_expression(live, [SizeRange(*one) for one in ranges.values()])
