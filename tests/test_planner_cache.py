"""Plans on disk: read back as they were, and never believed."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given

import fxremat
from fxremat import planner
from fxremat.compat.configuration import inductor_config
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.variants import take
from fxremat.planner import SolverOptions
from fxremat.planner.deadline import interruptible
from fxremat.planner.plan_cache import PlanQuestion
from fxremat.planner.plans import make_plan
from fxremat.whatif.explanation import Explanation
from tests import strategies
from tests.chains import LOSS_PROBLEM, phased_chain
from tests.examples import examples
from tests.small import Stack, seeded

OPTIONS = SolverOptions()
BUDGET = 25  # store-all takes 33
SLOWER = replace(phased_chain(8).ops[0], time_us=2.0)


@pytest.fixture
def problem() -> Problem:
    return phased_chain(8)


def ask(directory: Path, problem: Problem, /, **changes: Any) -> tuple[Plan, bool]:
    given = {"problem": problem, "budget_bytes": BUDGET, "solver": "greedy", "options": OPTIONS}
    return PlanQuestion(**{**given, **changes}).answer(directory)


def test_an_answer_is_kept_and_read_back(tmp_path: Path, problem: Problem) -> None:
    plan, known = ask(tmp_path, problem)
    assert not known
    assert plan == planner.solve(problem, BUDGET, "greedy")
    assert ask(tmp_path, phased_chain(8)) == (plan, True)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.problems() | strategies.problems_with_variants(max_ops=6))
@example(LOSS_PROBLEM)
def test_every_kind_of_plan_is_read_back(tmp_path: Path, problem: Problem) -> None:
    for budget in (None, 0, 100):
        for solver in ("greedy", "least_peak"):
            plan, _ = ask(tmp_path, problem, budget_bytes=budget, solver=solver)
            again, known = ask(tmp_path, problem, budget_bytes=budget, solver=solver)
            assert known
            assert again == plan
            assert check(take(problem, again.variants), again.steps).ok
            assert again.variants or problem is not LOSS_PROBLEM or budget is None


@pytest.mark.parametrize(
    "change",
    [
        {"problem": replace(phased_chain(8), name="another")},
        {"options": SolverOptions(progress=print)},
    ],
)
def test_names_and_progress_are_no_part_of_the_question(
    tmp_path: Path, problem: Problem, change: dict[str, Any]
) -> None:
    ask(tmp_path, problem)
    assert ask(tmp_path, problem, **change)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"budget_bytes": BUDGET + 1},
        {"budget_bytes": None},
        {"solver": "least_peak"},
        {"options": SolverOptions(time_limit_s=100.0)},
        {"options": SolverOptions(start=phased_chain(8).base_steps())},
        {"problem": phased_chain(9)},
        {"problem": replace(phased_chain(8), ops=(SLOWER, *phased_chain(8).ops[1:]))},
    ],
)
def test_another_question_has_its_own_answer(
    tmp_path: Path, problem: Problem, change: dict[str, Any]
) -> None:
    ask(tmp_path, problem)
    assert not ask(tmp_path, problem, **change)[1]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["disk_cache.build", "planner.plan_cache._highspy_version"])
def test_another_version_asks_again(
    tmp_path: Path, problem: Problem, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ask(tmp_path, problem)
    monkeypatch.setattr(f"fxremat.{name}", lambda: "another")
    assert not ask(tmp_path, problem)[1]


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def damaged(content: bytes) -> bytes:
        data = json.loads(content)
        change(data)
        return json.dumps(data).encode()

    return damaged


def _swap_first_steps(data: dict[str, Any]) -> None:
    steps = data["answer"]["steps"]
    steps[0], steps[1] = steps[1], steps[0]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-20],
    "no text": lambda content: b"\xff\xfe\x00",
    "a list": lambda content: b"[]",
    "another format": _edit(lambda data: data.update(format="fxremat-answer/0")),
    "another question": _edit(lambda data: data["question"].update(seed=9)),
    "no plan": _edit(lambda data: data.pop("answer")),
    "no steps": _edit(lambda data: data["answer"].pop("steps")),
    "unknown op": _edit(lambda data: data["answer"]["steps"].append("nobody")),
    "an op missing": _edit(lambda data: data["answer"]["steps"].pop()),
    "out of order": _edit(_swap_first_steps),
    "an op that may run once runs twice": _edit(lambda data: data["answer"]["steps"].append("g0")),
    "another schedule": _edit(lambda data: data["answer"]["steps"].insert(9, "y0")),
    "peak": _edit(lambda data: data["answer"].update(peak_bytes=1)),
    "time": _edit(lambda data: data["answer"].update(time_us=1.0)),
    "time bound above the time": _edit(lambda data: data["answer"].update(time_bound_us=1e9)),
    "peak bound above the peak": _edit(lambda data: data["answer"].update(peak_bound_bytes=10**9)),
    "bound of the wrong type": _edit(lambda data: data["answer"].update(peak_bound_bytes="much")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_ignored_and_replaced(
    tmp_path: Path, problem: Problem, name: str
) -> None:
    plan, _ = ask(tmp_path, problem)
    (path,) = tmp_path.iterdir()
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    assert ask(tmp_path, problem) == (plan, False)
    assert ask(tmp_path, problem) == (plan, True)


@pytest.mark.parametrize(("seconds", "kept"), [(4.9, True), (5.0, False), (6.0, False)])
def test_what_the_time_limit_cut_short_is_not_kept(
    tmp_path: Path, problem: Problem, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: bool
) -> None:
    """The solver says that it took so long."""

    def slow(problem: Problem, budget: int | None, options: SolverOptions) -> Plan:
        steps = problem.base_steps()
        return make_plan(problem, steps, "slow", budget_bytes=budget, seconds=seconds)

    monkeypatch.setitem(planner.SOLVERS, "slow", slow)
    options = SolverOptions(time_limit_s=5.0)
    ask(tmp_path, problem, solver="slow", options=options)
    assert ask(tmp_path, problem, solver="slow", options=options)[1] == kept


def test_what_was_interrupted_is_not_kept(tmp_path: Path, problem: Problem) -> None:
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        ask(tmp_path, problem)
    assert not list(tmp_path.glob("*"))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("fxremat.compile.search.planning.cache_directory", lambda: tmp_path)
    return tmp_path / "plans"


def explain() -> Explanation:
    options = {"executor": "aot_eager", "memory_budget": "1.3MiB"}
    return fxremat.explain(*seeded(lambda: Stack(2), 512, 32), options=options)


def test_the_backend_asks_once(
    plans: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = explain()
    files = {path: path.read_bytes() for path in plans.iterdir()}
    assert files
    monkeypatch.setattr("fxremat.planner.plan_cache.solve", lambda *_: pytest.fail("asked again"))
    with caplog.at_level(logging.DEBUG, logger="fxremat"):
        second = explain()
    assert "plan from the cache" in caplog.text
    assert second.plan == first.plan
    assert second.predicted_peak_bytes == first.predicted_peak_bytes
    assert {path: path.read_bytes() for path in plans.iterdir()} == files


def test_nothing_is_kept_where_caches_are_disabled(plans: Path) -> None:
    with inductor_config.patch(force_disable_caches=True):
        assert explain().plan is not None
    assert not plans.exists()
