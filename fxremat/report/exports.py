"""The planned step for viewers of others: a Chrome trace, and a snapshot of torch's allocator."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from fxremat.core.layout import Buffer
from fxremat.core.schedule import Move
from fxremat.core.timeline import Lifetime, Timeline, replay
from fxremat.planner.addresses import place
from fxremat.report.report import Report

Event = dict[str, Any]
OPS, TO_HOST, TO_DEVICE = 1, 2, 3
THREADS = {OPS: "ops", TO_HOST: "copies to host memory", TO_DEVICE: "copies to the device"}


def chrome_trace(reports: Sequence[Report]) -> Event:
    """The trace of these graphs for Perfetto and ``chrome://tracing``, each from time 0 on.

    A graph is a process. Its threads are the ops, the copies to host memory and those from there;
    their times are those of the plan. A counter shows how many bytes are live on the device from
    the start of each step on, another one how many bytes of moved values are in host memory. Both
    count the values of the graph only, without what is held outside of it.
    """
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
            args |= {"module": location.module, "source": location.source}
        duration = (end - start) / 1e3
        return self._event("X", name, thread, start / 1e3, args, cat=kind, dur=duration)

    def _counter(self, name: str, start: int, nbytes: int) -> Event:
        return self._event("C", name, 0, start / 1e3, {"bytes": nbytes})

    def _name(self, what: str, thread: int, name: str) -> Event:
        return self._event("M", what, thread, 0, {"name": name})

    def _event(
        self, phase: str, name: str, thread: int, time: float, args: Event, **more: Any
    ) -> Event:
        graph = self.report.graph
        named = {"ph": phase, "name": name, "pid": graph, "tid": thread, "ts": time}
        return {**named, **more, "args": args}


Entry = dict[str, Any]
BASE_ADDRESS = 0x7F00_0000_0000
"""The address of the first graph's segment. Each further graph's begins `STRIDE` later."""
STRIDE = 1 << 42
PICKLE_PROTOCOL = 4
"""The newest pickle protocol that the viewer reads."""
NO_CATEGORY = "unknown"
"""The viewer fails on a snapshot with categories unless this one is among them."""


def memory_snapshot(reports: Sequence[Report]) -> Entry:
    """The snapshot of these graphs, as of torch's allocator, for pytorch.org/memory_viz.

    The schema is that of ``torch.cuda.memory._snapshot``: segments with their blocks at the end,
    and for each device the events that led there. Here a graph is a device with one segment. In
    each step the storages that died before it are freed, then those that it needs are allocated;
    afterwards the allocated bytes are those of the storages of that step. Time is the number of the
    step.

    Addresses are no forecast. They are chosen so that no two storages overlap, in a segment that is
    as small as a quick search finds.
    """
    devices = [_Device(report, number) for number, report in enumerate(reports)]
    return {
        "segments": [device.segment() for device in devices],
        "device_traces": [list(device.events()) for device in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write_snapshot(path: str | Path, reports: Sequence[Report]) -> None:
    """Write the snapshot of these graphs into a file. Raises `OSError`."""
    Path(path).write_bytes(pickle.dumps(memory_snapshot(reports), protocol=PICKLE_PROTOCOL))


class _Device:
    """A graph: its storages, each with its address, by their beginning."""

    def __init__(self, report: Report, number: int) -> None:
        self.report, self.number = report, number
        self.steps = len(report.timeline)
        # those of no bytes would share addresses
        there = [one for one in report.lifetimes if one.nbytes and one.start < one.stop]
        there.sort(key=lambda one: one.start)
        buffers = [Buffer(str(k), one.start, one.stop, one.nbytes) for k, one in enumerate(there)]
        placement = place(buffers)
        self.start, self.size = BASE_ADDRESS + number * STRIDE, placement.arena_bytes
        offsets = placement.offset_bytes
        self.storages = [(self.start + offsets[str(k)], one) for k, one in enumerate(there)]

    def events(self) -> Iterator[Entry]:
        """The event of the segment, then for each step what is freed and what is allocated.

        The allocator frees a block with two events; the viewer shows one.
        """
        begun, ended = defaultdict(list), defaultdict(list)
        for address, one in self.storages:
            begun[one.start].append((address, one))
            ended[one.stop].append((address, one))
        if self.storages:
            made = self._entry("segment_alloc", self.start, self.size, 0, [])
            yield {**made, "category": NO_CATEGORY}
        for step in range(self.steps):
            for address, one in ended[step]:
                for action in ("free_requested", "free_completed"):
                    yield self._entry(action, address, one.nbytes, step, self._at(one))
            for address, one in begun[step]:
                entry = self._entry("alloc", address, one.nbytes, step, self._at(one))
                yield {**entry, "category": self._category(one)}

    def _entry(self, action: str, address: int, size: int, step: int, frames: list[Entry]) -> Entry:
        return {
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": step,
            "frames": frames,
        }  # fmt: skip

    def _at(self, one: Lifetime) -> list[Entry]:
        """The value that a storage holds first, and its module and line, as frames of a stack."""
        location = self.report.step.locations.get(one.value)
        what = f"scratch memory of {one.value}" if one.workspace else one.value
        if location is None:
            return [{"name": what, "filename": "", "line": 0}]
        frames = [{"name": what, "filename": location.file, "line": location.line}]
        if location.module:
            frames.append({"name": "module", "filename": location.module, "line": 0})
        return frames

    def _category(self, one: Lifetime) -> str:
        """The category of a storage, which decides its colour."""
        middle = self.report.step.forward_steps
        if one.workspace:
            return "scratch memory"
        if one.start == 0 and one.stop == self.steps:
            return "there all the time"
        if one.start < middle < one.stop:
            return "held for the backward"
        return "forward only" if one.start < middle else "backward only"

    def segment(self) -> Entry:
        """The segment after the last step: its blocks, and the gaps between them."""
        held = [(address, one) for address, one in self.storages if one.stop == self.steps]
        blocks: list[Entry] = []
        end = self.start
        for address, one in sorted(held, key=itemgetter(0)):
            blocks += _gap(end, address)
            blocks.append(_block(address, one.nbytes, "active_allocated", self._at(one)))
            end = address + one.nbytes
        blocks += _gap(end, self.start + self.size)
        allocated = sum(one.nbytes for _, one in held)
        return {
            "device": self.number, "address": self.start, "total_size": self.size, "stream": 0,
            "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "allocated_size": allocated, "active_size": allocated, "requested_size": allocated,
            "frames": [], "blocks": blocks,
        }  # fmt: skip


def _gap(start: int, end: int) -> list[Entry]:
    return [_block(start, end - start, "inactive", [])] if start < end else []


def _block(address: int, size: int, state: str, frames: list[Entry]) -> Entry:
    requested = 0 if state == "inactive" else size
    return {
        "address": address, "size": size, "requested_size": requested, "state": state,
        "frames": frames,
    }  # fmt: skip
