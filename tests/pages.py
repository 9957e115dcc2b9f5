"""Reports made by hand, and of any size, to draw pages of."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.schedule import Move, Step
from fxremat.core.timeline import Lifetime
from fxremat.report.front import Front, Point
from fxremat.report.report import (
    MemoryFigures,
    Provenance,
    Report,
    Row,
    StepMemory,
    ValueTables,
)
from fxremat.report.source_location import Place
from tests.step_reports import altered

MIB = 2**20


def live_bytes(lifetimes: Iterable[Lifetime], steps: int) -> tuple[int, ...]:
    """What is live at each step."""
    changes = [0] * (steps + 1)
    for one in lifetimes:
        changes[one.start] += one.nbytes
        changes[one.stop] -= one.nbytes
    return tuple(accumulate(changes[:-1]))


def report_of(
    lifetimes: Sequence[Lifetime],
    computed: Sequence[str],
    forward_steps: int,
    places: dict[str, Place],
    *,
    plain: Sequence[int] = (),
    resident: Sequence[str] = (),
    results: Sequence[str] = (),
    plan_steps: Sequence[Step] = (),
    held_bytes: int = 0,
    budget_bytes: int | None = None,
    graph: int = 0,
) -> Report:
    """A report of which only what the page shows is thought through."""
    timeline = live_bytes(lifetimes, len(computed))
    peak, plain_peak = max(timeline) + held_bytes, max(plain, default=0) + held_bytes
    sizes = {one.value: one.nbytes for one in lifetimes}
    ops = tuple(Op(name, (), (name,), 1.0) for name in dict.fromkeys(computed) if name in sizes)
    problem = Problem(
        "hand-made",
        tuple(Value(name, nbytes) for name, nbytes in sizes.items()),
        ops,
        tuple(resident),
        tuple(resident),
        tuple(results),
    )
    counts = [(op.name, list(plan_steps).count(op.name) - 1) for op in ops] if plan_steps else []
    again = tuple(Row(name, sizes.get(name, 0), n) for name, n in counts if n > 0)
    back = [s for s in plan_steps if isinstance(s, Move) and s.kind == "to device"]
    return Report(
        graph=graph,
        time_overhead=0.0625,
        memory=MemoryFigures(
            budget_bytes,
            resident_bytes=sum(sizes[name] for name in resident),
            held_bytes=held_bytes,
            keep_all_peak_bytes=plain_peak or peak,
            planned_peak_bytes=peak,
            predicted_peak_bytes=peak,
        ),
        values=ValueTables(
            recomputed=again, moved=tuple(Row(s.value, sizes.get(s.value, 0), 1) for s in back)
        ),
        provenance=Provenance(nodes=len(computed), dry_runs=1),
        plan=Plan(tuple(plan_steps), "greedy", budget_bytes, peak, 1.0),
        problem=problem,
        step=StepMemory(
            timeline, tuple(lifetimes), tuple(computed), forward_steps, places, tuple(plain),
            len(plain) // 2,
        ),
    )  # fmt: skip


EVIL = "</script><img src=x onerror=alert(1)><!--"
"""A name that is HTML, were it not escaped."""


def small_report(graph: int = 0) -> Report:
    """Eight steps, five of them the forward's; a value of each kind, one with an evil module."""
    lifetimes = [
        Lifetime("primals_1", 4 * MIB, 0, 8),
        Lifetime("mm", 2 * MIB, 0, 6),
        Lifetime("gelu", MIB, 1, 3),
        Lifetime("view_moved_on", MIB, 1, 4),
        Lifetime("gelu", 3 * MIB // 2, 2, 3, workspace=True),
        Lifetime("mm_1", MIB // 2, 3, 8),
        Lifetime("gelu_recompute", MIB, 5, 7),
        Lifetime("to_device_view_moved_on_moved", MIB, 5, 7),
        Lifetime("mm_2", MIB, 6, 7),
        Lifetime("mm_3", 11 * MIB // 2, 7, 8),
    ]
    making = ["mm", "gelu", "", "mm_1", "tangents", "gelu", "mm_2", "mm_3"]
    places = {
        "primals_1": Place("", "", 0, "primals_1"),
        "mm": Place("layers.0.up", "model.py", 7, "mm"),
        "gelu": Place("layers.0", "model.py", 8, "gelu"),
        "view_moved_on": Place(EVIL, "model.py", 9, "view_moved_on"),
        "gelu_recompute": Place("layers.0", "model.py", 8, "gelu", "again"),
        "to_device_view_moved_on_moved": Place(EVIL, "model.py", 9, "view_moved_on", "moved"),
        "mm_2": Place("layers.0.up", "model.py", 7, "mm_2"),
        "mm_3": Place("layers.0.up", "model.py", 7, "mm_3"),
    }
    return report_of(
        lifetimes,
        making,
        4,
        places,
        plain=[6 * MIB, 8 * MIB, 10 * MIB, 12 * MIB, 9 * MIB, 8 * MIB],
        resident=["primals_1"],
        results=["mm_1"],
        plan_steps=["mm", "gelu", "mm_1", Move("to device", "view_moved_on"), "gelu", "mm_2"],
        held_bytes=MIB // 2,
        budget_bytes=12 * MIB,
        graph=graph,
    )


def large_report(layers: int) -> Report:
    """A deep net, 40 storages a layer: all is saved but what every other layer computes again."""
    rng = random.Random(7)
    parameters, making, lifetimes = list[str](), list[str](), list[Lifetime]()
    places, plan = dict[str, Place](), list[Step]()

    def place(name: str, layer: int, line: int, value: str = "", copy: str = "") -> str:
        module = f"layers.{layer}.{('attention', 'mlp')[line % 2]}"
        places[name] = Place(module, "deep_model.py", line, value or name, copy)
        return name

    born: dict[str, int] = {}
    for layer in range(layers):
        for k in range(10):
            name = place(f"act_{layer}_{k}", layer, 20 + k)
            born[name] = len(making)
            making.append(name)
            plan.append(name)
    forward = len(making)
    making.append("tangents")
    small = {name: rng.choice((1, 2, 4, 16)) * MIB // 4 for name in born}
    grads: list[tuple[str, int, int]] = []
    for layer in reversed(range(layers)):
        ours, again = [f"act_{layer}_{k}" for k in range(10)], layer % 2 == 0
        since = len(making)
        for k, name in enumerate(ours):
            if not again or k < 3:
                continue
            copy = place(f"{name}_recompute", layer, 20 + k, name, "again")
            lifetimes.append(Lifetime(copy, small[name], len(making), since + 7 + 10 - k))
            making.append(copy)
            plan.append(name)
        for k in range(10):
            grad = place(f"mm_{layer}_{k}", layer, 40 + k)
            here = len(making)
            lifetimes.append(Lifetime(grad, small[ours[9 - k]], here, here + 2))
            lifetimes.append(Lifetime(grad, MIB // 8, here, here + 1, workspace=True))
            making.append(grad)
            plan.append(grad)
        for k in range(6):
            grads.append(
                (place(f"grad_{layer}_{k}", layer, 60 + k), MIB * (1 + k), len(making) - 6)
            )
        for k, name in enumerate(ours):
            stop = len(making) - k if not again or k < 3 else born[name] + 3
            lifetimes.append(Lifetime(name, small[name], born[name], stop))
    making += ["", ""]
    end = len(making)
    for layer in range(layers):
        for k in range(6):
            parameters.append(place(f"weight_{layer}_{k}", layer, 60 + k))
            lifetimes.append(Lifetime(parameters[-1], MIB * (1 + k), 0, end))
    lifetimes += [Lifetime(name, nbytes, start, end) for name, nbytes, start in grads]
    kept = sum(small.values())
    weights = sum(one.nbytes for one in lifetimes if one.value in set(parameters))
    half = 10 * layers
    plain = [weights + kept * k // half for k in range(half)]
    plain += [weights + kept + (weights - kept) * k // half for k in range(half)]
    found = report_of(lifetimes, making, forward, places, plain=plain, resident=parameters,
                      held_bytes=500 * MIB)  # fmt: skip
    return with_plan(found, plan)


def with_plan(report: Report, steps: Sequence[Step]) -> Report:
    """The same with a plan, its budget a little above the peak."""
    budget = report.predicted_peak_bytes * 102 // 100
    planned = replace(report, plan=replace(report.plan, steps=tuple(steps)))
    return altered(planned, budget_bytes=budget)


def small_front() -> Front:
    """Four plans, the budget between two of them."""
    points = [(16, 0.0), (12, 0.03), (9, 0.08), (7, 0.21)]
    return Front(
        "hand-made",
        tuple(Point(n * MIB, 100 * (1 + added), added) for n, added in points),
        100.0,
        16 * MIB,
        10 * MIB,
        6 * MIB,
    )
