"""The front of peak against time: its points, texts and picture, and `explain(...).pareto()`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given

import fxremat
from fxremat import planner
from fxremat.core.json_data import from_data, to_data
from fxremat.core.problem import Problem
from fxremat.report.front import Front, Point, front_of, together, undominated
from fxremat.report.report import Report
from tests import strategies
from tests.chains import phased_chain
from tests.conftest import Golden
from tests.small import Stack, seeded

EAGER = {"executor": "aot_eager", "solver": "greedy"}  # `front` is that of greedy
MIB = 2**20
FRONT = Front(
    "small",
    (
        Point(10 * MIB, 100.0, 0.0),
        Point(8 * MIB, 110.0, 0.1),
        Point(5 * MIB, 150.0, 0.5),
    ),
    base_time_us=100.0,
    store_all_peak_bytes=10 * MIB,
    budget_bytes=9 * MIB,
    peak_bound_bytes=4 * MIB,
)
NOTHING = Problem("nothing", (), ())


def texts(picture: str) -> list[str]:
    """Every text of an SVG picture."""
    elements = ElementTree.fromstring(picture).iter()
    return [element.text or "" for element in elements if element.tag.endswith("text")]


def count(picture: str, tag: str) -> int:
    """How many elements of a kind there are."""
    return sum(e.tag.endswith("}" + tag) for e in ElementTree.fromstring(picture).iter())


def test_front_text(golden: Golden) -> None:
    too_small = replace(FRONT, budget_bytes=4_500_000)
    golden(f"{FRONT}\n\n{too_small}\n\n{replace(FRONT, budget_bytes=None, points=())}")


def test_front_json_text(golden: Golden) -> None:
    golden(json.dumps(FRONT.to_json(), indent=1))


def test_within() -> None:
    assert FRONT.within(10 * MIB) == FRONT.points[0]
    assert FRONT.within(8 * MIB) == FRONT.points[1]
    assert FRONT.within(8 * MIB - 1) == FRONT.points[2]
    assert FRONT.within(5 * MIB - 1) is None


def test_the_picture_marks_the_budget_and_the_bound() -> None:
    picture = FRONT.picture()
    assert {"small", "peak, MiB", "added time, %"} <= {*texts(picture)}
    assert "budget: 9.00 MiB" in texts(picture)
    assert "proven least: 4.00 MiB" in texts(picture)
    assert count(picture, "circle") == 3
    assert picture.count("stroke-dasharray") == 2
    bare = replace(FRONT, budget_bytes=None, peak_bound_bytes=None).picture()
    assert "stroke-dasharray" not in bare
    assert count(bare, "circle") == 3


@pytest.mark.parametrize("name", ["<a> & b", ""])
@pytest.mark.parametrize("points", [(), FRONT.points[:1], (Point(0, 0.0, 0.0),)])
def test_any_front_is_drawn(name: str, points: tuple[Point, ...]) -> None:
    """Also with one point or none, and a name that XML has to escape."""
    picture = Front(name, points, 0.0, 0, budget_bytes=3).picture()
    assert count(picture, "circle") == len(points)
    assert name in texts(picture)


@given(strategies.problems())
def test_the_front_of_the_planner(problem: Problem) -> None:
    front = front_of(problem, planner.front(problem))
    for fast, slow in pairwise(front.points):
        assert fast.peak_bytes > slow.peak_bytes
        assert fast.time_us < slow.time_us
        assert fast.time_overhead < slow.time_overhead
    assert front.points[0].time_overhead == pytest.approx(0.0)
    assert front.points[0].peak_bytes <= front.store_all_peak_bytes
    assert front.peak_bound_bytes is None or (front.peak_bound_bytes <= front.points[-1].peak_bytes)
    assert together([front]) == front
    json.dumps(front.to_json())
    ElementTree.fromstring(front.picture())


def test_dominated_points_are_left_out() -> None:
    a, b, c = Point(5, 2.0, 0.0), Point(5, 1.0, 0.0), Point(4, 3.0, 0.0)
    assert undominated([a, c, b, replace(c, time_us=4.0)]) == (b, c)


def test_held_bytes_lie_under_every_point() -> None:
    problem = phased_chain(8)
    plans = planner.front(problem)
    plain, held = front_of(problem, plans), front_of(problem, plans, held_bytes=100)
    assert [p.peak_bytes + 100 for p in plain.points] == [p.peak_bytes for p in held.points]
    assert held.store_all_peak_bytes == plain.store_all_peak_bytes + 100
    assert plain.peak_bound_bytes is not None
    assert held.peak_bound_bytes == plain.peak_bound_bytes + 100


def test_graphs_together() -> None:
    """The higher one decides the peak; times add up; no point is below what all can reach."""
    one = Front("one", (Point(10, 1.0, 0.0), Point(6, 2.0, 1.0)), 1.0, 10, 9, 3)
    other = Front("other", (Point(8, 4.0, 0.0), Point(7, 5.0, 0.25), Point(2, 9.0, 1.25)), 4.0, 8)
    both = together([one, other])
    assert [(p.peak_bytes, p.time_us) for p in both.points] == [(10, 5.0), (8, 6.0), (7, 7.0),
                                                                 (6, 11.0)]  # fmt: skip
    assert both.points[-1].time_overhead == pytest.approx(11 / 5 - 1)
    assert (both.name, both.budget_bytes, both.peak_bound_bytes) == ("one, other", 9, 3)
    assert both.store_all_peak_bytes == 10


@pytest.fixture(scope="module")
def explained() -> Any:
    model, x = seeded(lambda: Stack(2), 512, 32)
    full = fxremat.explain(model, x, options=EAGER).store_all_peak_bytes
    options = {**EAGER, "variants": "none", "memory_budget": full * 9 // 10}
    return fxremat.explain(model, x, options=options)


def test_pareto_of_an_explanation(explained: Any) -> None:
    front = explained.pareto()
    assert front.budget_bytes == explained.graphs[0].budget_bytes
    assert front.store_all_peak_bytes == explained.store_all_peak_bytes
    assert front.points[-1].peak_bytes == explained.minimum_peak_bytes
    chosen = front.within(front.budget_bytes)
    assert chosen.peak_bytes == explained.plan.peak_bytes
    assert chosen.time_overhead == pytest.approx(explained.time_overhead)
    assert "budget: " in front.picture()


def test_a_report_read_from_json_has_the_same_front(explained: Any) -> None:
    again = from_data(Report, json.loads(json.dumps(to_data(explained.graphs[0]))))
    assert again == explained.graphs[0]
    assert replace(explained, graphs=(again,)).pareto() == explained.pareto()


def test_pareto_with_graph_breaks() -> None:
    model, x = seeded(lambda: Stack(2, broken=True), 64, 32)
    found = fxremat.explain(model, x, options={**EAGER, "memory_budget": "8MiB"})
    assert len(found.graphs) == 2
    front = found.pareto()
    assert front.store_all_peak_bytes == found.store_all_peak_bytes
    assert front.points[-1].peak_bytes >= found.minimum_peak_bytes  # the others stay as they are


def test_pareto_where_nothing_was_planned() -> None:
    found = fxremat.explain(lambda x: x + 1, seeded(Stack, 4, 32)[1], options=EAGER)
    assert found.graphs == ()
    assert found.pareto().points == ()
    ElementTree.fromstring(found.pareto().picture())
