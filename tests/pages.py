"""Reports made by hand, and of any size, to draw pages of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
    SourceLocation,
    StepMemory,
    ValueTables,
)

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
    locations: dict[str, SourceLocation],
    *,
    plain: Sequence[int] = (),
    resident: Sequence[str] = (),
    results: Sequence[str] = (),
    plan_steps: Sequence[Step] = (),
    held_bytes: int = 0,
    budget_bytes: int | None = None,
    graph: int = 0,
) -> Report:
    """A report whose figures fit together as far as the page shows them.

    Without ``budget_bytes`` the budget is a little above the peak.
    """
    timeline = live_bytes(lifetimes, len(computed))
    peak, plain_peak = max(timeline) + held_bytes, max(plain, default=0) + held_bytes
    budget_bytes = budget_bytes or peak * 102 // 100
    sizes = {one.value: one.nbytes for one in lifetimes}
    ops = tuple(Op(name, (), (name,), 1.0) for name in dict.fromkeys(computed) if name in sizes)
    values = tuple(Value(name, nbytes) for name, nbytes in sizes.items())
    given = tuple(resident)
    runs = Counter(step for step in plan_steps if isinstance(step, str))
    back = [s for s in plan_steps if isinstance(s, Move) and s.kind == "to device"]
    return Report(
        graph=graph,
        time_overhead=0.0625,
        memory=MemoryFigures(
            budget_bytes,
            resident_bytes=sum(sizes[name] for name in resident),
            held_bytes=held_bytes,
            store_all_peak_bytes=plain_peak,
            planned_peak_bytes=peak,
            predicted_peak_bytes=peak,
        ),
        values=ValueTables(
            recomputed=tuple(Row(name, sizes[name], n - 1) for name, n in runs.items() if n > 1),
            moved=tuple(Row(s.value, sizes.get(s.value, 0), 1) for s in back),
        ),
        provenance=Provenance(nodes=len(computed), dry_runs=1),
        plan=Plan(tuple(plan_steps), "greedy", budget_bytes, peak, 1.0),
        problem=Problem("hand-made", values, ops, given, given, tuple(results)),
        step=StepMemory(
            timeline, tuple(lifetimes), tuple(computed), forward_steps, locations, tuple(plain),
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
    computed = ["mm", "gelu", "", "mm_1", "tangents", "gelu", "mm_2", "mm_3"]
    locations = {
        "primals_1": SourceLocation("", "", 0, "primals_1"),
        "mm": SourceLocation("layers.0.up", "model.py", 7, "mm"),
        "gelu": SourceLocation("layers.0", "model.py", 8, "gelu"),
        "view_moved_on": SourceLocation(EVIL, "model.py", 9, "view_moved_on"),
        "gelu_recompute": SourceLocation("layers.0", "model.py", 8, "gelu", "again"),
        "to_device_view_moved_on_moved": SourceLocation(
            EVIL, "model.py", 9, "view_moved_on", "moved"
        ),
        "mm_2": SourceLocation("layers.0.up", "model.py", 7, "mm_2"),
        "mm_3": SourceLocation("layers.0.up", "model.py", 7, "mm_3"),
    }
    return report_of(
        lifetimes,
        computed,
        4,
        locations,
        plain=[6 * MIB, 8 * MIB, 10 * MIB, 12 * MIB, 9 * MIB, 8 * MIB],
        resident=["primals_1"],
        results=["mm_1"],
        plan_steps=["mm", "gelu", "mm_1", Move("to device", "view_moved_on"), "gelu", "mm_2"],
        held_bytes=MIB // 2,
        budget_bytes=12 * MIB,
        graph=graph,
    )


def large_report(layers: int) -> Report:
    """A deep net, 43 storages a layer; every other layer computes most activations again."""
    half = 10 * layers
    end = 2 * half + 1
    lifetimes, locations = list[Lifetime](), dict[str, SourceLocation]()
    acts, again = [f"act_{k}" for k in range(half)], list[str]()
    for k, name in enumerate(acts):
        nbytes, backward = MIB // 4 << k % 4, end - 1 - k
        module, line = f"layers.{k // 10}.{('attention', 'mlp')[k % 2]}", 20 + k % 10
        locations[name] = SourceLocation(module, "deep_model.py", line, name)
        if k // 10 % 2 and k % 10 > 2:
            again.append(name)
            copy = f"{name}_recompute"
            locations[copy] = SourceLocation(module, "deep_model.py", line, name, "again")
            lifetimes.append(Lifetime(name, nbytes, k, k + 3))
            lifetimes.append(Lifetime(copy, nbytes, max(backward - 2, half + 1), backward + 1))
        else:
            lifetimes.append(Lifetime(name, nbytes, k, backward + 1))
        lifetimes.append(Lifetime(f"grad_{k}", nbytes, backward, min(backward + 2, end)))
        lifetimes.append(Lifetime(f"grad_{k}", MIB // 8, backward, backward + 1, workspace=True))
        lifetimes.append(Lifetime(f"weight_{k}", MIB * (1 + k % 6), 0, end))
    grads = [f"grad_{k}" for k in reversed(range(half))]
    rising = [MIB * k for k in range(half)]
    return report_of(
        lifetimes,
        [*acts, "tangents", *grads],
        half,
        locations,
        plain=[*rising, *reversed(rising)],
        resident=[f"weight_{k}" for k in range(half)],
        plan_steps=[*acts, *again, *grads],
        held_bytes=500 * MIB,
    )


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
