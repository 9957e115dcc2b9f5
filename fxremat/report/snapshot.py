"""The planned step as a snapshot of torch's allocator, which pytorch.org/memory_viz opens.

The schema is that of ``torch.cuda.memory._snapshot``: segments with their blocks at the end, and
for each device the events that led there. Here a graph is a device with one segment. In each step
the storages that died before it are freed, then those that it needs are allocated; afterwards the
allocated bytes are those of the storages of that step. Time is the number of the step.

Addresses are no forecast. They are chosen so that no two storages overlap, in a segment that is as
small as a quick search finds.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxremat.core.addresses import Buffer
from fxremat.core.timeline import Lifetime
from fxremat.planner.addresses import place
from fxremat.report.report import Report

Entry = dict[str, Any]
BASE_ADDRESS = 0x7F00_0000_0000
"""The address of the first graph's segment. Each further graph's begins `STRIDE` later."""
STRIDE = 1 << 42
PICKLE_PROTOCOL = 4
"""The newest pickle protocol that the viewer reads."""
SECONDS_TO_PLACE = 2.0
NO_CATEGORY = "unknown"
"""The viewer fails on a snapshot with categories unless this one is among them."""


def memory_snapshot(reports: Sequence[Report]) -> Entry:
    """The snapshot of these graphs."""
    devices = [_Device.of(report, number) for number, report in enumerate(reports)]
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
    """A graph: its storages, and the address of each."""

    def __init__(self, report: Report, number: int, storages: Sequence[Lifetime]) -> None:
        self.report, self.number = report, number
        self.steps = len(report.timeline)
        self.storages = storages
        buffers = [
            Buffer(str(index), one.start, one.stop, one.nbytes)
            for index, one in enumerate(storages)
        ]
        placement = place(buffers, time_limit_s=SECONDS_TO_PLACE)
        self.start = BASE_ADDRESS + number * STRIDE
        self.size = placement.arena_bytes
        offsets = placement.offset_bytes
        self.addresses = [self.start + offsets[str(index)] for index in range(len(storages))]

    @staticmethod
    def of(report: Report, number: int) -> _Device:
        """The device of a report, without storages of no bytes: they would share addresses."""
        there = [one for one in report.lifetimes if one.nbytes and one.start < one.stop]
        return _Device(report, number, sorted(there, key=lambda one: one.start))

    def events(self) -> Iterator[Entry]:
        """The event of the segment, then for each step what is freed and what is allocated."""
        begun: list[list[int]] = [[] for _ in range(self.steps + 1)]
        ended: list[list[int]] = [[] for _ in range(self.steps + 1)]
        for index, one in enumerate(self.storages):
            begun[one.start].append(index)
            ended[one.stop].append(index)
        if self.storages:
            made = self._entry("segment_alloc", self.start, self.size, 0, [])
            yield {**made, "category": NO_CATEGORY}
        for step in range(self.steps):
            for index in ended[step]:
                yield from self._freed(index, step)
            for index in begun[step]:
                yield self._allocated(index)

    def _allocated(self, index: int) -> Entry:
        one = self.storages[index]
        entry = self._entry("alloc", self.addresses[index], one.nbytes, one.start, self._at(one))
        return {**entry, "category": self._category(one)}

    def _freed(self, index: int, step: int) -> Iterator[Entry]:
        """The two events with which the allocator frees a block; the viewer shows one."""
        one, address = self.storages[index], self.addresses[index]
        for action in ("free_requested", "free_completed"):
            yield self._entry(action, address, one.nbytes, step, self._at(one))

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
        held = [index for index, one in enumerate(self.storages) if one.stop == self.steps]
        blocks: list[Entry] = []
        end = self.start
        for index in sorted(held, key=lambda index: self.addresses[index]):
            address, one = self.addresses[index], self.storages[index]
            blocks += _gap(end, address)
            blocks.append(_block(address, one.nbytes, "active_allocated", self._at(one)))
            end = address + one.nbytes
        blocks += _gap(end, self.start + self.size)
        allocated = sum(self.storages[index].nbytes for index in held)
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
