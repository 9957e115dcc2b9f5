"""The passes in order, and what runs them.

    PREPARE   the joint graph as torch gives it  ->  the joint graph to plan
    PLAN      with the variants of a candidate   ->  its problem
    APPLY     with the plan of a candidate       ->  forward and backward module
    BEGIN     a candidate that may be taken      ->  the same, and its own kernels in the making
    FINISH    the candidate that was taken       ->  what Inductor compiles
    EXPLAIN   the same, where only plans count   ->  what runs uncompiled

Torch's own partition is a candidate, too: AS_TORCH, and DONATE where its backward is to write over
what was saved. Candidates, and which of them is taken: `fxremat.compile.search.search`.

A step makes a pass of what the draft says, has it run on the graph, and puts what it gave into the
next draft. What verifies the step stands beside it. `Runner` alone times, logs and verifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from fxremat.compat.joint_graph import mark_repeatable
from fxremat.compile import verification
from fxremat.compile.cost_model import CostModel, MemoryEstimation
from fxremat.compile.draft import Draft
from fxremat.compile.request import Request
from fxremat.compile.stage_times import StageTimes
from fxremat.compile.verification import Verifier
from fxremat.cost.second_runs import mark_functions
from fxremat.passes.accumulation import Accumulation
from fxremat.passes.base import Changed, Pass
from fxremat.passes.gradient_sums import GradientSums
from fxremat.passes.halves import Cut, CutAsTorch, DonateSaved
from fxremat.passes.inplace import WriteInPlace
from fxremat.passes.joint_graph import CleanUp
from fxremat.passes.offload import AddBeforePutting
from fxremat.passes.recompute import ApplyPlan
from fxremat.passes.user_tags import ObeyMustRecompute, ProtectMutatedInputs
from fxremat.passes.variants.chunks.inductor_kernels import CompileRows, LayOutRows
from fxremat.passes.variants.insertion import TakeVariants
from fxremat.verify.preparation import Rights

log = logging.getLogger(__name__)

RunPass = Callable[[Pass, fx.GraphModule], Changed]
"""Runs a pass on a graph; times and logs it, and checks its contract where that is asked for."""


@dataclass(frozen=True)
class PassStep:
    """A step of the pipeline: what it does, what verifies it, and ``when`` it is asked for.

    ``run_on`` gives the draft with what the pass gives. ``verifier`` is given the draft before the
    step, since some passes work in place; what it gives is called with the draft after, and raises
    `VerificationFailed` where the step is wrong. Without one, what the pass did is verified
    together with what comes later.
    """

    run_on: Callable[[Draft, CostModel, RunPass], Draft]
    verifier: Verifier | None = None
    when: Callable[[Request], bool] = lambda request: True


# --- the joint graph, in place ------------------------------------------------------------------


def in_place(
    by: type[Pass],
    rights: Rights | None = None,
    *,
    told_outputs: bool = False,
    when: Callable[[Request], bool] = lambda request: True,
) -> PassStep:
    """Runs a pass in place on the joint graph; it may be told how many outputs the forward has.

    It is verified to do nothing beyond its ``rights``, if these are said.
    """
    makes: Callable[..., Pass] = by

    def run_on(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        run(makes(draft.num_forward_outputs) if told_outputs else makes(), draft.module)
        return draft

    return PassStep(run_on, None if rights is None else verification.prepared(by, rights), when)


def mark(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """Calls that are not torch's and may run again are marked: the user says so, or it is seen."""
    graph, request = draft.module.graph, costs.request
    mark_repeatable(graph, request.policy.repeatable)
    mark_functions(graph, costs.device, here=request.device.card is None)
    return draft


def accumulate(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """Gradients are added to those that are there; the joint graph is read."""
    accumulated, static = costs.request.inputs.accumulated, frozenset(draft.static)
    one = Accumulation(draft.num_forward_outputs, frozenset(accumulated), static)
    return replace(draft, joint=run(one, draft.module).data)


# --- what is planned ----------------------------------------------------------------------------


def take(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """The variants that are asked for take the places of what they stand for."""
    changed = run(TakeVariants(draft.joint, draft.sites), draft.module)
    joint, taken = changed.data
    return replace(draft, module=changed.graph_module, joint=joint, taken=taken)


def estimate(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """The problem of the graph."""
    return replace(draft, estimate=run(MemoryEstimation(costs, draft.joint), draft.module).data)


# --- from a plan to the halves ------------------------------------------------------------------


def rewrite(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """The graph runs in the steps of the plan."""
    changed = run(ApplyPlan(draft.estimate, *draft.planned), draft.module)
    return replace(draft, module=changed.graph_module, rewritten=changed.data)


def write_over(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """Ops write over what nobody reads any more."""
    changed = run(WriteInPlace(draft.rewritten, draft.num_forward_outputs), draft.rewritten.module)
    return replace(draft, module=changed.graph_module, rewritten=changed.data)


def split(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """Forward and backward are graphs of their own."""
    one = Cut(draft.rewritten, draft.num_forward_outputs, draft.static_names)
    return replace(draft, halves=run(one, draft.rewritten.module).data)


def split_as_torch(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """The same, where torch would cut."""
    return replace(draft, halves=run(CutAsTorch(draft.partition), draft.module).data)


def donate(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
    """The backward writes over what was saved."""
    forward, backward = draft.halves
    run(DonateSaved(backward, draft.num_forward_outputs), forward)
    return draft


def _in_each_half(makes: Callable[[], Pass], verifier: Verifier | None = None) -> PassStep:
    """Runs a pass in place on the forward and then on the backward, if they are compiled."""

    def run_on(draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        for half in draft.halves:
            run(makes(), half)
        return draft

    return PassStep(run_on, verifier, lambda request: request.compiled)


PREPARE = (
    PassStep(mark),
    in_place(CleanUp, Rights(merge=True)),
    in_place(AddBeforePutting, Rights(regroup=True)),
    in_place(
        GradientSums,
        Rights(regroup=True),
        when=lambda request: request.compiled and "sums" not in request.policy.disabled,
    ),
    in_place(ObeyMustRecompute, Rights(), told_outputs=True),
    in_place(ProtectMutatedInputs, Rights(clone=True), told_outputs=True),
    PassStep(accumulate, verification.prepared(Accumulation, Rights(give_up=True))),
)
PLAN = (PassStep(take, verification.stand_ins), PassStep(estimate))
APPLY = (
    PassStep(rewrite, verification.data_flow),
    PassStep(
        write_over,
        verification.writes,
        when=lambda request: "inplace" not in request.policy.disabled,
    ),
    PassStep(split, verification.halves),
    _in_each_half(LayOutRows, verification.rows),
)
AS_TORCH = (PassStep(split_as_torch, verification.halves),)
DONATE = (PassStep(donate),)
BEGIN = (_in_each_half(partial(CompileRows, waits=False)),)
FINISH = (_in_each_half(CompileRows),)
EXPLAIN = (_in_each_half(partial(LayOutRows, fused=False)),)


@dataclass(frozen=True)
class Runner:
    """Runs steps one after the other; the only place that times, logs and verifies them."""

    costs: CostModel
    times: StageTimes

    def run(self, stage: str, steps: Sequence[PassStep], draft: Draft) -> Draft:
        """What the steps make of the draft. Raises `VerificationFailed` where one is wrong."""
        request = self.costs.request
        for step in steps:
            if not step.when(request):
                continue
            verdict = None
            if step.verifier is not None and request.policy.verify:
                with self.times.stage("verify"):
                    verdict = step.verifier(draft)
            draft = step.run_on(draft, self.costs, partial(self.run_pass, stage))
            if verdict is not None:
                with self.times.stage("verify"):
                    verdict(draft)
        return draft

    def run_pass(self, stage: str, one: Pass, module: fx.GraphModule) -> Changed:
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
