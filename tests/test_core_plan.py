"""Plans: what repeats, and the JSON form."""

from __future__ import annotations

import json

from fxremat.core.plan import Plan, plan_to_json
from tests.conftest import Golden

PLAN = Plan(
    steps=("a", "b", "a", "c", "a"),
    solver="greedy",
    budget_bytes=1000,
    peak_bytes=900,
    time_us=12.5,
    time_bound_us=10.0,
)


def test_repeats_count_beyond_the_first() -> None:
    assert PLAN.repeats() == {"a": 2}


def test_plan_json_text(golden: Golden) -> None:
    golden(json.dumps(plan_to_json(PLAN), indent=1))
