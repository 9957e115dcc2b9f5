"""The passes in order, and what runs them.

    PREPARE   the joint graph as torch gives it  ->  the joint graph to plan
    PLAN      with the variants of a candidate   ->  its problem
    APPLY     with the plan of a candidate       ->  forward and backward module
    BEGIN     a candidate that may be taken      ->  the same, and its own kernels in the making
    FINISH    the candidate that was taken       ->  what Inductor compiles
    EXPLAIN   the same, where only plans count   ->  what runs uncompiled

Torch's own partition is a candidate, too: AS_TORCH, and DONATE where its backward is to write over
what was saved. Candidates, and which of them is taken: `fxremat.compile.search.search`.

A step is an object: it makes a pass of what the draft says, has it run on the graph, and puts what
it gave into the next draft. What verifies the step stands beside it. `Runner` alone times, logs and
verifies.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from fxremat.compat.joint_graph import mark_repeatable
from fxremat.compile import verification
from fxremat.compile.cost_model import CostModel, MemoryEstimation, cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.request import Policy, Request
from fxremat.compile.stage_times import StageTimes
from fxremat.compile.verification import Verdict, Verifier, prepared
from fxremat.cost.second_runs import mark_functions
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

RunPass = Callable[[Pass, fx.GraphModule], Changed]
"""Runs a pass on a graph; times and logs it, and checks its contract where that is asked for."""


def _always(request: Request) -> bool:
    return True


def _sums(request: Request) -> bool:
    return request.compiled and "sums" not in request.policy.disabled


def _in_place(request: Request) -> bool:
    return "inplace" not in request.policy.disabled


def _compiled(request: Request) -> bool:
    return request.compiled


@dataclass(frozen=True)
class PassStep:
    """A step of the pipeline: what it does, what verifies it, and ``when`` it is asked for.

    ``verifier`` is given the draft before the step, since some passes work in place; what it gives
    is called with the draft after, and raises `VerificationFailed` where the step is wrong.
    """

    verifier: Verifier = verification.nothing
    when: Callable[[Request], bool] = _always

    @abstractmethod
    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        """The draft with what the pass gives."""


# --- the joint graph, in place ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InPlace(PassStep):
    """Runs a pass in place on the joint graph; it may be told how many outputs the forward has."""

    makes: Callable[..., Pass]
    told_outputs: bool = False

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        one = self.makes(draft.num_forward_outputs) if self.told_outputs else self.makes()
        run(one, draft.module)
        return draft


class Mark(PassStep):
    """Calls that are not torch's and may run again are marked: the user says so, or it is seen."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        graph, request = draft.module.graph, costs.request
        mark_repeatable(graph, request.policy.repeatable)
        mark_functions(graph, costs.device, here=request.device.card is None)
        return draft


class Accumulate(PassStep):
    """Gradients are added to those that are there; the joint graph is read."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        accumulated, static = costs.request.inputs.accumulated, frozenset(draft.static)
        one = Accumulation(draft.num_forward_outputs, frozenset(accumulated), static)
        return replace(draft, joint=run(one, draft.module).data)


# --- what is planned ----------------------------------------------------------------------------


class Take(PassStep):
    """The variants that are asked for take the places of what they stand for."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        changed = run(TakeVariants(draft.joint, draft.sites), draft.module)
        joint, taken = changed.data
        return replace(draft, module=changed.graph_module, joint=joint, taken=taken)


class EstimateMemory(PassStep):
    """The problem of the graph."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        return replace(draft, estimate=run(MemoryEstimation(costs, draft.joint), draft.module).data)


# --- from a plan to the halves ------------------------------------------------------------------


class Rewrite(PassStep):
    """The graph runs in the steps of the plan."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        planned = draft.planned
        changed = run(ApplyPlan(draft.estimate, planned.steps, planned.held), draft.module)
        return replace(draft, module=changed.graph_module, rewritten=changed.data)


class WriteOver(PassStep):
    """Ops write over what nobody reads any more."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        one = WriteInPlace(draft.rewritten, draft.num_forward_outputs)
        changed = run(one, draft.rewritten.module)
        return replace(draft, module=changed.graph_module, rewritten=changed.data)


class Split(PassStep):
    """Forward and backward are graphs of their own."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        one = Cut(draft.rewritten, draft.num_forward_outputs, draft.static_names)
        return replace(draft, halves=run(one, draft.rewritten.module).data)


class SplitAsTorch(PassStep):
    """The same, where torch would cut."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        return replace(draft, halves=run(CutAsTorch(draft.partition), draft.module).data)


class Donate(PassStep):
    """The backward writes over what was saved."""

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        forward, backward = draft.halves
        run(DonateSaved(backward, draft.num_forward_outputs), forward)
        return draft


@dataclass(frozen=True, kw_only=True)
class InEachHalf(PassStep):
    """Runs a pass in place on the forward and then on the backward."""

    makes: Callable[[], Pass]

    def run_on(self, draft: Draft, costs: CostModel, run: RunPass) -> Draft:
        for half in draft.halves:
            run(self.makes(), half)
        return draft


PREPARE = (
    Mark(),
    InPlace(prepared(CleanUp, Rights(merge=True)), makes=CleanUp),
    InPlace(prepared(AddBeforePutting, Rights(regroup=True)), makes=AddBeforePutting),
    InPlace(prepared(GradientSums, Rights(regroup=True)), makes=GradientSums, when=_sums),
    InPlace(prepared(ObeyMustRecompute, Rights()), makes=ObeyMustRecompute, told_outputs=True),
    InPlace(
        prepared(ProtectMutatedInputs, Rights(clone=True)),
        makes=ProtectMutatedInputs,
        told_outputs=True,
    ),
    Accumulate(prepared(Accumulation, Rights(give_up=True))),
)
PLAN = (Take(verification.stand_ins), EstimateMemory())
APPLY = (
    Rewrite(verification.data_flow),
    WriteOver(verification.writes, when=_in_place),
    Split(verification.halves),
    InEachHalf(verification.rows, makes=LayOutRows, when=_compiled),
)
AS_TORCH = (SplitAsTorch(verification.halves_of_torch),)
DONATE = (Donate(),)
BEGIN = (InEachHalf(makes=BeginRows, when=_compiled),)
FINISH = (InEachHalf(makes=CompileRows, when=_compiled),)
EXPLAIN = (InEachHalf(makes=InterpretRows, when=_compiled),)


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
            verdict = self._verdict(step, draft)
            draft = step.run_on(draft, self.costs, partial(self.run_pass, stage))
            if verdict is not None:
                with self.times.stage("verify"):
                    verdict(draft)
        return draft

    def _verdict(self, step: PassStep, draft: Draft) -> Verdict | None:
        """What verifies the draft after the step, shown the draft before it."""
        if not self.costs.request.policy.verify:
            return None
        with self.times.stage("verify"):
            return step.verifier(draft)

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


def prepare(module: fx.GraphModule, num_forward_outputs: int, *, fused: bool = False) -> JointGraph:
    """The joint graph as it is planned, where nothing more is asked for; changes the module.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    request = Request(policy=Policy(executor="inductor" if fused else "aot_eager"))
    costs = cost_model(request, module.graph, "prepared", measured=False)
    draft = Draft(module, num_forward_outputs)
    return Runner(costs, StageTimes()).run("prepare", PREPARE, draft).joint
