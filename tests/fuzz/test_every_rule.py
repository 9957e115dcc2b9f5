"""Every rule on small training steps: each stand-in is what it stands for, and broken ones are not.

``HYPOTHESIS_PROFILE=long`` tries all sites of many random steps; else a few of each rule are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import given
from torch import fx

from fxremat.passes.nodes import add_call
from fxremat.passes.variants.insertion import Site, StandIns, Target
from fxremat.passes.variants.table import RULES
from fxremat.runtime.chunks import call as rows_call
from fxremat.runtime.chunks import operator
from fxremat.runtime.chunks.call import RowsCall
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Program, dump, parse
from fxremat.runtime.kernels import pieces
from tests.examples import FEW, examples
from tests.fuzz.stand_ins import check_sites
from tests.fuzz.steps import LAST_WORD, Step, corpus, in_dtype, sites_of, steps
from tests.graphs import calls
from tests.row_sites import Traced
from tests.variants import small_values

ATEN = torch.ops.aten
Change = Callable[[Any, dict[Any, Any]], None]


@cache
def traced(name: str, as_inductor: bool = True) -> tuple[Traced, list[Site]]:
    """A step of the corpus, traced once for all tests, and its sites."""
    step = replace(corpus()[name], as_inductor=as_inductor)
    seen = in_dtype(step, torch.float64).traced()
    return seen, sites_of(seen.joint)


def chosen(sites: Sequence[Site]) -> list[Site]:
    """All of them in the long profile, else two of each rule."""
    if hypothesis.settings().max_examples > FEW:
        return list(sites)
    of_rule: dict[str, list[Site]] = {}
    for site in sites:
        of_rule.setdefault(site.rule, []).append(site)
    return [site for alike in of_rule.values() for site in alike[:2]]


@pytest.mark.parametrize("as_inductor", [True, False])
@pytest.mark.parametrize("name", corpus())
def test_stand_ins_are_what_they_stand_for(name: str, as_inductor: bool) -> None:
    seen, sites = traced(name, as_inductor)
    with small_values():
        check_sites(seen, chosen(sites))


@examples(3)
@given(steps())
def test_stand_ins_of_random_steps_are_what_they_stand_for(step: Step) -> None:
    seen = step.traced()
    with small_values():
        check_sites(seen, chosen(sites_of(seen.joint)))


def test_every_rule_is_tried() -> None:
    found = {site.rule for name in corpus() for site in traced(name)[1]}
    assert found == {rule.name for rule in RULES}


# --- what is tried ------------------------------------------------------------------------


def one_site(name: str, rule: str) -> tuple[Traced, Site]:
    seen, sites = traced(name)
    return seen, next(site for site in sites if site.rule == rule)


def test_loops_have_several_turns_and_a_shorter_last() -> None:
    seen, site = one_site("mlp", "chunked_mlp")
    given_ = []

    def keep(graph: fx.Graph, found: dict[Any, Any]) -> None:
        for call in calls(graph, ROWS):
            whole: Any = fx.map_arg(call.args, lambda n: n.meta["val"])
            given_.append(RowsCall(*whole))

    check_sites(seen, [broken(site, keep)])
    assert given_
    assert all(one.chunk < one.total and one.total % one.chunk for one in given_)


@pytest.mark.parametrize("name", ["words", "masked words"])
def test_rows_are_left_out(name: str) -> None:
    seen, site = one_site(name, "chunked_loss")
    with mock.patch.object(rows_call, "rows_to_run", wraps=rows_call.rows_to_run) as run:
        check_sites(seen, [site])
    assert any(call.args[0] > 0 for call in run.call_args_list)


# --- what is refused ----------------------------------------------------------------------


def broken(site: Site, change: Change) -> Site:
    """The site of a rule that puts in something else, by ``change`` of what it made."""

    def insert(into: Target) -> StandIns:
        found = dict(site.insert(into))
        change(into.graph, found)
        return found

    return replace(site, insert=insert)


def called(target: Any, *more: Any) -> Change:
    """Each stand-in becomes what a call makes of it."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        for old, new in found.items():
            with graph.inserting_after(new):
                found[old] = add_call(graph, target, (new, *more), new)

    return apply


def computing(change: Callable[[Program], Program]) -> Change:
    """A change of what calls of ``rows`` compute."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        for call in calls(graph, ROWS):
            program = parse(str(call.args[2]))
            assert change(program) != program, "nothing was changed"
            call.args = (*call.args[:2], dump(change(program)), *call.args[3:])

    return apply


def without_mask(program: Program) -> Program:
    """What is masked is as what is not."""
    return replace(program, loop=tuple(
        replace(one, args=(one.args[0], one.args[2], one.args[2]))
        if one.op == "aten.where.self" else one
        for one in program.loop
    ))  # fmt: skip


def ignoring_too_much(program: Program) -> Program:
    """Rows that count are ignored."""
    assert program.ignored is not None
    return replace(program, ignored=replace(program.ignored, number=LAST_WORD))


BROKEN: dict[str, tuple[str, str, Change]] = {
    "a tenth too much": ("mlp", "chunked_mlp", called(ATEN.mul.Tensor, 1.1)),
    "each row is its neighbour's": ("dropout", "packed_masks", called(ATEN.roll.default, [1], [0])),
    "a missing mask": ("attention", "chunked_attention", computing(without_mask)),
    "rows that count are ignored": ("words", "chunked_loss", computing(ignoring_too_much)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_stand_ins_are_refused(name: str) -> None:
    of, rule, change = BROKEN[name]
    seen, site = one_site(of, rule)
    with small_values():
        check_sites(seen, [site])
        with pytest.raises(AssertionError, match=f"of {rule} is"):
            check_sites(seen, [broken(site, change)])


def test_a_loop_without_its_last_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the last chunk are missing in all sums."""
    seen, site = one_site("mlp", "chunked_mlp")
    monkeypatch.setattr(operator, "pieces", lambda total, size: pieces(total, size)[:-1])
    with pytest.raises(AssertionError, match="of chunked_mlp is"):
        check_sites(seen, [site])
