"""What the verifier is shown of each pass: the draft before, and the draft after.

A `Verifier` is given the draft before the pass runs, since some passes work in place, and returns
a `Verdict` on the draft after, which raises `VerificationFailed` where the pass did something
wrong. What is compared, and how, is in `fxremat.verify`, which knows no pass and no draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

from fxremat.compile.draft import Draft
from fxremat.passes.base import Pass
from fxremat.passes.halves import Rewritten
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.passes.variants.table import RULES
from fxremat.verify.aliasing import check_in_place
from fxremat.verify.data_flow import (
    check_data_flow,
    check_halves,
    check_rows,
    check_split,
    check_waits,
)
from fxremat.verify.preparation import BeforePass, Rights
from fxremat.verify.taken_variants import TakenVariant, check_variants

Verdict = Callable[[Draft], None]
Verifier = Callable[[Draft], Verdict]


def _of_both(compare: Callable[[Draft, Draft], None]) -> Verifier:
    """The verifier of a pass that leaves the graph before it as it was."""

    @wraps(compare)
    def verifier(before: Draft) -> Verdict:
        return partial(compare, before)

    return verifier


def prepared(by: type[Pass], rights: Rights) -> Verifier:
    """The pass works in place on the joint graph, and does nothing beyond its rights."""

    def verifier(before: Draft) -> Verdict:
        outputs = before.num_forward_outputs
        seen = BeforePass(by.name, rights, before.module.graph, num_forward_outputs=outputs)
        return lambda after: seen.check((after.joint or after).module.graph)

    return verifier


@_of_both
def stand_ins(before: Draft, after: Draft) -> None:
    """Each variant stands where it may, and everything else computes what it did."""
    lossy = {rule.name for rule in RULES if rule.lossy}
    check_variants(
        before.joint.module.graph,
        after.joint.module.graph,
        [taken_variant(one, lossy=one.rule in lossy) for one in after.taken],
        num_forward_outputs=before.num_forward_outputs,
    )


def taken_variant(one: InsertedVariant, *, lossy: bool) -> TakenVariant:
    """What the verifier is told of a variant: names alone."""
    pairs = tuple((old.name, new.name) for old, new in one.stand_ins.items())
    late = frozenset(new.name for new in one.backward_only)
    return TakenVariant(one.rule, one.name, pairs, lossy, late)


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
    """The halves compute what the planned graph does, or, as torch cuts, the joint graph."""
    forward, backward = after.halves
    cut = before.rewritten or before.joint
    graph = cut.module.graph
    if isinstance(cut, Rewritten):
        check_waits(graph)
        check_split(backward.graph, [n.name for n in cut.saved], forward.graph)
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
