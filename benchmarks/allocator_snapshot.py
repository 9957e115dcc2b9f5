"""Traces from the memory snapshots of torch, and how far the model is from what they recorded.

A snapshot is the dict that torch.cuda.memory._snapshot() returns: "segments" as they are when it is
taken, and in "device_traces" what happened before, oldest first, for each device. Words of the
traces: torch, torch/cuda/memory.py (`_snapshot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fxremat.core.events import Allocate, Free
from fxremat.memory.allocator_settings import AllocatorSettings

from .allocator import Allocator, EmptyCache, HeapEvent, apply_events

_RESERVED_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_WITHOUT_EFFECT = ("free_requested", "oom", "snapshot", "user_defined", "workspace_snapshot")
_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class Recording:
    """The trace of a device, and the bytes that torch had reserved after each of its events.

    The first ``preexisting`` events allocate what was there when recording began; where those
    blocks lay in their segments is not known, so that a replay is exact only without them.
    """

    events: tuple[HeapEvent, ...]
    reserved_bytes: tuple[int, ...]
    preexisting: int


@dataclass(frozen=True)
class Comparison:
    """Reserved bytes by the model and as recorded; differences are model less recording.

    ``worst_difference_bytes`` is the largest in size over all events, ``worst_step`` the first
    event with it. Events that only restore what was there before the recording do not count.
    """

    recorded_peak_bytes: int
    modelled_peak_bytes: int
    worst_difference_bytes: int
    worst_step: int
    last_difference_bytes: int
    steps: int
    preexisting: int

    @property
    def peak_difference_bytes(self) -> int:
        """How much the modelled peak is above the recorded one."""
        return self.modelled_peak_bytes - self.recorded_peak_bytes


@dataclass(frozen=True)
class _Live:
    nbytes: int
    stream: int


def _blocks_at_end(segments: Iterable[Mapping[str, Any]]) -> dict[int, _Live]:
    """What is allocated when the snapshot is taken, by address."""
    blocks: dict[int, _Live] = {}
    for segment in segments:
        sizes = [block["size"] for block in segment["blocks"]]
        addresses = accumulate(sizes[:-1], initial=segment["address"])
        for address, block in zip(addresses, segment["blocks"], strict=False):
            if block["state"] != "inactive":
                nbytes = block.get("requested_size", block["size"])
                blocks[address] = _Live(nbytes, segment["stream"])
    return blocks


def _blocks_at_start(
    entries: Sequence[Mapping[str, Any]], at_end: Mapping[int, _Live]
) -> dict[int, _Live]:
    """What was allocated before the first entry: the end, with all entries undone."""
    live = dict(at_end)
    for entry in reversed(entries):
        if entry["action"] == "alloc":
            live.pop(entry["addr"], None)
        elif entry["action"] == "free_completed":
            live[entry["addr"]] = _Live(entry["size"], entry["stream"])
    return live


@dataclass
class _Reader:
    """Turns entries into events. A name is the address and how often it was allocated."""

    reserved: int
    events: list[HeapEvent] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)
    released: bool = False

    def add(self, event: HeapEvent) -> None:
        self.events.append(event)
        self.history.append(self.reserved)

    def name(self, address: int) -> str:
        return f"{address:#x}.{self.uses.get(address, 0)}"

    def allocate(self, address: int, nbytes: int, stream: int) -> None:
        self.uses[address] = self.uses.get(address, 0) + 1
        self.add(Allocate(self.name(address), nbytes, stream))

    def read(self, entry: Mapping[str, Any]) -> None:
        action = entry["action"]
        sign = _RESERVED_SIGN.get(action, 0)
        if self.released and sign >= 0:
            self.released = False
            self.add(EmptyCache())
        if sign:
            self.reserved += sign * entry["size"]
            self.released = sign < 0
        elif action == "alloc":
            self.allocate(entry["addr"], entry["size"], entry["stream"])
        elif action == "free_completed":
            self.add(Free(self.name(entry["addr"])))
        elif action not in _WITHOUT_EFFECT:
            raise ValueError(
                f"the snapshot has an action {action!r} that is not known; leave it out"
            )


def _refuse_private_pools(parts: Iterable[Mapping[str, Any]], key: str) -> None:
    for part in parts:
        pool = tuple(part.get(key, _DEFAULT_POOL))
        if pool != _DEFAULT_POOL:
            raise ValueError(
                f"the snapshot uses the private pool {pool}, and private pools are not modelled; "
                "record without CUDA graphs"
            )


def from_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> Recording:
    """The trace of ``device`` in a snapshot.

    Each run of segments or pages that are given back becomes an `EmptyCache`, since it follows from
    a call of torch.cuda.empty_cache() or from an allocation for which there was no room. With
    max_split_size_mb or garbage collection only a part may go back, and the replay is then not
    exact. A block is freed at "free_completed", when it can be used again. Raises `ValueError` for
    private pools and for actions that are not known.
    """
    entries = snapshot["device_traces"][device]
    segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
    _refuse_private_pools(entries, "pool_id")
    _refuse_private_pools(segments, "segment_pool_id")
    changes = sum(_RESERVED_SIGN.get(entry["action"], 0) * entry["size"] for entry in entries)
    reader = _Reader(sum(segment["total_size"] for segment in segments) - changes)
    at_start = _blocks_at_start(entries, _blocks_at_end(segments))
    for address, block in sorted(at_start.items()):
        reader.allocate(address, block.nbytes, block.stream)
    for entry in entries:
        reader.read(entry)
    if reader.released:
        reader.add(EmptyCache())
    return Recording(tuple(reader.events), tuple(reader.history), len(at_start))


def compare(
    snapshot: Mapping[str, Any], settings: AllocatorSettings | None = None, device: int = 0
) -> Comparison:
    """How far modelled reserved bytes are from those that a snapshot recorded.

    ``settings`` are those that the process ran with. The device of the model has no end: memory
    goes back when the recording says so. Raises `ValueError` as `from_snapshot` does.
    """
    recording = from_snapshot(snapshot, device)
    allocator = Allocator(settings)
    modelled = [allocator.reserved for _ in apply_events(allocator, recording.events)][
        recording.preexisting :
    ]
    recorded = recording.reserved_bytes[recording.preexisting :]
    differences = [ours - theirs for ours, theirs in zip(modelled, recorded, strict=True)]
    worst = max(range(len(differences)), key=lambda step: abs(differences[step]), default=0)
    return Comparison(
        max(recorded, default=0),
        max(modelled, default=0),
        differences[worst] if differences else 0,
        worst + recording.preexisting,
        differences[-1] if differences else 0,
        len(differences),
        recording.preexisting,
    )
