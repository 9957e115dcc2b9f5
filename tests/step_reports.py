"""Reports of planned steps for the tests of pictures and files, and a terminal to print on."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import fxremat
from fxremat.core.problem import Problem
from fxremat.core.timeline import lifetimes_of, replay
from fxremat.planner import SolverOptions, solve
from fxremat.report.report import Report, SourceLocation, StepMemory
from tests.chains import chain_with_copies
from tests.small import Stack, seeded


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@cache
def counted() -> Report:
    """The report of a small model whose bytes a dry run of Inductor's kernels counted."""
    return _explained("inductor")


@cache
def planned() -> Report:
    """The report of a small model that runs node by node: its storages are the problem's values."""
    return _explained("aot_eager")


def _explained(executor: str) -> Report:
    model, x = seeded(Stack, 256, 32)
    options = {"executor": executor, "op_times": "roofline"}
    full = fxremat.explain(model, x, options=options).store_all_peak_bytes
    budget = full * 7 // 10
    return fxremat.explain(model, x, memory_budget=budget, options=options).graphs[0]


@cache
def moving() -> Report:
    """The report of a chain whose values go to host memory and come back."""
    problem = chain_with_copies(8)
    plan = solve(problem, 507, "greedy", SolverOptions())
    assert plan is not None
    assert plan.moves
    return of_problem(problem, replace(planned(), graph=3, plan=plan))


def of_problem(problem: Problem, report: Report) -> Report:
    """The report as if its plan were of this problem."""
    timeline = replay(problem, report.plan.steps)
    return altered(
        replace(report, problem=problem),
        live_bytes=timeline.live_bytes,
        lifetimes=lifetimes_of(timeline),
        computed=tuple(map(str, timeline.steps)),
        locations={problem.ops[0].writes[0]: SourceLocation("layers.0", "net.py", 7)},
    )


def altered(report: Report, **figures: Any) -> Report:
    """The report with other figures of its memory and its step."""
    of_step = {one.name for one in fields(StepMemory)} & set(figures)
    step = replace(report.step, **{name: figures.pop(name) for name in of_step})
    return replace(report, step=step, memory=replace(report.memory, **figures))


def replayed(events: list[dict[str, Any]]) -> tuple[list[int], dict[int, int]]:
    """Replay the events of a snapshot: bytes after each step, and what is allocated at the end.

    Fails where two blocks overlap.
    """
    live: dict[int, int] = {}
    waiting: set[int] = set()
    after: dict[int, int] = {}
    segment = range(0)
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "segment_alloc":
            segment = range(address, address + size)
        elif event["action"] == "alloc":
            assert size > 0
            assert address in segment
            assert address + size <= segment.stop
            for other, bytes_of_other in live.items():
                assert address + size <= other or other + bytes_of_other <= address
            live[address] = size
        elif event["action"] == "free_requested":
            assert live[address] == size
            waiting.add(address)
        else:
            assert event["action"] == "free_completed"
            waiting.remove(address)
            assert live.pop(address) == size
        assert event["time_us"] >= max(after, default=0)
        after[event["time_us"]] = sum(live.values())
    assert not waiting
    course: list[int] = []
    for step in range(max(after) + 1):
        course.append(after.get(step, course[-1] if course else 0))
    return course, live


def storage_bytes(report: Report) -> list[int]:
    steps = range(len(report.timeline))
    return [sum(x.nbytes for x in report.lifetimes if x.start <= s < x.stop) for s in steps]


def check_trace_format(events: list[dict[str, Any]]) -> None:
    """Fail where the events of a Chrome trace break a rule of the format."""
    threads: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in {"M", "X", "C"}
        assert {"name", "pid", "tid", "ts", "args"} <= set(event)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert set(threads) <= {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for each in threads.values():
        for first, second in pairwise(each):
            end = round(1e3 * first["ts"]) + round(1e3 * first["dur"])
            assert end <= round(1e3 * second["ts"])  # in nanoseconds
