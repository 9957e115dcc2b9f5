"""Rotor, Rockmate and H-Rockmate: chains of blocks and hierarchies of clusters."""

from __future__ import annotations

import time
from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay
from fxremat.core.variants import take
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.published import rockmate, rotor
from fxremat.planner.published.chain import (
    Block,
    Chain,
    NotAChain,
    block_costs,
    find_chain,
    option_cost,
    store_all,
)
from fxremat.planner.published.clusters import Level, decompose
from fxremat.planner.published.hrockmate import Hierarchy
from fxremat.planner.published.parts import PartPlans
from fxremat.planner.published.rockmate import (
    BlockOptions,
    held_options,
    pareto,
    part_of,
)
from fxremat.planner.published.rotor import Table
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains, strategies
from tests.examples import examples
from tests.strategies import problems

# --- rotor --------------------------------------------------------------------------------


OPTIONS = SolverOptions()


def store_all_peak(problem: Problem) -> int:
    return replay(problem, problem.base_steps()).peak_bytes


def tight_budgets(problem: Problem) -> range:
    """Budgets from the peak that no schedule can be under to that of store-all."""
    return range(brute.least_peak(problem), store_all_peak(problem) + 1)


@pytest.mark.parametrize(
    "problem",
    [
        *(chains.chain([4] * count, [1.0] * count, reads_output=False) for count in (3, 4)),
        chains.chain([5, 4, 3, 2], [1.0, 4.0, 2.0, 3.0], 2, reads_output=False),
    ],
    ids=["three alike", "four alike", "one that narrows"],
)
def test_least_time_of_chains(problem: Problem) -> None:
    for budget in tight_budgets(problem):
        best = brute.least_time(problem, budget)
        plan = rotor.solve(problem, budget, OPTIONS)
        assert best is not None
        assert check(problem, plan.steps, budget).ok
        assert plan.time_us == best[0], budget


@pytest.mark.parametrize("solver", [rotor, rockmate])
@examples(40)
@given(strategies.problems(min_ops=4, max_ops=12))
def test_any_problem_is_solved_or_refused(solver: ModuleType, problem: Problem) -> None:
    """Workspaces, in-place writes, outputs and ops that run once, in any arrangement."""
    try:
        plan = solver.solve(problem, 0, OPTIONS)
    except NotAChain:
        return
    assert check(problem, plan.steps).ok
    for other in solver.whole_front(problem, OPTIONS).plans:
        assert check(problem, other.steps, other.peak_bytes).ok


def test_model_agrees_with_the_replay() -> None:
    """With a slot per byte the table's memory and time are those of the replayed plan."""
    for problem in (chains.blocks(5), chains.chain([3, 5, 2, 6], [1.0, 2.0, 3.0, 1.0])):
        chain = find_chain(problem)
        costs = block_costs(chain, [[store_all(block)] for block in chain.blocks])
        table = Table(costs, Deadline(None))
        assert table.slot == 1.0
        for slots in table.levels():
            line = replay(problem, chain.model.names(table.steps(slots)))
            assert line.peak_bytes <= slots
            assert line.time_us == table.best[0, 0, -1, slots]


def test_blocks_are_found_where_one_value_crosses() -> None:
    chain = find_chain(chains.blocks(3))
    names = [value.name for value in chain.model.problem.values]
    crossing = [names[block.leaves] for block in chain.blocks if block.leaves is not None]
    assert {"x1", "x2"} <= set(crossing)
    for block in chain.blocks:
        assert not block.early


def test_a_long_chain_takes_seconds() -> None:
    started = time.process_time()
    problem = chains.homogeneous(100, 1000)
    plan = rotor.solve(problem, store_all_peak(problem) // 4, OPTIONS)
    assert plan.peak_bytes <= store_all_peak(problem) // 4
    assert plan.time_us <= 1.4 * problem.base_time_us
    assert time.process_time() - started < 10


def test_a_chain_of_many_blocks_is_made_coarser() -> None:
    chain = find_chain(chains.homogeneous(150))
    assert len(rotor.coarser(chain, 100).blocks) <= 100


def test_a_value_read_early_stays_until_then() -> None:
    """The backward of the last block reads a value of the first one, as fused kernels do."""
    problem = chains.homogeneous(6)
    ops = [
        Op(op.name, (*op.reads, "y1"), op.writes, op.time_us, 0, "backward", False)
        if op.name == "loss"
        else op
        for op in problem.ops
    ]
    problem = validate(Problem("early", problem.values, tuple(ops), (), ("x",), ("g0",)))
    chain = find_chain(problem)
    assert any(block.early for block in chain.blocks)
    for plan in rotor.whole_front(problem, OPTIONS).plans:
        assert check(problem, plan.steps, plan.peak_bytes).ok


@pytest.mark.parametrize(
    "problem",
    [
        chains.skipping(),
        validate(Problem("one", (Value("a", 1),), (Op("o", (), ("a",), 1.0),))),
        validate(Problem("none", (), ())),
    ],
)
def test_no_chain_is_refused_with_advice(problem: Problem) -> None:
    with pytest.raises(NotAChain, match=r"not a chain of blocks.*'auto' or 'hrockmate'"):
        rotor.solve(problem, 10, OPTIONS)
    assert issubclass(NotAChain, ValueError)


# --- rockmate -----------------------------------------------------------------------------


def largest(chain: Chain) -> Block:
    return max(chain.blocks, key=lambda block: len(block.forward))


def test_options_make_the_cheap_values_again() -> None:
    """In a block whose activation is cheap to make, that is what is left out."""
    problem = chains.blocks(6)
    most = store_all_peak(problem)
    plan = rockmate.solve(problem, most * 3 // 4, OPTIONS)
    assert plan.peak_bytes <= most * 3 // 4
    assert {name.rstrip("0123456789") for name in plan.repeats()} <= {"act", "norm"}
    assert plan.time_us < rotor.solve(problem, most * 3 // 4, OPTIONS).time_us


@pytest.mark.parametrize("problem", [chains.blocks(5), chains.homogeneous(9)])
def test_never_slower_than_rotor(problem: Problem) -> None:
    most = store_all_peak(problem)
    plans = []
    for budget in range(most // 5, most + 1, max(1, most // 25)):
        plan, other = (solver.solve(problem, budget, OPTIONS) for solver in (rockmate, rotor))
        assert check(problem, plan.steps).ok
        if other.peak_bytes <= budget:
            assert plan.peak_bytes <= budget
            assert plan.time_us <= other.time_us
        plans.append(plan)
    for small, large in pairwise(plans):
        assert small.time_us >= large.time_us
        assert small.peak_bytes <= large.peak_bytes


def test_least_time_of_tiny_blocks() -> None:
    problem = chains.chain([4, 4, 4], [1.0, 1.0, 1.0], reads_output=False)
    for budget in range(brute.least_peak(problem), store_all_peak(problem) + 1):
        best = brute.least_time(problem, budget)
        assert best is not None
        assert rockmate.solve(problem, budget, OPTIONS).time_us == best[0]


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = find_chain(chains.blocks(9))
    solved: list[Block] = []
    search = rockmate.held_options

    def count(chain: Chain, block: Block, deadline: Deadline) -> object:
        solved.append(block)
        return search(chain, block, deadline)

    monkeypatch.setattr(rockmate, "held_options", count)
    options = BlockOptions(PartPlans(Deadline(None)))
    for block in chain.blocks:
        options.of(chain, block)
    assert len(solved) == len({part_of(chain, block).shape for block in chain.blocks})
    assert len(solved) <= len(chain.blocks) // 2
    again = BlockOptions(PartPlans(Deadline(None))).of(chain, chain.blocks[-4])
    assert options.of(chain, chain.blocks[-4]) == again


def test_options_hold_less_for_more_time() -> None:
    chain = find_chain(chains.blocks(4))
    block = largest(chain)
    options = pareto(chain, block, held_options(chain, block, Deadline(None)))
    costs = [option_cost(chain, block, option) for option in options]
    assert len(costs) >= 2
    assert costs[0].held < costs[-1].held
    assert costs[0].backward.time > costs[-1].backward.time
    everything = option_cost(chain, block, store_all(block))
    assert all(cost.backward.time >= everything.backward.time for cost in costs)


# --- hrockmate ----------------------------------------------------------------------------


EXAMPLES = 60


def some_problems() -> st.SearchStrategy[Problem]:
    return st.one_of(
        problems(max_ops=8), chains.chains(), st.just(chains.blocks(3)), st.just(chains.skipping())
    )


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
    problem = data.draw(
        st.one_of(chains.chains(3, 5), st.just(chains.blocks(3)), st.just(chains.skipping()))
    )
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
    hierarchy, model = Hierarchy(PartPlans(Deadline(None))), build_model(chains.blocks(12))
    level = hierarchy.level(model)
    assert level is not None
    with_backward = [its for its in level.decomposition.clusters if its.backward]
    assert 0 < len(hierarchy.plans.found) < len(with_backward)


def test_shapes_tell_what_matters() -> None:
    parts = decompose(build_model(chains.blocks(6)), 6)
    shapes = {cluster.shape for cluster in parts.clusters}
    assert len(shapes) < len(parts.clusters)
    wider = decompose(build_model(chains.blocks(6, wide=17)), 6)
    assert not shapes & {cluster.shape for cluster in wider.clusters}


def test_roles() -> None:
    parts = decompose(build_model(chains.skipping()), 4)
    roles = {cluster.role(value) for cluster in parts.clusters for value in cluster.local}
    assert roles == {"local"}
    assert any(parts.makes)  # the second half of the forward reads them across the bottom


@pytest.mark.parametrize("percent", [80, 60])
@pytest.mark.parametrize(
    "problem", [chains.blocks(8), chains.blocks(8, skips=False), chains.skipping()]
)
def test_never_worse_than_greedy(problem: Problem, percent: int) -> None:
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    greedy, ours = solve(problem, budget, "greedy"), solve(problem, budget, "hrockmate")
    assert max(ours.peak_bytes, budget) <= max(greedy.peak_bytes, budget)
    if greedy.peak_bytes <= budget:
        assert ours.time_us <= greedy.time_us * (1 + 1e-9)
