"""The proven bound on the peak."""

from __future__ import annotations

from hypothesis import HealthCheck, given

from fxremat.core.problem import Op, Problem, Value
from fxremat.planner.indexed_problem import build_model, peak_bound
from tests import brute
from tests.examples import examples
from tests.strategies import problems_from_a_seed


@examples(25, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(8))
def test_no_schedule_is_below_the_bound(problem: Problem) -> None:
    assert peak_bound(build_model(problem)) <= brute.least_peak(problem)


def test_outputs_and_non_repeatable_values_count_while_others_run() -> None:
    values = (Value("out", 5), Value("once", 7), Value("big", 10), Value("end", 1))
    ops = (
        Op("out", (), ("out",), 1.0),
        Op("once", (), ("once",), 1.0, repeatable=False),
        Op("big", (), ("big",), 1.0, workspace_bytes=2),
        Op("end", ("once",), ("end",), 1.0),
    )
    problem = Problem("p", values, ops, outputs=("out",))
    assert peak_bound(build_model(problem)) == 5 + 7 + 10 + 2
