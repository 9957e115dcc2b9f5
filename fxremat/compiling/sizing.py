"""One joint graph at many sizes: traced once with symbols, then asked what it takes at each.

A plan is for one choice of sizes; a joint graph whose sizes are symbols stands for all of them.
`compat.sizes_at` gives the symbols their values, and estimate, planner and rehearsal then see the
problem of those sizes. Code is generated once for each way to cut the graph, and runs, on tensors
without memory, at any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fxremat import compat
from fxremat.compiling.costs import CostModel, cost_model
from fxremat.compiling.draft import Draft
from fxremat.compiling.pipeline import AS_TORCH, DONATE, PLAN, PREPARE, Runner
from fxremat.compiling.rehearsal import Scene, written
from fxremat.compiling.request import Request
from fxremat.compiling.searching.candidates import Judge, plain_bytes
from fxremat.compiling.searching.planning import Planning
from fxremat.compiling.searching.search import Found, Search
from fxremat.compiling.searching.torch_plan import plan_of_torch
from fxremat.compiling.stage_times import StageTimes

Sizes = Mapping[str, int]
"""What varies, by name, and how large it is."""


@dataclass(frozen=True)
class AsTorch:
    """Torch's own cut of the graph, and its code."""

    draft: Draft
    scene: Scene


@dataclass
class SymbolicStep:
    """A training step on symbols; ``names`` gives the name of what each symbol stands for."""

    prepared: Draft
    costs: CostModel
    names: Mapping[Any, str]
    given: Draft
    """As it was traced."""
    times: StageTimes = field(default_factory=StageTimes)
    torch_cut: AsTorch | None = None

    @contextmanager
    def at(self, sizes: Sizes) -> Iterator[None]:
        """Inside, everything is of these sizes."""
        with compat.sizes_at({symbol: sizes[name] for symbol, name in self.names.items()}):
            yield

    def _runner(self, request: Request) -> Runner:
        return Runner(replace(self.costs, request=request), self.times)

    def torch_peak_bytes(self, sizes: Sizes) -> int:
        """The peak with torch's own partition at these sizes, in what the budget counts."""
        with self.at(sizes):
            scene = self._as_torch().scene
            with self.times.stage("rehearse"):
                shown = scene.run(self.costs.device.type, self.costs.workspaces.blocks_of_call)
        return plain_bytes(shown, self.costs.request)

    def torch_time_us(self, sizes: Sizes) -> float:
        """The planned time of torch's own partition at these sizes, in microseconds."""
        with self.at(sizes):
            halves = self._as_torch().draft.halves
            estimated = self._runner(self.costs.request).run("estimate", PLAN, self.prepared)
            return plan_of_torch(replace(estimated, halves=halves)).time_us

    def _as_torch(self) -> AsTorch:
        """What torch does is not ours to judge."""
        if self.torch_cut is None:
            runner = self._runner(replace(self.costs.request, verify=False))
            cut = runner.run("apply", AS_TORCH, runner.run("estimate", PLAN, self.prepared))
            cut = runner.run("apply", DONATE, cut)
            with self.times.stage("rehearse"), compat.inductor_config.patch(UNTOUCHED):
                scene = written(*cut.halves, num_fwd_outputs=cut.num_forward_outputs)
            self.torch_cut = AsTorch(cut, scene)
        return self.torch_cut

    def with_numbers(self, sizes: Sizes) -> SymbolicStep:
        """The same step with its sizes as numbers, which variants need."""
        values = {symbol: sizes[name] for symbol, name in self.names.items()}
        module, kept = compat.with_numbers(self.given.module, values)
        static = tuple(kept.index(k) for k in self.given.static if k in kept)
        draft = Draft(module, self.given.num_forward_outputs, static, self.given.partition)
        request = self.costs.request
        made: SymbolicStep = compat.joint_passes(
            module, lambda: symbolic_step(draft, request, {}, self.costs.name)
        )
        return replace(made, times=self.times)

    def planned(self, budget_bytes: int) -> Found:
        """The best plan found for sizes that are numbers, and bytes of the graph alone.

        ``over`` where none was within them.
        """
        return self._search(budget_bytes).run()

    def least_expected(self) -> int:
        """Bytes that the plan of least peak is expected to take, for sizes that are numbers."""
        return self._search(NOTHING).least_expected()

    def _search(self, budget_bytes: int) -> Search:
        asked = self.costs.request
        request = replace(asked, budget_bytes=budget_bytes + asked.beside_bytes)
        runner = self._runner(request)
        planning = Planning(request, self.times)
        return Search(runner, planning, Judge(runner, plan_only=True), self.prepared)


UNTOUCHED = {
    "allow_buffer_reuse": True,
    compat.POST_GRAD_PASS: None,
    compat.SCHEDULER_PASS: None,
    compat.PARTITIONER: None,
}
"""Inductor's configuration as it is without us."""
NOTHING = 1
"""Bytes that no step is within: the answer is the least."""


def symbolic_step(draft: Draft, request: Request, given: Sizes, name: str) -> SymbolicStep:
    """Prepare a joint graph that was traced with the sizes ``given`` as symbols.

    Raises `KeyError` with the name of what is no symbol: the model fixes it.
    """
    graph = draft.module.graph
    costs = cost_model(request, graph, name)
    traced = replace(draft, module=compat.copy_module(draft.module))
    by_size = {size: what for what, size in given.items()}
    names = {
        symbol: by_size[size]
        for symbol, size in compat.symbols_seen(graph).items()
        if size in by_size
    }
    for what in given:
        if what not in names.values():
            raise KeyError(what)
    times = StageTimes()
    prepared = Runner(costs, times).run("prepare", PREPARE, draft)
    return SymbolicStep(prepared, costs, names, traced, times)
