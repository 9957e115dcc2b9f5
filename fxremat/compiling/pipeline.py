"""The passes in order, and what runs them.

    PREPARE   the joint graph as torch gives it  ->  the joint graph to plan
    PLAN      with the variants of a candidate   ->  its problem
    APPLY     with the plan of a candidate       ->  forward and backward module
    FINISH    the candidate that was taken       ->  what Inductor compiles

Torch's own partition is a candidate, too: CUT_AS_TORCH, and DONATE where its backward is to write
over what was saved.

Candidates, and which of them is taken: `fxremat.compiling.search`. A pass makes a new draft of a
draft and knows nothing of the others; `Runner` alone times, logs and has the judge look at what
each has done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxremat import compat
from fxremat.checking.aliasing import check_in_place
from fxremat.checking.data_flow import check_data_flow, check_split, check_waits
from fxremat.checking.halves import check_halves, check_rows
from fxremat.checking.variants import TakenVariant, check_variants
from fxremat.compiling.costs import CostModel, cost_model
from fxremat.compiling.draft import Draft
from fxremat.compiling.request import Request
from fxremat.compiling.stage_times import StageTimes
from fxremat.passes import inplace
from fxremat.passes.accumulation import accumulate
from fxremat.passes.gradient_sums import accumulate_sums
from fxremat.passes.joint_graph import JointGraph, read_joint_graph
from fxremat.passes.offload import add_before_putting
from fxremat.passes.recompute import apply_plan
from fxremat.passes.user_tags import obey_must_recompute, protect_mutated_inputs
from fxremat.passes.variants.chunks.inductor_kernels import compile_rows, suit_rows
from fxremat.passes.variants.insertion import InsertedVariant, take_and_tell
from fxremat.passes.variants.table import RULES

log = logging.getLogger(__name__)


def _always(request: Request) -> bool:
    return True


def _is_right(before: Draft, after: Draft) -> None:
    """Nothing to judge: what the pass did is judged with what comes later."""


@dataclass(frozen=True)
class Pass:
    """A step of the pipeline: what it does, when it is asked for, and how it is judged."""

    name: str
    run: Callable[[Draft, CostModel], Draft]
    when: Callable[[Request], bool] = _always
    judge: Callable[[Draft, Draft], None] = _is_right


def _clean_up(draft: Draft, costs: CostModel) -> Draft:
    compat.prepare_joint_graph(draft.module)
    return draft


def _add_before_putting(draft: Draft, costs: CostModel) -> Draft:
    add_before_putting(draft.module.graph)
    return draft


def _sum_gradients(draft: Draft, costs: CostModel) -> Draft:
    accumulate_sums(draft.module.graph)
    return draft


def _obey_tags(draft: Draft, costs: CostModel) -> Draft:
    joint = read_joint_graph(draft.module, draft.num_forward_outputs)
    changed = [obey_must_recompute(joint), protect_mutated_inputs(joint)]
    if any(changed):
        joint = read_joint_graph(draft.module, draft.num_forward_outputs)
    return replace(draft, joint=joint)


def _accumulate(draft: Draft, costs: CostModel) -> Draft:
    joint = accumulate(draft.joint, costs.request.accumulated, draft.static)
    return replace(draft, module=joint.module, joint=joint)


def _take_variants(draft: Draft, costs: CostModel) -> Draft:
    if not draft.sites:
        return draft
    joint, taken = take_and_tell(draft.joint, draft.sites)
    return replace(draft, module=joint.module, joint=joint, taken=taken)


def _estimate(draft: Draft, costs: CostModel) -> Draft:
    return replace(draft, estimate=costs.estimate(draft.joint))


def _apply_plan(draft: Draft, costs: CostModel) -> Draft:
    planned = apply_plan(draft.estimate, draft.plan.steps, hold=draft.holds_order)
    return replace(draft, planned=planned, rewritten=planned)


def _write_over(draft: Draft, costs: CostModel) -> Draft:
    written = inplace.rewrite(draft.planned, draft.num_forward_outputs)
    return replace(draft, rewritten=written.rewritten)


def _split(draft: Draft, costs: CostModel) -> Draft:
    module, saved = draft.rewritten.module, draft.rewritten.saved
    inputs = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
    halves = compat.extract_forward_backward(
        module,
        list(saved),
        num_fwd_outputs=draft.num_forward_outputs,
        static_inputs=[inputs[node.name] for node in draft.static_inputs],
    )
    return replace(draft, halves=halves)


def _cut_as_torch(draft: Draft, costs: CostModel) -> Draft:
    return replace(draft, halves=draft.partition(draft.joint.module))


def _donate(draft: Draft, costs: CostModel) -> Draft:
    """The backward writes over what was saved, as in a plain ``torch.compile``."""
    forward, backward = draft.halves
    compat.donate(backward, compat.donatable(forward, backward, draft.num_forward_outputs))
    compat.leave_layouts(forward)
    return draft


def _lay_out_rows(draft: Draft, costs: CostModel) -> Draft:
    for half in draft.halves:
        suit_rows(half)
    return draft


def _compile_rows(draft: Draft, costs: CostModel) -> Draft:
    for half in draft.halves:
        compile_rows(half)
    return draft


def _stand_ins_are_right(before: Draft, after: Draft) -> None:
    if not after.taken:
        return
    lossy = {rule.name for rule in RULES if rule.lossy}
    taken = [_told(one, lossy=one.rule in lossy) for one in after.taken]
    verdict = check_variants(
        before.joint.module.graph,
        after.joint.module.graph,
        taken,
        num_forward_outputs=before.num_forward_outputs,
    )
    for site, why in verdict.unchecked:
        log.info("%s was not tried on numbers: %s", site, why)


def _told(one: InsertedVariant, *, lossy: bool) -> TakenVariant:
    """What the judge is told of a variant: names alone."""
    pairs = [(old.name, new.name) for old, new in one.stand_ins.items()]
    pairs += [(old.name, one.again[new].name) for old, new in one.stand_ins.items()
              if new in one.again]  # fmt: skip
    late = frozenset(new.name for new in (*one.late, *one.again.values()))
    return TakenVariant(one.rule, one.name, tuple(pairs), lossy, late)


def _same_data_flow(before: Draft, after: Draft) -> None:
    mutated = [node.name for node in before.joint.mutated]
    check_data_flow(before.joint.module.graph, after.planned.module.graph, mutated)


def _nothing_lost(before: Draft, after: Draft) -> None:
    check_in_place(
        before.planned.module.graph,
        after.rewritten.module.graph,
        saved=[node.name for node in after.rewritten.saved],
        num_forward_outputs=after.num_forward_outputs,
    )


def _same_halves(before: Draft, after: Draft) -> None:
    cut = before.rewritten.module.graph
    check_waits(cut)
    check_split(after.halves[1].graph, [n.name for n in before.rewritten.saved])
    _halves_of(cut, after)


def _same_as_torch(before: Draft, after: Draft) -> None:
    _halves_of(before.joint.module.graph, after)


def _halves_of(cut: fx.Graph, after: Draft) -> None:
    forward, backward = after.halves
    check_halves(
        cut,
        forward.graph,
        backward.graph,
        num_forward_outputs=after.num_forward_outputs,
        mutated=[node.name for node in after.joint.mutated],
    )


def _rows_lie_as_said(before: Draft, after: Draft) -> None:
    for half in after.halves:
        check_rows(half.graph)


def _sums(request: Request) -> bool:
    return request.compiled and "sums" not in request.disabled


def _in_place(request: Request) -> bool:
    return "inplace" not in request.disabled


def _compiled(request: Request) -> bool:
    return request.compiled


PREPARE = (
    Pass("clean up", _clean_up),
    Pass("sums before leaving", _add_before_putting),
    Pass("gradient sums", _sum_gradients, when=_sums),
    Pass("user tags", _obey_tags),
    Pass("accumulation", _accumulate),
)
PLAN = (
    Pass("variants", _take_variants, judge=_stand_ins_are_right),
    Pass("memory estimation", _estimate),
)
APPLY = (
    Pass("recompute and offload", _apply_plan, judge=_same_data_flow),
    Pass("in place", _write_over, when=_in_place, judge=_nothing_lost),
    Pass("split", _split, judge=_same_halves),
    Pass("row layout", _lay_out_rows, when=_compiled, judge=_rows_lie_as_said),
)
CUT_AS_TORCH = (Pass("torch's partition", _cut_as_torch, judge=_same_as_torch),)
DONATE = (Pass("donated buffers", _donate),)
FINISH = (Pass("row kernels", _compile_rows, when=_compiled),)


@dataclass(frozen=True)
class Runner:
    """Runs passes one after the other; the only place that times, logs and verifies them."""

    costs: CostModel
    times: StageTimes

    def run(self, stage: str, passes: Sequence[Pass], draft: Draft) -> Draft:
        """What the passes make of the draft. Raises `VerificationFailed` where one is wrong."""
        request = self.costs.request
        for each in passes:
            if not each.when(request):
                continue
            with self.times.stage(stage):
                after = each.run(draft, self.costs)
            if request.verify:
                with self.times.stage("verify"):
                    each.judge(draft, after)
            _log(each, after)
            draft = after
        return draft


def prepare(module: fx.GraphModule, num_forward_outputs: int, *, fused: bool = False) -> JointGraph:
    """The joint graph as it is planned, where nothing more is asked for; changes the module.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    request = Request(executor="inductor" if fused else "aot_eager")
    costs = cost_model(request, module.graph, "prepared", measured=False)
    draft = Draft(module, num_forward_outputs)
    return Runner(costs, StageTimes()).run("prepare", PREPARE, draft).joint


def _log(each: Pass, draft: Draft) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    graphs = draft.newest()
    counts = " + ".join(str(len(module.graph.nodes)) for module in graphs)
    code = "\n".join(module.print_readable(print_output=False) for module in graphs)
    log.debug("after %s: %s nodes\n%s", each.name, counts, code)
