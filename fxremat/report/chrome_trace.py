"""The planned step as a Chrome trace, which Perfetto and ``chrome://tracing`` open.

A graph is a process. Its threads are the ops, the copies to host memory and those from there; their
times are those of the plan. A counter shows how many bytes are live on the device from the start of
each step on, another one how many bytes of moved values are in host memory. Both count the values
of the graph only, without what is held outside of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxremat.core.schedule import Move
from fxremat.core.timeline import Timeline, replay
from fxremat.report.report import Report

Event = dict[str, Any]
OPS, TO_HOST, TO_DEVICE = 1, 2, 3
THREADS = {OPS: "ops", TO_HOST: "copies to host memory", TO_DEVICE: "copies to the device"}


def chrome_trace(reports: Sequence[Report]) -> Event:
    """The trace of these graphs, each from time 0 on."""
    events = [event for report in reports for event in _Process(report).events()]
    return {
        "displayTimeUnit": "ms",
        # names first, then by time; of one time, as they were made: counters before their ops
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event["ts"])),
    }


def write_chrome_trace(path: str | Path, reports: Sequence[Report]) -> None:
    """Write the trace of these graphs into a file. Raises `OSError`."""
    Path(path).write_text(json.dumps(chrome_trace(reports)) + "\n", encoding="utf-8")


def _ns(time_us: float) -> int:
    """Whole nanoseconds, as viewers count: otherwise a step could end after the next one starts."""
    return round(time_us * 1e3)


class _Process:
    """The events of one graph."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.timeline: Timeline = replay(report.problem, report.plan.steps)

    def events(self) -> Iterator[Event]:
        """Names, then what runs, then what is copied."""
        yield self._name("process_name", 0, f"fxremat graph {self.report.graph}, as planned")
        moves = bool(self.timeline.timing.transfers)
        for thread, name in THREADS.items():
            if thread == OPS or moves:
                yield self._name("thread_name", thread, name)
        yield from self._steps()
        yield from self._copies()

    def _steps(self) -> Iterator[Event]:
        """The bytes of each step, then the step itself. Waits are shown where they take time."""
        problem, timeline, seen = self.report.problem, self.timeline, set[str]()
        start, counts_host = 0, any(timeline.host_bytes)
        for index, step in enumerate(timeline.steps):
            end = _ns(timeline.timing.step_end_us[index])
            yield self._counter("bytes on the device", start, timeline.live_bytes[index])
            if counts_host:
                yield self._counter("bytes moved to host memory", start, timeline.host_bytes[index])
            if isinstance(step, Move):
                if end > start:
                    yield self._complete(f"wait for {step.value}", "wait", OPS, start, end, index)
            else:
                op = problem.op_of[step]
                again = step in seen
                seen.add(step)
                kind = "runs again" if again else op.phase
                value = op.writes[0] if op.writes else step
                event = self._complete(step, kind, OPS, start, end, index, value)
                event["args"] |= {"phase": op.phase, "runs again": again}
                yield event
            start = end

    def _copies(self) -> Iterator[Event]:
        for copy in self.timeline.timing.transfers:
            thread = TO_HOST if copy.kind == "to host" else TO_DEVICE
            start, end = _ns(copy.start_us), _ns(copy.end_us)
            event = self._complete(copy.value, "copy", thread, start, end, copy.step, copy.value)
            event["args"]["bytes"] = self.report.problem.bytes_of[copy.value]
            yield event

    def _complete(
        self, name: str, kind: str, thread: int, start: int, end: int, step: int, value: str = ""
    ) -> Event:
        """An event with a start and an end; ``value`` leads to its module and source line."""
        args: Event = {"step": step}
        location = self.report.step.locations.get(value)
        if location is not None:
            source = f"{location.file}:{location.line}" if location.file else ""
            args |= {"module": location.module, "source": source}
        return {
            "ph": "X", "name": name, "cat": kind, "pid": self.report.graph, "tid": thread,
            "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
        }  # fmt: skip

    def _counter(self, name: str, start: int, nbytes: int) -> Event:
        return {
            "ph": "C", "name": name, "pid": self.report.graph, "tid": 0, "ts": start / 1e3,
            "args": {"bytes": nbytes},
        }  # fmt: skip

    def _name(self, what: str, thread: int, name: str) -> Event:
        return {
            "ph": "M", "name": what, "pid": self.report.graph, "tid": thread, "ts": 0,
            "args": {"name": name},
        }  # fmt: skip
