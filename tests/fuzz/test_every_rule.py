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
from fxremat.runtime.chunks.program import Ignored, Instruction, Program, dump, parse
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


def in_stand_ins(make: Callable[[fx.Graph, fx.Node], fx.Node], axes: int = 0) -> Change:
    """A change of each stand-in that has so many axes or more."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        wide = {old: new for old, new in found.items() if new.meta["val"].dim() >= axes}
        assert wide, "nothing was changed"
        for old, new in wide.items():
            with graph.inserting_after(new):
                found[old] = make(graph, new)

    return apply


def called(target: Any, *more: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    """What a call makes of a stand-in."""
    return lambda graph, node: add_call(graph, target, (node, *more), node)


SCALED = called(ATEN.mul.Tensor, 1.1)
NEGATED = called(ATEN.logical_not.default)
SHIFTED = called(ATEN.roll.default, [1], [0])  # each row is that of its neighbour
FLIPPED = called(ATEN.flip.default, [1])


def in_programs(change: Callable[[Program], Program]) -> Change:
    """A change of what calls of ``rows`` compute."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        programs = {call: parse(str(call.args[2])) for call in calls(graph, ROWS)}
        changed = {call: change(program) for call, program in programs.items()}
        assert programs != changed, "nothing was changed"
        for call, program in changed.items():
            call.args = (*call.args[:2], dump(program), *call.args[3:])

    return apply


def in_loops(change: Callable[[Instruction], Instruction]) -> Change:
    """A change of the instructions in loops over rows."""
    return in_programs(lambda one: replace(one, loop=tuple(map(change, one.loop))))


def in_ignored(change: Callable[[Any], Ignored]) -> Change:
    """A change of what is said of ignored rows."""
    return in_programs(lambda one: replace(one, ignored=change(one.ignored)))


def other_constant(one: Instruction) -> Instruction:
    """A factor is off by a tenth."""
    return replace(one, args=tuple(a * 1.1 if type(a) is float else a for a in one.args))


def without_mask(one: Instruction) -> Instruction:
    """What is masked is as what is not."""
    if one.op != "aten.where.self":
        return one
    return replace(one, args=(one.args[0], one.args[2], one.args[2]))


BROKEN: dict[str, tuple[str, str, Change]] = {
    "a wrong constant": ("mlp", "chunked_mlp", in_loops(other_constant)),
    "a missing mask": ("attention", "chunked_attention", in_loops(without_mask)),
    "a wrong axis": ("mlp", "chunked_mlp", in_stand_ins(FLIPPED, 2)),
    "shifted rows": ("mlp", "chunked_mlp", in_stand_ins(SHIFTED, 2)),
    "shifted masks": ("dropout", "packed_masks", in_stand_ins(SHIFTED, 2)),
    "shifted gradients": ("images", "split_gradients", in_stand_ins(SHIFTED, 2)),
    "scaled rows": ("mlp", "chunked_mlp", in_stand_ins(SCALED)),
    "turned masks": ("dropout", "packed_masks", in_stand_ins(NEGATED)),
    "rows that count are ignored": (
        "words", "chunked_loss", in_ignored(lambda said: replace(said, number=LAST_WORD))
    ),
    "ignored rows give something": (
        "words", "chunked_loss",
        in_ignored(
            lambda said: replace(said, results=tuple(
                1.0 if type(value) is float else value for value in said.results
            ))
        ),
    ),
}  # fmt: skip


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
