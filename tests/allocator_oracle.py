"""What torch documents of its caching allocator, checked event by event on a log.

Written from the rules, the obvious way, and without a line of the model. Before each event the free
memory is derived; then the entries that the event wrote have to be those that the rules demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.memory.allocator import AllocatorSettings, Entry
from tests.allocator_memory import MIB, Gap, Memory


def rounded(nbytes: int, settings: AllocatorSettings) -> int:
    """512 bytes are the grain; with divisions, so many steps between two powers of two."""
    power = 2 ** max(e for e in range(60) if 2**e <= max(nbytes, 1))
    interval = max(i for i in range(16) if i == 0 or power >= MIB * 2**i)
    divisions = settings.divisions[interval]
    step = power // divisions if divisions > 1 and nbytes > 512 * divisions else 512
    steps, rest = divmod(nbytes, step)
    return step * (steps + (rest > 0))


def segment_size(nbytes: int, settings: AllocatorSettings) -> int:
    """2 MiB for small ones, a large segment below 10 MiB, else the next multiple of 2 MiB."""
    if nbytes <= MIB:
        return 2 * MIB
    if nbytes < 10 * MIB:
        return settings.large_segment_bytes
    return (nbytes + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)


class Oracle:
    """Follows a log, slice by slice; each method asserts that its slice is right."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings = settings
        self.memory = Memory(capacity, settings.large_segment_bytes)
        self.limit = None if capacity is None else int(capacity * settings.memory_fraction)

    def on_free(self, address: int, entries: Sequence[Entry]) -> None:
        assert [e.action for e in entries] == ["free_completed"], "a free does nothing else"
        assert entries[0].address == address, "what is asked for is freed"
        self.memory.apply(entries[0])

    def on_empty_cache(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.action in ("segment_free", "segment_unmap"), "memory only goes back"
            self.memory.apply(entry)
        self.memory.assert_nothing_to_release()

    def on_allocate(
        self, nbytes: int, stream: int, entries: Sequence[Entry], failed: bool = False
    ) -> None:
        request = Request(stream, rounded(nbytes, self.settings))
        gap = self.best_gap(request)
        if gap is not None:
            assert [e.action for e in entries] == ["alloc"], "a cached block needs nothing else"
            assert entries[0].address == gap.address, "the best fit is used"
        elif self.settings.expandable_segments:
            gap = self.grow(request, entries, failed)
        else:
            gap = self.extend(request, entries, failed)
        assert failed == (gap is None), "it fails where there is no room"
        if gap is not None:
            self.place(request, nbytes, gap, entries[-1])

    def place(self, request: Request, nbytes: int, gap: Gap, entry: Entry) -> None:
        assert entry.action == "alloc", "an allocation ends with its block"
        assert (entry.stream, entry.small) == (request.stream, request.small)
        assert (entry.address, entry.requested_bytes) == (gap.address, nbytes)
        assert entry.nbytes == self.block_size(gap.nbytes, request), "split as it should be"
        self.memory.apply(entry)

    def block_size(self, free: int, request: Request) -> int:
        rest = free - request.need
        if request.small or self.settings.expandable_segments:
            return request.need if rest >= 512 else free
        oversize = self.settings.max_split_bytes
        may_split = oversize is None or request.need < oversize
        return request.need if may_split and rest > MIB else free

    def best_gap(self, request: Request) -> Gap | None:
        """The smallest that fits; where it could grow, the next may go first."""
        segments = self.memory.of(request.stream, request.small)
        gaps = [gap for segment in segments for gap in self.memory.gaps(segment)]
        fitting = sorted(
            (gap for gap in gaps if gap.nbytes >= request.need),
            key=lambda gap: (gap.nbytes, gap.address),
        )
        if not fitting:
            return None
        index = 0
        while index + 1 < len(fitting) and fitting[index + 1].reach < fitting[index].reach:
            index += 1
        best = fitting[index] if self.settings.expandable_segments else fitting[0]
        return best if self.may_use(best.nbytes, request.need) else None

    def may_use(self, free: int, need: int) -> bool:
        """Oversize blocks serve oversize requests that waste less than the limit of rounding."""
        oversize = self.settings.max_split_bytes
        if oversize is None:
            return True
        if need < oversize:
            return free < oversize
        return free - need < self.settings.max_non_split_rounding_bytes

    def is_over_limit(self, nbytes: int) -> bool:
        return self.limit is not None and self.memory.reserved + nbytes > self.limit

    def extend(self, request: Request, entries: Sequence[Entry], failed: bool) -> Gap | None:
        """A new segment, for which others may go back first."""
        size = segment_size(request.need, self.settings)
        given = [e for e in entries if e.action == "segment_free"]
        taken = [] if failed else ["segment_alloc", "alloc"]
        assert [e.action for e in entries[len(given) :]] == taken, "free first, then take"
        self.give(given, size)
        if failed:
            self.memory.assert_nothing_to_release()
            assert self.is_over_limit(size), "there was room"
            return None
        new = entries[-2]
        assert (new.nbytes, new.stream, new.small) == (size, request.stream, request.small)
        assert not self.is_over_limit(size), "over the limit"
        self.memory.apply(new)
        return Gap(new.address, size, size)

    def give(self, given: Sequence[Entry], size: int) -> None:
        """Segments go back because there is no room, or as garbage above the threshold."""
        share = self.settings.garbage_collection_threshold
        fraction = self.settings.memory_fraction
        garbage = self.limit is not None and share > 0 and fraction < 1
        dirty = garbage and self.memory.reserved > int(share * (self.limit or 0))
        assert not given or dirty or self.is_over_limit(size), "given back without need"
        for entry in given:
            self.memory.apply(entry)
        if given and not garbage and self.settings.max_split_bytes is None:
            self.memory.assert_nothing_to_release()

    def grow(self, request: Request, entries: Sequence[Entry], failed: bool) -> Gap | None:
        """New pages at the lowest address that has room, once free pages went back if need be."""
        unmaps = [i for i, entry in enumerate(entries) if entry.action == "segment_unmap"]
        again = unmaps[-1] + 1 if unmaps else 0
        if again:
            assert self.is_short(request, self.lowest_room(request)), "unmapped without need"
            for entry in entries[:again]:
                self.memory.apply(entry)
            self.memory.assert_nothing_to_release()
        start = self.lowest_room(request)
        short = self.is_short(request, start)
        missing = self.missing_pages(request, start)
        maps = [e for e in entries[again:] if e.action == "segment_map"]
        for entry in maps:
            self.memory.apply(entry)
        if failed:
            assert short, "there was room"
            return None
        assert not short, "there was no room"
        address = entries[-1].address
        home = self.memory.home(address)
        assert home is not None
        if start is None:
            start, missing = home.address, home.pages(home.address, home.address + request.need)
        page = self.memory.page(request.small)
        mapped = {p for e in maps for p in range(e.address, e.address + e.nbytes, page)}
        assert mapped == missing, "just the missing pages are mapped"
        assert address == start, "the lowest room is used"
        return next(gap for gap in self.memory.gaps(home) if gap.address == start)

    def lowest_room(self, request: Request) -> int | None:
        """The lowest free memory before a hole, or hole, with room for a request; None: nowhere."""
        for segment in self.memory.of(request.stream, request.small):
            for parts in self.memory.rooms(segment):
                for index, (left, _, mapped) in enumerate(parts):
                    if not mapped:
                        start = parts[index - 1][0] if index else left
                        if parts[-1][1] - start >= request.need:
                            return start
        return None

    def missing_pages(self, request: Request, start: int | None) -> set[int]:
        """Pages without memory under a block at ``start``."""
        home = None if start is None else self.memory.home(start)
        if home is None or start is None:
            page = self.memory.page(request.small)
            return set(range(0, request.need, page))
        return home.pages(start, start + request.need) - home.mapped

    def is_short(self, request: Request, start: int | None) -> bool:
        """Whether the limit, or the device, has no room for the pages that are missing."""
        if self.is_over_limit(segment_size(request.need, self.settings)) and self.is_limited:
            return True
        page = self.memory.page(request.small)
        wanted = self.memory.reserved + len(self.missing_pages(request, start)) * page
        return self.memory.capacity is not None and wanted > self.memory.capacity

    @property
    def is_limited(self) -> bool:
        return self.settings.memory_fraction < 1


@dataclass(frozen=True)
class Request:
    """A request on a stream, rounded to ``need`` bytes."""

    stream: int
    need: int

    @property
    def small(self) -> bool:
        return self.need <= MIB
