"""What the judge is shown of each pass: the draft before, and the draft after.

A `Judge` is given the draft before the pass runs, since some passes work in place, and gives what
judges the draft after: a `Verdict`, which raises `VerificationFailed` where the pass did something
wrong. The judge itself is `fxremat.verify`, which knows no pass and no draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps

from torch import fx

from fxremat.compile.draft import Draft
from fxremat.passes.base import Pass
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.passes.variants.table import RULES
from fxremat.verify.aliasing import check_in_place
from fxremat.verify.data_flow import check_data_flow, check_split, check_waits
from fxremat.verify.halves import check_halves, check_rows
from fxremat.verify.preparation import BeforePass, Rights
from fxremat.verify.variants import TakenVariant, check_variants

log = logging.getLogger(__name__)

Verdict = Callable[[Draft], None]
Judge = Callable[[Draft], Verdict]


def _of_both(compare: Callable[[Draft, Draft], None]) -> Judge:
    """The judge of a pass that leaves the graph before it as it was."""

    @wraps(compare)
    def judge(before: Draft) -> Verdict:
        return partial(compare, before)

    return judge


@_of_both
def nothing(before: Draft, after: Draft) -> None:
    """What the pass did is judged together with what comes later."""


def prepared(by: type[Pass], rights: Rights) -> Judge:
    """The pass works in place on the joint graph, and does nothing beyond its rights."""

    def judge(before: Draft) -> Verdict:
        seen = BeforePass(
            by.name,
            rights,
            before.module.graph,
            num_forward_outputs=before.num_forward_outputs,
        )

        def verdict(after: Draft) -> None:
            seen.check((after.joint or after).module.graph)

        return verdict

    return judge


@_of_both
def stand_ins(before: Draft, after: Draft) -> None:
    """Each variant computes what it stands for; numbers are tried where it is to be compiled."""
    lossy = {rule.name for rule in RULES if rule.lossy}
    verdict = check_variants(
        before.joint.module.graph,
        after.joint.module.graph,
        [_told(one, lossy=one.rule in lossy) for one in after.taken],
        num_forward_outputs=before.num_forward_outputs,
        numbers=not before.plan_only,
    )
    for site, why in verdict.unchecked:
        log.debug("%s was not tried on numbers: %s", site, why)


def _told(one: InsertedVariant, *, lossy: bool) -> TakenVariant:
    """What the judge is told of a variant: names alone."""
    pairs = [(old.name, new.name) for old, new in one.stand_ins.items()]
    for old, new in one.stand_ins.items():
        if new in one.backward_stand_ins:
            pairs.append((old.name, one.backward_stand_ins[new].name))
    late = frozenset(new.name for new in (*one.backward_only, *one.backward_stand_ins.values()))
    return TakenVariant(one.rule, one.name, tuple(pairs), lossy, late)


@_of_both
def data_flow(before: Draft, after: Draft) -> None:
    """The planned graph computes what the joint graph does."""
    mutated = [node.name for node in before.joint.mutated]
    check_data_flow(before.joint.module.graph, after.rewritten.module.graph, mutated)


@_of_both
def writes(before: Draft, after: Draft) -> None:
    """Nothing that anybody still reads is written over."""
    check_in_place(
        before.rewritten.module.graph,
        after.rewritten.module.graph,
        saved=[node.name for node in after.rewritten.saved],
        num_forward_outputs=after.num_forward_outputs,
    )


@_of_both
def halves(before: Draft, after: Draft) -> None:
    """The halves compute what the planned graph does, and nothing twice."""
    cut = before.rewritten.module.graph
    forward, backward = after.halves
    check_waits(cut)
    check_split(backward.graph, [n.name for n in before.rewritten.saved], forward.graph)
    _computes(cut, after)


@_of_both
def halves_of_torch(before: Draft, after: Draft) -> None:
    """The halves compute what the joint graph does."""
    _computes(before.joint.module.graph, after)


def _computes(graph: fx.Graph, after: Draft) -> None:
    forward, backward = after.halves
    check_halves(
        graph,
        forward.graph,
        backward.graph,
        num_forward_outputs=after.num_forward_outputs,
        mutated=[node.name for node in after.joint.mutated],
    )


@_of_both
def rows(before: Draft, after: Draft) -> None:
    """What calls of ``rows`` give lies as they say."""
    for half in after.halves:
        check_rows(half.graph)
