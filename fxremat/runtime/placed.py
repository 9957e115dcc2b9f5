"""Where generated code gets the memory of its buffers: at planned places, or from torch.

The code that Inductor generates takes these functions instead of torch's (written into it by
`fxremat.passes.fixed_order`). A forward gets the places of its buffers from whoever calls it
(`places_of_forward`), a backward from its node in the graph of autograd (`set_places_of_backward`).
Code that was given no places allocates with torch's functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from fxremat.compat.backward import running_node
from fxremat.compat.tensors import EMPTY, Empty, reinterpret, storage_uses

Call = Callable[..., Any]


class Place(NamedTuple):
    """Where the buffer of one call lies: what is asked for, and the slot that it is given.

    ``size`` is None where `Half.place` decides. Slots are those of `fxremat.memory.slots`; those
    ``before`` had the bytes last. ``number`` is that of the call.
    """

    size: tuple[int, ...] | None
    stride: tuple[int, ...]
    dtype: torch.dtype
    empty: Empty
    slot: Any
    before: tuple[Any, ...]
    number: int


Places = Iterator[Place | None]


def closely(place: Place | None) -> Place | None:
    """The same for `Half.place` to decide on."""
    return None if place is None else place._replace(size=None)


Half = Any
"""The places of the buffers of one half of a run: a `fxremat.memory.arena.PlacedHalf`."""


class _Now(threading.local):
    """Of this thread: the places of the code that runs, and those offered to the next forward."""

    places: Places | None = None
    half: Half = None
    offered: Half = None


_NOW = _Now()
_NODE_ATTRIBUTE = "places_of_buffers"


def _placing(empty: Empty) -> Empty:
    """``empty``, at the next place of the code that runs in this thread, if it has places."""
    now = _NOW

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        places = now.places
        if places is None:
            return empty(size, stride, dtype)
        place = next(places, None)
        if place is None:
            return empty(size, stride, dtype)
        planned, strides, kind, allocate, own, before, number = place
        if size == planned and stride == strides and dtype is kind and empty is allocate:
            for slot in before:
                if (
                    storage_uses(slot.number) > slot.uses
                    or getrefcount(slot.storage) > slot.references
                ):
                    break
            else:
                return reinterpret(own.base, size, stride, 0)
        placed: torch.Tensor = now.half.place(number, size, stride, dtype, empty)
        return placed

    return empty_strided


empty_strided_cpu = _placing(EMPTY["cpu"])
empty_strided_cuda = _placing(EMPTY["cuda"])


def go_on_with(places: Places) -> None:
    """The rest of the code that runs in this thread takes these places."""
    _NOW.places = places


@contextmanager
def places_of_forward(half: Half) -> Iterator[None]:
    """The forward that is called inside lies there."""
    before, _NOW.offered = _NOW.offered, half
    try:
        yield
    finally:
        _NOW.offered = before


def set_places_of_backward(node: Any, half: Half) -> None:
    """Each backward that runs ``node``, that of a compiled forward, lies there."""
    if node is not None:
        setattr(node, _NODE_ATTRIBUTE, half)


def forward_at_places(call: Call) -> Call:
    """The function of a forward's code, at the places that it is offered."""

    def offered() -> Half:
        half, _NOW.offered = _NOW.offered, None
        return half

    return _at_places(call, offered)


def backward_at_places(call: Call) -> Call:
    """The function of a backward's code, at the places that its node knows."""
    return _at_places(call, lambda: getattr(running_node(), _NODE_ATTRIBUTE, None))


def _at_places(call: Call, next_half: Callable[[], Half]) -> Call:
    @wraps(call)
    def at_places(*args: Any) -> Any:
        half = next_half()
        places = None if half is None else half.enter()
        before = _NOW.places, _NOW.half
        _NOW.places, _NOW.half = places, half
        try:
            return call(*args)
        finally:
            _NOW.places, _NOW.half = before
            if half is not None and places is not None:
                half.leave()

    return at_places
