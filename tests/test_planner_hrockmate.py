"""H-Rockmate: the cuts, the problem of a level, clusters solved once, and its plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.problem import Problem, validate
from fxremat.core.timeline import replay
from fxremat.core.variants import take
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.published.clusters import Level, decompose
from fxremat.planner.published.hrockmate import Hierarchy
from fxremat.planner.published.parts import PartPlans
from tests.chains import blocks, chains, skipping
from tests.examples import examples
from tests.strategies import problems

EXAMPLES = 60


def some_problems() -> st.SearchStrategy[Problem]:
    return st.one_of(problems(max_ops=8), chains(), st.just(blocks(3)), st.just(skipping()))


def reaches(model: IndexedProblem) -> list[set[int]]:
    """The ops that each op needs, by way of others or not."""
    needs: list[set[int]] = []
    for reads in model.reads:
        direct = {model.writer[value] for value in reads} - {-1}
        needs.append(direct.union(*(needs[op] for op in direct)))
    return needs


@examples(EXAMPLES)
@given(st.data())
def test_clusters_partition_the_ops_and_are_convex(data: st.DataObject) -> None:
    model = build_model(data.draw(some_problems()))
    parts = decompose(model, data.draw(st.integers(1, 6)))
    ops = [op for c in parts.clusters for op in (*c.forward, *c.backward)]
    assert sorted(ops) == list(range(model.n))
    needs = reaches(model)
    for cluster in parts.clusters:
        for part in (cluster.forward, cluster.backward):
            between = {op for last in part for op in needs[last]}
            assert not any(set(part) & needs[op] for op in between - set(part))


@examples(EXAMPLES)
@given(st.data())
def test_what_crosses_is_known(data: st.DataObject) -> None:
    model = build_model(data.draw(some_problems()))
    parts = decompose(model, data.draw(st.integers(1, 6)))
    whose = {op: c for c, its in enumerate(parts.clusters) for op in (*its.forward, *its.backward)}
    for value, writer in enumerate(model.writer):
        users = {whose[op] for op, reads in enumerate(model.reads) if value in reads}
        users |= {whose[writer]} if writer >= 0 else set()
        local = [c for c, its in enumerate(parts.clusters) if value in its.local]
        if local:
            assert users == set(local)
        makes = [c for c, its in enumerate(parts.makes) if value in its]
        if model.evictable(value) and writer <= parts.turn and len(users) > 1:
            assert makes == [whose[writer]]
        else:
            assert not makes


def level_of(model: IndexedProblem, count: int) -> Level:
    """Clusters with all options that there are to find."""
    hierarchy, parts = Hierarchy(PartPlans(Deadline(None))), decompose(model, count)
    return Level(parts, [hierarchy.options(part) for part in parts.clusters])


@examples(EXAMPLES)
@given(st.data())
def test_a_level_is_a_problem(data: st.DataObject) -> None:
    """Its ops are in a valid order, each variant can be taken, and store-all takes what it does."""
    problem = data.draw(some_problems())
    level = level_of(build_model(problem), data.draw(st.integers(2, 5)))
    validate(level.problem)
    for variant in level.problem.variants:
        take(level.problem, [variant.name])
    peak = replay(level.problem, level.problem.base_steps()).peak_bytes
    assert peak >= replay(problem, problem.base_steps()).peak_bytes or any(
        op.inplace for op in problem.ops
    )


@examples(20)
@given(st.data())
def test_schedules_of_a_level_are_possible(data: st.DataObject) -> None:
    """With all options and repeats; and store-all is chosen where it fits."""
    problem = data.draw(st.one_of(chains(3, 5), st.just(blocks(3)), st.just(skipping())))
    model = build_model(problem)
    level = level_of(model, data.draw(st.integers(2, 5)))
    store_all = replay(level.problem, level.problem.base_steps()).peak_bytes
    budget = data.draw(st.integers(store_all // 2, store_all))
    steps = model.names(level.steps(budget, Deadline(None)))
    if steps or budget == store_all:
        assert check(problem, steps).ok
    if budget == store_all:
        assert steps == problem.base_steps()


def test_clusters_of_one_shape_are_solved_once() -> None:
    hierarchy, model = Hierarchy(PartPlans(Deadline(None))), build_model(blocks(12))
    level = hierarchy.level(model)
    assert level is not None
    with_backward = [its for its in level.decomposition.clusters if its.backward]
    assert 0 < len(hierarchy.plans.found) < len(with_backward)


def test_shapes_tell_what_matters() -> None:
    parts = decompose(build_model(blocks(6)), 6)
    shapes = {cluster.shape for cluster in parts.clusters}
    assert len(shapes) < len(parts.clusters)
    wider = decompose(build_model(blocks(6, wide=17)), 6)
    assert not shapes & {cluster.shape for cluster in wider.clusters}


def test_roles() -> None:
    parts = decompose(build_model(skipping()), 4)
    roles = {cluster.role(value) for cluster in parts.clusters for value in cluster.local}
    assert roles == {"local"}
    assert any(parts.makes)  # the second half of the forward reads them across the bottom


@pytest.mark.parametrize("percent", [80, 60])
@pytest.mark.parametrize("problem", [blocks(8), blocks(8, skips=False), skipping()])
def test_never_worse_than_greedy(problem: Problem, percent: int) -> None:
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    greedy, ours = solve(problem, budget, "greedy"), solve(problem, budget, "hrockmate")
    assert max(ours.peak_bytes, budget) <= max(greedy.peak_bytes, budget)
    if greedy.peak_bytes <= budget:
        assert ours.time_us <= greedy.time_us * (1 + 1e-9)
