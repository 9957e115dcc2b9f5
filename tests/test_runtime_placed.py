"""Code at the places of its buffers, without a compiler: functions that allocate as code does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch

from fxremat.core.layout import CodeBuffer, HalfLayout, RunLayout, StepLayout
from fxremat.memory.arena import Arena, PlacedRun
from fxremat.runtime.placed import (
    empty_strided_cpu,
    empty_strided_cuda,
)
from tests.placing import PoisonedArena, run_at

HOST = torch.device("cpu")
KIB = 1024


def buffer(*size: int, dtype: torch.dtype = torch.float32) -> CodeBuffer:
    stride = torch.empty(size, device="meta").stride()
    return CodeBuffer("0", size, stride, str(dtype), dtype.itemsize)


def half(*at: int | None, outlive: tuple[int, ...] = ()) -> HalfLayout:
    """Buffers of 1 KiB at these offsets, in KiB."""
    offsets = tuple(None if one is None else KIB * one for one in at)
    return HalfLayout((buffer(256),) * len(at), offsets, frozenset(outlive))


def placed(forward: HalfLayout, backward: HalfLayout | None = None) -> PlacedRun:
    return Arena(HOST).placed(layout_of(forward, backward))[0]


def layout_of(forward: HalfLayout, backward: HalfLayout | None = None) -> StepLayout:
    return StepLayout((RunLayout(forward, backward or half()),), 16 * KIB)


def ask(size: int = 256, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return empty_strided_cpu((size,), (1,), dtype)


def where(run: PlacedRun, *tensors: torch.Tensor) -> list[int | None]:
    """The places of tensors, in KiB; None outside of the arena."""
    block = run.forward.arena.block
    assert block is not None
    offsets = [tensor.data_ptr() - block.data_ptr() for tensor in tensors]
    return [at // KIB if 0 <= at < block.nbytes else None for at in offsets]


def test_places_are_those_of_one_thread() -> None:
    """While one is in the arena another one allocates as ever, and its calls take no places."""
    run, others = placed(half(0, 1)), list[torch.Tensor]()

    def code() -> list[torch.Tensor]:
        first = ask()
        for call in (ask, lambda: run_at(run.forward, ask)):
            thread = Thread(target=lambda call=call: others.append(call()))
            thread.start()
            thread.join()
        return [first, ask()]

    assert where(run, *run_at(run.forward, code), *others) == [0, 1, None, None]
    assert run.forward.arena.missed == 1


def test_a_gpu_that_records_a_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    empty = Arena(torch.device("cuda"))
    (run,) = empty.placed(StepLayout((RunLayout(half(0)),), KIB))
    assert run.forward.enter() is None
    assert empty.nbytes == 0


def test_on_a_gpu_streams_wait_and_all_else_comes_from_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this order; what is placed lies in host memory here."""
    calls: list[Any] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            calls.append(("waits", self, other))

    @contextmanager
    def noted(pool: object, device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("as before")

    run, streams = placed(half(0)), [Stream(), Stream()]
    run_at(run.forward, ask)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", noted)
    run.forward.arena.device = device = torch.device("cuda", 0)
    for _ in range(2):
        run_at(run.forward, ask)
        streams.reverse()
    in_pool = [device, "as before"]
    assert calls == [*in_pool, ("waits", *streams[::-1]), *in_pool]


def test_without_memory_for_an_arena_nothing_is_placed(caplog: pytest.LogCaptureFixture) -> None:
    (run,) = Arena(HOST).placed(StepLayout((RunLayout(half(0)),), 1 << 60))
    for _ in range(2):
        assert len(run_at(run.forward, lambda: [ask()])) == 1
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert run.forward.arena.is_off


def test_code_inside_of_other_code_has_no_places() -> None:
    """What runs inside finds the arena taken, and what runs on goes on in its own places."""
    run = placed(half(0, 1))
    inside = run_at(run.forward, lambda: [ask(), *run_at(run.forward, lambda: [ask()]), ask()])
    assert where(run, *inside) == [0, None, 1]
    assert run.forward.arena.missed == 1


SMALLER = [lambda: ask(8), lambda: empty_strided_cpu((4, 8), (8, 1), torch.float32)]
OTHERS: list[Any] = [
    lambda: ask(257),
    lambda: ask(dtype=torch.int32),
    lambda: ask(0),
    lambda: empty_strided_cpu((256,), (2,), torch.float32),
]


@pytest.mark.parametrize(
    ("calls", "places", "differences"),
    [(SMALLER, [0, 1], 0), *(([ask, other, ask], [0, None, 1], 1) for other in OTHERS)],
)
def test_what_is_not_as_planned_lies_elsewhere_unless_it_is_smaller(
    calls: list[Any], places: list[int | None], differences: int
) -> None:
    """And what was planned in the same bytes is asked for again by whoever comes later."""
    run = placed(half(0, 1, 1))
    assert where(run, *run_at(run.forward, lambda: [call() for call in calls])) == places
    assert run.forward.arena.differences == differences


def test_another_device_is_another_buffer() -> None:
    run = placed(half(0))

    def code() -> Any:
        with pytest.raises((RuntimeError, AssertionError)):
            empty_strided_cuda((256,), (1,), torch.float32)

    if not torch.cuda.is_available():
        run_at(run.forward, code)
        assert run.forward.arena.differences == 1


def test_what_is_held_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """By somebody inside of the half, and from the half before; it is told once."""
    run, kept = placed(half(0, 0, 0)), list[torch.Tensor]()

    def code(keep: bool) -> list[torch.Tensor]:
        first = ask().fill_(1)
        if keep:
            kept.append(first)
        del first
        return [ask().fill_(2), ask().fill_(3)]

    with caplog.at_level(logging.WARNING):
        found = run_at(run.forward, code, True)
        assert where(run, *kept, *found) == [0, None, None]
        assert where(run, *run_at(run.forward, code, False)) == [None, None]
    assert len(caplog.records) == 1
    assert run.forward.arena.conflicts == 2 + 3
    assert torch.equal(kept[0], torch.ones(256))
    kept.clear()
    assert where(run, *run_at(run.forward, code, False)) == [0, None]  # it holds the first itself


def test_bytes_are_looked_at_below_a_buffer_that_lies_elsewhere() -> None:
    """The second is not placed, so the third looks at the first."""
    run, kept = placed(half(0, 0, 0)), list[torch.Tensor]()

    def code() -> list[torch.Tensor]:
        kept.append(ask().fill_(1))
        ask(1000)
        return [ask().fill_(2)]

    found = run_at(run.forward, code)
    assert where(run, *kept, *found) == [0, None]
    assert torch.equal(kept[0], torch.ones(256))


def test_bytes_are_looked_at_below_a_place_that_others_hold() -> None:
    """The second is not placed as the last is held from before, so the third looks at the first."""
    layout = HalfLayout((buffer(256),) * 4, (0, KIB // 2, 0, KIB), frozenset({3}))
    run, kept = placed(layout), list[torch.Tensor]()

    def code() -> list[torch.Tensor]:
        kept.append(ask().fill_(1))
        return [ask(), ask().fill_(2), ask()]

    del kept[:], (last := run_at(run.forward, lambda: [ask() for _ in range(4)]))[:3]
    assert where(run, *last) == [1]
    found = run_at(run.forward, code)
    assert where(run, *kept, *found) == [0, None, None, None]
    assert torch.equal(kept[0], torch.ones(256))


def test_dead_memory_is_poisoned() -> None:
    """What has died is filled with NaN, and what lives is not."""
    arena = PoisonedArena(HOST)
    arena.poison = True
    (run,) = arena.placed(layout_of(half(0, 1, outlive=(0,))))

    def code() -> torch.Tensor:
        first = ask().fill_(1)
        ask().fill_(2)
        return first

    first, block = run_at(run.forward, code), arena.block
    assert block is not None
    assert block[:KIB].view(torch.float32).eq(1).all()
    assert block[KIB:].view(torch.float32).isnan().all()
    assert first.sum() == 256
