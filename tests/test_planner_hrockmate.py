"""H-Rockmate: the cuts, what a level believes of bytes, clusters solved once, and its plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.milp.highs import Solution
from fxremat.planner.published.hrockmate.cluster_costs import ClusterCosts, ClusterOption
from fxremat.planner.published.hrockmate.decomposition import (
    Cutter,
    Decomposition,
    decompose,
    even_cuts,
    narrow_cuts,
    role,
    signature,
)
from fxremat.planner.published.hrockmate.hrockmate import Hierarchy
from fxremat.planner.published.hrockmate.level_milp import LevelMilp
from tests.chains import blocks, chains, skipping
from tests.examples import examples
from tests.strategies import problems

CUTTERS = [narrow_cuts, even_cuts]
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


@pytest.mark.parametrize("cutter", CUTTERS)
@examples(EXAMPLES)
@given(st.data())
def test_clusters_partition_the_ops_and_are_convex(cutter: Cutter, data: st.DataObject) -> None:
    model = build_model(data.draw(some_problems()))
    parts = decompose(model, data.draw(st.integers(1, 6)), cutter)
    ops = [op for c in parts.clusters for op in (*c.forward, *c.backward)]
    assert sorted(ops) == list(range(model.n))
    needs = reaches(model)
    for cluster in parts.clusters:
        for part in (cluster.forward, cluster.backward):
            between = {op for last in part for op in needs[last]}
            assert not any(set(part) & needs[op] for op in between - set(part))


@pytest.mark.parametrize("cutter", CUTTERS)
@examples(EXAMPLES)
@given(st.data())
def test_what_crosses_is_known(cutter: Cutter, data: st.DataObject) -> None:
    model = build_model(data.draw(some_problems()))
    parts = decompose(model, data.draw(st.integers(1, 6)), cutter)
    whose = {op: c for c, its in enumerate(parts.clusters) for op in (*its.forward, *its.backward)}
    for value, writer in enumerate(model.writer):
        users = {whose[op] for op, reads in enumerate(model.reads) if value in reads}
        users |= {whose[writer]} if writer >= 0 else set()
        local = [c for c, its in enumerate(parts.clusters) if value in its.local]
        if local:
            assert users == set(local)
            assert value not in parts.home
        elif model.evictable(value) and writer <= parts.turn and len(users) > 1:
            assert value in parts.clusters[whose[writer]].makes
            assert parts.home[value] == whose[writer]


def store_all_programme(parts: Decomposition, budget: int) -> Solution:
    runs = [
        ClusterCosts(parts, its).runs([ClusterOption(tuple(its.backward))] if its.backward else [])
        for its in parts.clusters
    ]
    return LevelMilp(parts, runs, budget, allow_reruns=False).milp.solve(Deadline(None))


@examples(EXAMPLES)
@given(st.data())
def test_the_peak_of_a_level_is_that_of_the_replay(data: st.DataObject) -> None:
    """Exactly, but where an op writes over a larger value: then it may be taken as more."""
    problem = data.draw(some_problems())
    model = build_model(problem)
    parts = decompose(model, data.draw(st.integers(2, 5)), data.draw(st.sampled_from(CUTTERS)))
    peak = replay(problem, problem.base_steps()).peak_bytes
    if peak > 1:
        assert store_all_programme(parts, peak - 1).values is None
    if not any(model.inplace):
        assert store_all_programme(parts, peak).values is not None


@pytest.mark.slow
@examples(20)
@given(st.data())
def test_schedules_of_a_level_fit(data: st.DataObject) -> None:
    """With all options and repeats: what the programme allows is within the budget."""
    problem = data.draw(st.one_of(chains(3, 5), st.just(blocks(3)), st.just(skipping())))
    model = build_model(problem)
    level = Hierarchy(Deadline(None)).level(model)
    if level is None:
        return
    store_all = replay(problem, problem.base_steps()).peak_bytes
    budget = data.draw(st.integers(store_all // 2, store_all))
    runs = [
        ClusterCosts(level.decomposition, cluster).runs(its)
        for cluster, its in zip(level.decomposition.clusters, level.options, strict=True)
    ]
    programme = LevelMilp(level.decomposition, runs, budget)
    solution = programme.milp.solve(Deadline(None), nodes=200)
    if solution.values is not None:
        line = replay(problem, model.names(programme.steps(solution)))
        assert line.peak_bytes <= budget
        added = (line.time_us - problem.base_time_us) / programme.time_unit
        assert added <= solution.objective + 1e-6


def test_clusters_of_one_shape_are_solved_once() -> None:
    hierarchy, model = Hierarchy(Deadline(None)), build_model(blocks(12))
    level = hierarchy.level(model)
    assert level is not None
    with_backward = [its for its in level.decomposition.clusters if its.backward]
    assert 0 < len(hierarchy.solved) < len(with_backward)


def test_shapes_tell_what_matters() -> None:
    parts = decompose(build_model(blocks(6)), 6)
    signatures = [signature(parts, cluster) for cluster in parts.clusters]
    assert len(set(signatures)) < len(signatures)
    wider = decompose(build_model(blocks(6, wide=17)), 6)
    assert not set(signatures) & {signature(wider, cluster) for cluster in wider.clusters}


def test_roles() -> None:
    model = build_model(skipping())
    parts = decompose(model, 4, even_cuts)
    roles = {role(parts, parts.clusters[0], v) for op in range(4) for v in model.writes[op]}
    assert "made" in roles  # the second half of the forward reads them across the bottom


@pytest.mark.parametrize("percent", [80, 60])
@pytest.mark.parametrize("problem", [blocks(8), blocks(8, skips=False), skipping()])
def test_never_worse_than_greedy(problem: Problem, percent: int) -> None:
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    greedy, ours = solve(problem, budget, "greedy"), solve(problem, budget, "hrockmate")
    assert max(ours.peak_bytes, budget) <= max(greedy.peak_bytes, budget)
    if greedy.peak_bytes <= budget:
        assert ours.time_us <= greedy.time_us * (1 + 1e-9)
