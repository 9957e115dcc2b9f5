"""The passes in order, and what runs them.

    PREPARE   the joint graph as torch gives it  ->  the joint graph to plan
    PLAN      with the variants of a candidate   ->  its problem
    APPLY     with the plan of a candidate       ->  forward and backward module
    BEGIN     a candidate that may be taken      ->  the same, and its own kernels in the making
    FINISH    the candidate that was taken       ->  what Inductor compiles
    EXPLAIN   the same, where only plans count   ->  what runs uncompiled

Torch's own partition is a candidate, too: AS_TORCH, and DONATE where its backward is to write over
what was saved. Candidates, and which of them is taken: `fxremat.compile.search.search`.

A pass knows nothing of the others. `Use` says how it is made of a draft and what of its result
goes into the next; `Runner` alone times, logs and has the judge look at what each has done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxremat.compile import verification as judging
from fxremat.compile.cost_model import CostModel, MemoryEstimation, cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.request import Policy, Request
from fxremat.compile.stage_times import StageTimes
from fxremat.compile.verification import prepared
from fxremat.passes.accumulation import Accumulation
from fxremat.passes.base import Changed, Pass
from fxremat.passes.gradient_sums import GradientSums
from fxremat.passes.halves import Cut, CutAsTorch, DonateSaved
from fxremat.passes.inplace import WriteInPlace
from fxremat.passes.joint_graph import CleanUp, JointGraph
from fxremat.passes.offload import AddBeforePutting
from fxremat.passes.recompute import ApplyPlan
from fxremat.passes.user_tags import ObeyMustRecompute, ProtectMutatedInputs
from fxremat.passes.variants.chunks.inductor_kernels import (
    BeginRows,
    CompileRows,
    InterpretRows,
    LayOutRows,
)
from fxremat.passes.variants.insertion import TakeVariants
from fxremat.verify.preparation import Rights

log = logging.getLogger(__name__)

Take = Callable[[Draft, Changed], Draft]


def _same(draft: Draft, changed: Changed) -> Draft:
    return draft


def _joint(draft: Draft, changed: Changed) -> Draft:
    return replace(draft, joint=changed.data)


def _variants(draft: Draft, changed: Changed) -> Draft:
    joint, taken = changed.data
    return replace(draft, module=changed.graph_module, joint=joint, taken=taken)


def _estimate(draft: Draft, changed: Changed) -> Draft:
    return replace(draft, estimate=changed.data)


def _rewritten(draft: Draft, changed: Changed) -> Draft:
    return replace(draft, module=changed.graph_module, rewritten=changed.data)


def _halves(draft: Draft, changed: Changed) -> Draft:
    return replace(draft, halves=changed.data)


def _always(request: Request) -> bool:
    return True


def _sums(request: Request) -> bool:
    return request.compiled and "sums" not in request.policy.disabled


def _in_place(request: Request) -> bool:
    return "inplace" not in request.policy.disabled


def _compiled(request: Request) -> bool:
    return request.compiled


@dataclass(frozen=True)
class Use:
    """A pass in its place: how it is made, what becomes of its result, how that is judged.

    The judge looks at the draft before the pass runs, and judges the draft after.
    Where ``halves`` are asked for it runs on the forward and then on the backward.
    """

    make: Callable[[Draft, CostModel], Pass]
    take: Take = _same
    when: Callable[[Request], bool] = _always
    judge: judging.Judge = judging.nothing
    halves: bool = False


PREPARE = (
    Use(lambda d, costs: CleanUp(), judge=prepared(CleanUp, Rights(merge=True))),
    Use(
        lambda d, costs: AddBeforePutting(),
        judge=prepared(AddBeforePutting, Rights(regroup=True)),
    ),
    Use(
        lambda d, costs: GradientSums(),
        when=_sums,
        judge=prepared(GradientSums, Rights(regroup=True)),
    ),
    Use(
        lambda d, costs: ObeyMustRecompute(d.num_forward_outputs),
        judge=prepared(ObeyMustRecompute, Rights()),
    ),
    Use(
        lambda d, costs: ProtectMutatedInputs(d.num_forward_outputs),
        judge=prepared(ProtectMutatedInputs, Rights(clone=True)),
    ),
    Use(
        lambda d, costs: Accumulation(
            d.num_forward_outputs, frozenset(costs.request.inputs.accumulated), frozenset(d.static)
        ),
        _joint,
        judge=prepared(Accumulation, Rights(give_up=True)),
    ),
)
PLAN = (
    Use(lambda d, costs: TakeVariants(d.joint, d.sites), _variants, judge=judging.stand_ins),
    Use(lambda d, costs: MemoryEstimation(costs, d.joint), _estimate),
)
APPLY = (
    Use(
        lambda d, costs: ApplyPlan(d.estimate, d.plan.steps, d.held),
        _rewritten,
        judge=judging.data_flow,
    ),
    Use(
        lambda d, costs: WriteInPlace(d.rewritten, d.num_forward_outputs),
        _rewritten,
        when=_in_place,
        judge=judging.writes,
    ),
    Use(
        lambda d, costs: Cut(d.rewritten, d.num_forward_outputs, d.static_names),
        _halves,
        judge=judging.halves,
    ),
    Use(lambda d, costs: LayOutRows(), when=_compiled, judge=judging.rows, halves=True),
)
AS_TORCH = (Use(lambda d, costs: CutAsTorch(d.partition), _halves, judge=judging.halves_of_torch),)
DONATE = (Use(lambda d, costs: DonateSaved(d.halves[1], d.num_forward_outputs)),)
BEGIN = (Use(lambda d, costs: BeginRows(), when=_compiled, halves=True),)
FINISH = (Use(lambda d, costs: CompileRows(), when=_compiled, halves=True),)
EXPLAIN = (Use(lambda d, costs: InterpretRows(), when=_compiled, halves=True),)


@dataclass(frozen=True)
class Runner:
    """Runs passes one after the other; the only place that times, logs and verifies them."""

    costs: CostModel
    times: StageTimes

    def run(self, stage: str, uses: Sequence[Use], draft: Draft) -> Draft:
        """What the passes make of the draft. Raises `VerificationFailed` where one is wrong."""
        request = self.costs.request
        for use in uses:
            if not use.when(request):
                continue
            verdict = self._look(use, draft)
            after = draft
            for module in draft.halves if use.halves else (draft.newest()[0],):
                after = use.take(after, self._call(stage, use.make(draft, self.costs), module))
            if request.policy.verify:
                with self.times.stage("verify"):
                    verdict(after)
            draft = after
        return draft

    def _look(self, use: Use, draft: Draft) -> judging.Verdict:
        """What will judge the pass, shown the draft before it."""
        if not self.costs.request.policy.verify:
            return lambda after: None
        with self.times.stage("verify"):
            return use.judge(draft)

    def _call(self, stage: str, one: Pass, module: fx.GraphModule) -> Changed:
        """The pass, with its contract where that is asked for."""
        verify = self.costs.request.policy.verify
        if verify:
            with self.times.stage("verify"):
                one.requires(module)
        with self.times.stage(stage):
            changed = one.call(module)
        if verify:
            with self.times.stage("verify"):
                one.ensures(changed.graph_module)
        if log.isEnabledFor(logging.DEBUG):
            code = changed.graph_module.print_readable(print_output=False)
            log.debug("after %s: %d nodes\n%s", one.name, len(module.graph.nodes), code)
        return changed


def prepare(module: fx.GraphModule, num_forward_outputs: int, *, fused: bool = False) -> JointGraph:
    """The joint graph as it is planned, where nothing more is asked for; changes the module.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    request = Request(policy=Policy(executor="inductor" if fused else "aot_eager"))
    costs = cost_model(request, module.graph, "prepared", measured=False)
    draft = Draft(module, num_forward_outputs)
    return Runner(costs, StageTimes()).run("prepare", PREPARE, draft).joint
