"""The segment of CUDA memory that a graph runs in, on a model of the allocator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from fxremat.memory import segments
from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.segments import WALL_BYTES, Segment, SharedSegments
from fxremat.sizes import MIB
from fxremat.step.promise import Promise

CUDA = torch.device("cuda")


class _Piece:
    """A tensor, as far as segments ask; freed when nobody has it."""

    def __init__(self, allocator: CachingAllocator, nbytes: int) -> None:
        self.nbytes = nbytes
        self.allocator = allocator
        self.address = allocator.allocate(nbytes)

    def data_ptr(self) -> int:
        return self.address

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.allocator.free(self.address)


class _Device:
    """What a segment asks of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocator = CachingAllocator()
        self.free = 1 << 40
        for name, function in (
            ("memory_stats_as_nested_dict", self.statistics),
            ("memory_snapshot", self.snapshot),
            ("empty_cache", self.allocator.empty_cache),
        ):
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(segments, "allocate_cublas", lambda device: None)
        monkeypatch.setattr(torch, "empty", self.empty)

    def piece(self, nbytes: int) -> _Piece:
        return _Piece(self.allocator, nbytes)

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> _Piece:
        assert dtype.itemsize == 1
        if nbytes > self.free:
            raise torch.OutOfMemoryError("none left")
        return self.piece(nbytes)

    def statistics(self, device: torch.device) -> dict[str, Any]:
        now = {
            "reserved_bytes": self.allocator.reserved,
            "requested_bytes": self.allocator.requested,
        }
        return {name: {"all": {"current": nbytes}} for name, nbytes in now.items()}

    def snapshot(self) -> list[dict[str, Any]]:
        """All segments as one, which is there while there are any."""
        if not self.allocator.reserved:
            return []
        blocks = [
            {"state": "inactive", "size": nbytes, "address": address}
            for _, nbytes, address, small in self.allocator.free_blocks()
            if not small
        ]
        return [{"address": 0, "total_size": 1 << 62, "blocks": blocks}]


def test_a_segment_is_taken_with_room_for_what_is_to_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """30 of the 50 MiB that are held beside the graph are there; 20 are still to come."""
    device = _Device(monkeypatch)
    held = device.piece(40 * MIB)
    segment = Segment(CUDA, 100 * MIB, reserve_bytes=50 * MIB)
    assert segment.is_due
    segment.take(own_bytes=10 * MIB)
    assert device.allocator.reserved == 160 * MIB + WALL_BYTES
    assert not segment.is_due
    assert not Segment(CUDA, 0, 0).is_due
    device.free = 90 * MIB
    Segment(CUDA, 100 * MIB, 0).take(0)
    assert "no 102.00 MiB in one piece" in caplog.text
    assert held.nbytes == 40 * MIB


def test_a_segment_is_taken_again_when_it_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else that is given back is no reason, nor is it while something lives in it."""
    device = _Device(monkeypatch)
    other = device.piece(30 * MIB)
    segment = Segment(CUDA, 100 * MIB, reserve_bytes=0)
    segment.take(own_bytes=30 * MIB)
    state = device.piece(50 * MIB)
    del other
    torch.cuda.empty_cache()
    assert device.allocator.reserved == 100 * MIB + WALL_BYTES
    assert not segment.is_due
    del state
    torch.cuda.empty_cache()
    assert segment.is_due
    segment.take(own_bytes=0)
    assert not segment.is_due
    assert device.allocator.reserved == 100 * MIB + WALL_BYTES


def _step(device: _Device) -> list[_Piece]:
    """Gradients of 30 MiB in all, between activations; 230 MiB at once."""
    activations = [device.piece(50 * MIB) for _ in range(4)]
    gradients = []
    for k in range(3):
        del activations[-1]
        gradients.append(device.piece((5 + 5 * k) * MIB))
        device.piece(45 * MIB)
    return gradients


def _train(
    device: _Device, segment: Segment, steps: Iterable[int], states: list[_Piece]
) -> list[_Piece]:
    """Steps of a graph and of an optimizer, which makes two states for each gradient."""
    for _ in steps:
        if segment.is_due:
            segment.take(0)
        elif segment.has_room:
            segment.close_room(0)
        gradients = _step(device)
        if segment.has_room:
            segment.open_room()
        if not states:
            states += [device.piece(g.nbytes) for g in gradients for _ in range(2)]
            device.piece(8 * MIB)  # for a moment
        del gradients
    return states


@pytest.mark.parametrize("keep", [False, True])
def test_states_come_into_the_room(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """They are cut from the segment where steps have no use for it, but without a room."""
    device = _Device(monkeypatch)
    segment = Segment(CUDA, 200 * MIB, reserve_bytes=62 * MIB)
    if not keep:
        monkeypatch.setattr(segments, "LEAST_ROOM_BYTES", 1 << 40)
    states = _train(device, segment, range(6), [])
    assert len(states) == 6
    assert (device.allocator.peak_reserved_bytes == 262 * MIB + WALL_BYTES) is keep
    assert segment.has_room is False


def _promise(name: str, *, several: bool = False, **more: Any) -> Promise:
    given = {"tuning": 60 * MIB, "nbytes": 100 * MIB, **more}
    segment = segments.SegmentPlan(several=several, **given)
    return Promise(name, CUDA, 400 * MIB, 0, 0, 0, 0, segment)


def test_a_second_graph_with_the_budget_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the segment of the first, which is in use; from the next step on both are one."""
    device = _Device(monkeypatch)
    shared, first, second = SharedSegments(), _promise("first"), _promise("second")
    shared.before(first, 0, ())
    assert device.allocator.reserved == 100 * MIB + WALL_BYTES
    saved = [device.piece(60 * MIB)]
    shared.before(second, 1, ())
    assert device.allocator.reserved == 324 * MIB
    saved.append(device.piece(200 * MIB))
    saved.clear()
    shared.before(first, 0, ())
    device.piece(320 * MIB)
    assert device.allocator.reserved == 324 * MIB
    shared.before(second, 1, ())
    assert device.allocator.reserved == 324 * MIB
    none = _promise("none", nbytes=None)
    assert shared.before(none, 0, ()) is None
