"""Variants of ops in a plan, and the moments of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fxremat.core.check import check
from fxremat.core.constants import ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Change, Op, Problem, Value, Variant, validate
from fxremat.core.timeline import store_all_peak
from fxremat.core.variants import exclude, take
from fxremat.planner import SOLVERS, solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import greedy
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp import moments
from fxremat.planner.milp.highs import Milp
from fxremat.planner.milp.relaxation import Relaxation, extra_runs_for
from fxremat.planner.solvers import Progress, SolverOptions
from fxremat.planner.variants.all_variants import AllVariants
from fxremat.planner.variants.choice_milp import ChoiceMilp
from tests.brute import least_time
from tests.chains import LOSS_PROBLEM, growing_chain
from tests.examples import examples
from tests.strategies import problems_with_variants

NO_LIMIT = SolverOptions()


def layers(count: int) -> Problem:
    """A chain whose wide values are read again in the backward, each of which can be packed."""
    values = [Value("x0", 10)]
    forward, backward, others = list[Op](), list[Op](), list[Variant]()
    for i in range(count):
        values += [Value(f"h{i}", 100), Value(f"x{i + 1}", 10), Value(f"g{i}", 10)]
        values += [Value(f"bits{i}", 4), Value(f"again{i}", 100)]
        forward += [
            Op(f"up{i}", (f"x{i}",), (f"h{i}",), 10.0, phase="forward"),
            Op(f"down{i}", (f"h{i}",), (f"x{i + 1}",), 10.0, phase="forward"),
        ]
        grad = (f"g{i + 1}",) if i + 1 < count else (f"x{count}",)
        backward.insert(0, Op(f"back{i}", (f"h{i}", *grad), (f"g{i}",), 20.0, phase="backward"))
        others.append(
            Variant(
                f"packed{i}",
                ops=(
                    Op(f"pack{i}", (f"h{i}",), (f"bits{i}",), 1.0, phase="forward"),
                    Op(f"unpack{i}", (f"bits{i}",), (f"again{i}",), 1.0, phase="backward"),
                ),
                changes=(Change(f"back{i}", (f"h{i}",), (f"again{i}",)),),
            )
        )
    return validate(
        Problem(
            "layers", tuple(values), (*forward, *backward), ("x0",), (), ("g0",),
            variants=tuple(others),
        )
    )  # fmt: skip


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_takes_alternatives(solver: str) -> None:
    if solver == "moccasin":
        pytest.importorskip("ortools")
    problem = layers(4)
    plan = solve(problem, 350, solver)
    assert plan.variants
    assert check(take(problem, plan.variants), plan.steps, 350).ok


def test_with_room_for_everything_the_fastest_forms_are_taken() -> None:
    assert solve(LOSS_PROBLEM, 10_000).variants == ()
    assert solve(LOSS_PROBLEM, None).variants == ()
    quick = replace(
        LOSS_PROBLEM.variants[0],
        ops=tuple(replace(op, time_us=3.0) for op in LOSS_PROBLEM.variants[0].ops),
    )
    assert solve(replace(LOSS_PROBLEM, variants=(quick,)), None).variants == ("chunks",)


def test_only_as_many_are_packed_as_have_to_be() -> None:
    problem = layers(6)
    every = solve(problem, 0)
    most = solve(problem, None)
    assert len(every.variants) > 0
    assert most.variants == ()
    plans = [solve(problem, budget) for budget in range(every.peak_bytes + 60, most.peak_bytes, 60)]
    counts = [len(plan.variants) for plan in plans]
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans if plan.budget_bytes)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] > 0


def peaks(problem: Problem) -> tuple[int, int]:
    """The least peak that the greedy solver finds, and that of keeping all."""
    least, most = (greedy.solve(problem, budget, NO_LIMIT) for budget in (0, None))
    return least.peak_bytes, most.peak_bytes


@given(problems_with_variants(max_ops=7))
def test_no_plan_is_better_than_what_the_choice_proves(problem: Problem) -> None:
    """All stages are moments, and so neighbours: what runs again counts, too."""
    plain = take(problem, ())
    combined = AllVariants(plain)
    least, most = peaks(plain)
    for budget in {least, (least + most) // 2}:
        plan = greedy.solve(plain, budget, NO_LIMIT)
        choice = ChoiceMilp(combined, range(len(combined.ops)), plan.peak_bytes)
        solution = choice.milp.solve(Deadline(None))
        assert solution.values is not None
        time_us = plain.base_time_us + solution.bound / choice.per_us
        assert time_us <= plan.time_us + 1e-6 * plain.base_time_us


@examples(40)
@given(problems_with_variants(max_ops=6))
def test_plans_are_never_worse_than_without_alternatives(problem: Problem) -> None:
    plain = take(problem, ())
    least, most = peaks(plain)
    for budget in {least, (least + most) // 2, most}:
        plan, alone = solve(problem, budget, "greedy"), greedy.solve(plain, budget, NO_LIMIT)
        verdict = check(take(problem, plan.variants), plan.steps)
        assert verdict.ok
        assert verdict.peak_bytes == plan.peak_bytes <= max(budget, alone.peak_bytes)
        assert plan.peak_bytes > budget or plan.time_us <= alone.time_us + 1e-9
        chosen = [one for one in problem.variants if one.name in plan.variants]
        assert not any(exclude(a, b) for a in chosen for b in chosen if a is not b)


@examples(25)
@given(problems_with_variants(max_ops=7))
def test_no_form_more_or_less_makes_a_plan_better(problem: Problem) -> None:
    plain = take(problem, ())
    least, most = peaks(plain)
    budget = (least + most) // 2
    plan = solve(problem, budget, "greedy")
    if plan.peak_bytes <= budget and plan.time_us <= 1.002 * problem.base_time_us:
        return  # good enough
    for one in problem.variants:
        names = {*plan.variants} ^ {one.name}
        names -= {o.name for o in problem.variants if o is not one and exclude(one, o)}
        other = greedy.quick(take(problem, names), budget, NO_LIMIT)
        best = max(plan.peak_bytes, budget), plan.time_us
        assert (max(other.peak_bytes, budget), other.time_us) >= best


def test_a_poor_choice_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing costs 2 each; running `up` again costs 10: where packing does, nothing runs again."""
    best = solve(layers(4), 350)
    assert best.variants
    assert not best.repeats()
    assert best.time_us < solve(take(layers(4), ()), 350).time_us
    monkeypatch.setattr(ChoiceMilp, "names", lambda self, solution: ())
    plan = solve(layers(4), 350)
    assert plan.variants
    assert plan.time_us == best.time_us
    assert not solve(layers(4), 350, options=SolverOptions(improved=False)).variants


@pytest.mark.parametrize("budget", [0, 350])
def test_a_choice_that_was_planned_quickly_is_not_planned_so_again(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was adapted from another's plan is, and may come out better."""
    real, planned = greedy.quick, list[Problem]()

    def counted(problem: Problem, *asked: Any) -> Plan:
        planned.append(problem)
        return real(problem, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(greedy, "quick", counted)
        found = solve(layers(4), budget, "quick", SolverOptions(improved=False))
    assert len(planned) == len(set(planned)) > 1
    again = real(take(layers(4), found.variants), budget, NO_LIMIT)
    assert (found.peak_bytes, found.time_us) == (again.peak_bytes, again.time_us)


def one_wide_layer(count: int) -> Problem:
    """Each backward could do with less scratch memory, and that of the first layer makes the peak.

    What comes before it is high because of what is kept, which need not be.
    """
    values, others = [Value("x0", 4)], list[Variant]()
    forward, backward = list[Op](), list[Op]()
    for i in range(count):
        size = 4 if i == 0 else 1
        values += [Value(f"x{i + 1}", size), Value(f"y{i}", size), Value(f"g{i}", size)]
        forward += [
            Op(f"wide{i}", (f"x{i}",), (f"y{i}",), 10.0, phase="forward"),
            Op(f"up{i}", (f"y{i}",), (f"x{i + 1}",), 10.0, phase="forward"),
        ]
        reads = (f"y{i}", f"x{i}", f"g{i + 1}" if i + 1 < count else f"x{count}")
        backward.insert(0, Op(f"back{i}", reads, (f"g{i}",), 20.0, 2 * size, phase="backward"))
        less = Change(f"back{i}", (), (), 1.0, -size * 7 // 4)
        others.append(Variant(f"less{i}", changes=(less,)))
    return validate(
        Problem(
            "one wide layer", tuple(values), (*forward, *backward), ("x0",), (), ("g0",),
            variants=tuple(others),
        )
    )  # fmt: skip


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_the_least_peak_is_found_where_one_op_makes_it(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where fewer variants can be tried than there are: the one at the peak comes first."""
    problem = one_wide_layer(12)
    most = int(part * len(problem.ops) * len(problem.variants))
    monkeypatch.setattr("fxremat.planner.constants.TRIED_OPS", most)
    plan = solve(problem, 0, "greedy")
    assert "less0" in plan.variants
    assert plan.peak_bytes < solve(take(problem, ()), 0, "greedy").peak_bytes


# --- moments ------------------------------------------------------------------------------

NO_TIME_LIMIT = Deadline(None)


def relaxation(problem: Problem, budget: int, *stages: int) -> Relaxation:
    model = IndexedProblem(problem)
    return Relaxation(model, budget, sorted({*stages}))


def test_bytes_of_runs_between_neighbouring_moments_count() -> None:
    """Without c the op "peak" fits, but c comes from a value that has no room beside w."""
    values = [Value("a", 1), Value("big", 50), Value("c", 10), Value("w", 30), Value("p", 0)]
    ops = [
        Op("a", (), ("a",), 1.0),
        Op("big", ("a",), ("big",), 1.0),
        Op("c", ("big",), ("c",), 1.0),
        Op("w", ("a",), ("w",), 1.0, repeatable=False),
        Op("peak", ("w",), ("p",), 1.0, 30, repeatable=False),
        Op("last", ("c", "w", "p"), ("out",), 1.0, repeatable=False),
    ]
    values.append(Value("out", 0))
    problem = validate(Problem("neighbours", tuple(values), tuple(ops), outputs=("out",)))
    assert least_time(problem, 65) is None
    for stages in ((4,), (4, 5)):
        found, choice = (
            relaxation(problem, 65, *stages),
            ChoiceMilp(AllVariants(problem), stages, 65),
        )
        bound = found.time_bound_us(found.solve(NO_TIME_LIMIT))
        assert math.isfinite(bound) == (len(stages) == 1)
        assert (choice.solve(NO_TIME_LIMIT).values is None) == (len(stages) == 2)


def test_what_is_written_over_and_read_later_runs_again() -> None:
    sizes = {"x": 1, "v": 10, "e": 10, "out": 0, "last": 0}
    values = tuple(Value(name, size) for name, size in sizes.items())
    ops = (
        Op("v", ("x",), ("v",), 4.0),
        Op("e", ("v",), ("e",), 1.0, repeatable=False, inplace=(("v", "e"),)),
        Op("f", ("e",), ("out",), 1.0, repeatable=False),
        Op("g", ("v",), ("last",), 1.0, repeatable=False),
    )
    problem = validate(Problem("over", values, ops, ("x",), outputs=("out", "last")))
    found = relaxation(problem, 11, 1)
    solution = found.solve(NO_TIME_LIMIT)
    assert found.time_bound_us(solution) == pytest.approx(problem.base_time_us + 4.0)
    best = least_time(problem, 11)
    assert best is not None
    assert best[0] == problem.base_time_us + 4.0
    model = IndexedProblem(problem)
    runs = extra_runs_for(model, dict(found.held_in(solution)))
    assert StageSchedule(model, runs).max_peak() == 11
    for budget, again in ((22, 0.0), (11, 4.0), (9, None)):
        choice = ChoiceMilp(AllVariants(problem), range(4), budget)
        solution = choice.milp.solve(NO_TIME_LIMIT)
        if again is None:
            assert solution.values is None
        else:
            assert solution.objective / choice.per_us == pytest.approx(again), budget


@pytest.mark.parametrize("percent", [70, 45, 33])
def test_a_plan_near_enough_to_its_bound_is_not_worked_on(percent: int) -> None:
    """It ends as soon as the gap is reached, which takes no more rounds than to close it."""
    problem = growing_chain(12)
    budget = store_all_peak(problem) * percent // 100
    rounds = []
    for gap in (0.0, 0.2):
        told: list[Progress] = []
        plan = moments.solve(problem, budget, SolverOptions(progress=told.append), gap)
        rounds.append(len(told))
        assert all(one.bound_us is not None for one in told)
        assert check(problem, plan.steps).ok
        assert plan.peak_bytes <= budget
    assert plan.time_bound_us is not None
    near_us = 0.2 * problem.base_time_us
    if rounds[1] >= ROUNDS:  # from there on it is content with less
        near_us *= 2
    assert plan.time_us - plan.time_bound_us <= near_us
    assert rounds[1] <= rounds[0]


def test_without_time_nothing_is_claimed() -> None:
    milp = Milp()
    columns = [milp.binary(-1.0 - k % 7) for k in range(60)]
    for k in range(60):
        milp.row([(c, 1.0 + (k * c) % 5) for c in columns], high=40.0 + k)
    assert milp.solve(Deadline(0.0)).bound <= milp.solve(NO_TIME_LIMIT, nodes=1).objective
