"""A model of torch's CUDA caching allocator: which bytes are reserved for which requests.

A request is rounded, then served by the smallest free block of its pool and stream that holds it.
Where there is none, a segment is taken from the device. Source: torch 2.11 to 2.14,
c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `alloc_block`, `alloc_found_block`,
`free_block`, `release_block`).

Not modelled: a device that is full, for which cached blocks would go back; blocks that wait for
another stream (record_stream), private pools of CUDA graphs, and the addresses that cudaMalloc
chooses. What the CUDA context and libraries hold is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator_blocks import Block, Device, ExpandableSegments, Level, Pool
from fxremat.memory.allocator_settings import (
    LARGEST_SMALL_BYTES,
    AllocatorSettings,
    is_worth_splitting,
    round_request,
    segment_bytes_for,
)


class CachingAllocator:
    """The allocator of one device, which never runs out."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self._device = Device()
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._segments = _Segments(self._device)
        self._expandable = ExpandableSegments(self._device, self.settings.large_segment)
        self._live: dict[int, tuple[Pool, Block]] = {}
        self._allocated, self._requested = Level(), Level()

    @property
    def allocated(self) -> int:
        """Bytes of the blocks in use, as torch.cuda.memory_allocated counts them."""
        return self._allocated.now

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that `allocated` has been."""
        return self._allocated.peak

    @property
    def reserved(self) -> int:
        """Bytes taken from the device, as torch.cuda.memory_reserved counts them."""
        return self._device.reserved.now

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that `reserved` has been."""
        return self._device.reserved.peak

    @property
    def requested(self) -> int:
        """Bytes that callers asked for and have not freed."""
        return self._requested.now

    @property
    def peak_requested_bytes(self) -> int:
        """The most that `requested` has been."""
        return self._requested.peak

    @property
    def inactive_split(self) -> int:
        """Free bytes in segments that also hold other blocks; expandable segments do not count."""
        return sum(b.nbytes for _, b in self._free() if b.is_split and b.space is None)

    @property
    def segment_count(self) -> int:
        """Segments that exist; an expandable one counts once, however much of it is mapped."""
        return self._segments.count + self._expandable.count

    def free_blocks(self) -> list[tuple[int, int, int, bool]]:
        """Every free block: its stream, bytes, address, and whether it is of the small pool."""
        return [(b.stream, b.nbytes, b.address, pool.small) for pool, b in self._free()]

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block for ``nbytes``; 0, and no block, for none."""
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"cannot allocate {nbytes} bytes; ask for 0 or more")
            return 0
        rounded = round_request(nbytes, self.settings)
        pool = self._small if rounded <= LARGEST_SMALL_BYTES else self._large
        block = self._cached(pool, stream, rounded)
        if block is None:
            block = self._new(pool, stream, rounded)
        return self._hand_out(pool, block, rounded, nbytes)

    def free(self, address: int) -> None:
        """Frees what `allocate` returned; raises `ValueError` where nothing lives there."""
        if address == 0:
            return
        if address not in self._live:
            raise ValueError(f"nothing is allocated at {address:#x}; free each address once")
        pool, block = self._live.pop(address)
        self._allocated.change(-block.nbytes)
        self._requested.change(-block.requested)
        block.allocated = False
        pool.add(pool.merge(block))

    def empty_cache(self) -> None:
        """Gives back every segment, and every page, that holds no block in use."""
        for pool in (self._large, self._small):
            self._segments.release(pool)
            self._expandable.release(pool)

    def _free(self) -> list[tuple[Pool, Block]]:
        pools = (self._small, self._large)
        return [(pool, block) for pool in pools for block in pool.free_blocks()]

    def _cached(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        """The free block that serves a request, taken out of its pool."""
        block = _best_fit(pool, stream, rounded)
        if block is None or not self._may_serve(block.nbytes, rounded):
            return None
        pool.remove(block)
        return block

    def _may_serve(self, free: int, rounded: int) -> bool:
        """Whether oversize blocks, which are not split, are kept for requests of their size."""
        if not self.settings.is_oversize(rounded):
            return not self.settings.is_oversize(free)
        return free < rounded + self.settings.max_non_split_rounding

    def _new(self, pool: Pool, stream: int, rounded: int) -> Block:
        """A block in a new segment or in new pages, in no pool."""
        if self.settings.expandable_segments:
            return self._expandable.allocate(pool, stream, rounded)
        return self._segments.allocate(stream, segment_bytes_for(rounded, self.settings))

    def _hand_out(self, pool: Pool, block: Block, rounded: int, nbytes: int) -> int:
        """Splits a block that is in no pool where that is worth it, and marks it as used."""
        if is_worth_splitting(block.nbytes, rounded, pool.small, self.settings):
            pool.add(block.cut(rounded))
        block.allocated = True
        block.requested = nbytes
        self._live[block.address] = pool, block
        self._allocated.change(block.nbytes)
        self._requested.change(nbytes)
        return block.address


@dataclass(eq=False)
class _Segments:
    """All segments from cudaMalloc of an allocator; ``count`` of them exist."""

    device: Device
    count: int = 0

    def allocate(self, stream: int, nbytes: int) -> Block:
        """A segment as one free block, in no pool."""
        self.device.take(nbytes)
        self.count += 1
        return Block(self.device.addresses(nbytes), nbytes, stream)

    def release(self, pool: Pool) -> None:
        """Gives back every segment that is one free block."""
        for block in pool.free_blocks():
            if block.space is None and not block.is_split:
                pool.remove(block)
                self.count -= 1
                self.device.give_back(block.nbytes)


def _best_fit(pool: Pool, stream: int, rounded: int) -> Block | None:
    """The smallest free block that holds ``rounded`` bytes, the lowest of its size.

    A block that can grow counts with what it can grow to, so that the next in size goes first
    where it can grow less.
    """
    fitting = pool.at_least(stream, rounded)
    best = next(fitting, None)
    if best is None or best.space is None:
        return best
    for block in fitting:
        if block.reach >= best.reach:
            break
        best = block
    return best


@dataclass(frozen=True)
class Usage:
    """What a trace needs of the device, at most."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    segment_count: int


def apply_events(allocator: CachingAllocator, events: Iterable[Event]) -> Iterator[None]:
    """Applies one event after the other, yielding after each.

    Raises `ValueError` for a name that is allocated twice, or freed without being allocated.
    """
    address_of: dict[str, int] = {}
    for step, event in enumerate(events):
        match event:
            case Allocate(name, nbytes, stream):
                if name in address_of:
                    raise ValueError(f"event {step} allocates {name!r} again; free it before")
                address_of[name] = allocator.allocate(nbytes, stream)
            case Free(name):
                if name not in address_of:
                    raise ValueError(f"event {step} frees {name!r}, which is not allocated")
                allocator.free(address_of.pop(name))
            case EmptyCache():
                allocator.empty_cache()
        yield


def replay(events: Iterable[Event], settings: AllocatorSettings | None = None) -> Usage:
    """The peaks of a trace that starts with an empty allocator.

    Raises `ValueError` as `apply_events` does.
    """
    allocator = CachingAllocator(settings)
    for _ in apply_events(allocator, events):
        pass
    return Usage(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.peak_requested_bytes,
        allocator.segment_count,
    )
