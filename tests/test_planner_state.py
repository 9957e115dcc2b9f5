"""The incremental profile against a replay, after random changes and after taking them back."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.local.editable_schedule import EditableSchedule
from fxremat.planner.local.stage_schedule import StageSchedule
from tests.examples import examples
from tests.strategies import problems_from_a_seed
from tests.transformer_problem import gpt


def agree(problem: Problem, state: StageSchedule) -> None:
    """Peak of every stage and time are those of a replay."""
    line = replay(problem, state.model.names(state.steps()))
    assert state.max_peak() == line.peak_bytes
    assert state.time == pytest.approx(line.time_us)
    step = 0
    for stage, extra in enumerate(state.extra):
        width = len(extra) + 1
        assert state.peak[stage] == max(line.live_bytes[step : step + width])
        step += width


def walk(problem: Problem, seed: int, count: int) -> None:
    """Random additions and removals; the profile must follow, and come back."""
    rng = random.Random(seed)
    search = EditableSchedule(StageSchedule(build_model(problem)))
    state = search.state
    for _ in range(count):
        runs = state.all_extra()
        if runs and rng.random() < 0.4:
            search.remove_runs((rng.choice(runs),))
        else:
            op, stage = rng.randrange(state.model.n), rng.randrange(state.model.n)
            if op < stage and state.model.repeatable[op] and op not in state.extra[stage]:
                search.change(((op, stage),), ())
        agree(problem, state)
    search.roll_back(0)
    assert state.all_extra() == []
    agree(problem, state)


@examples(25, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(8), st.integers(0, 1000))
def test_the_profile_follows_every_change(problem: Problem, seed: int) -> None:
    walk(problem, seed, 12)


def test_the_profile_follows_on_a_transformer() -> None:
    walk(gpt(1), 3, 120)
