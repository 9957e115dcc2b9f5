"""What torch documents of its caching allocator, checked event by event on a log.

Written from the rules, the obvious way, and without a line of the model. Before each event the free
memory is derived; then the entries that the event wrote have to be those that the rules demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxremat.memory.allocator import AllocatorSettings, Entry

MIB = 1024 * 1024


@dataclass(frozen=True)
class Gap:
    """A stretch of free memory. ``reach`` is its bytes and those of unmapped pages behind it."""

    address: int
    nbytes: int
    reach: int


@dataclass
class Segment:
    """Memory from one cudaMalloc (``page`` 0), or an expandable segment and its mapped pages."""

    address: int
    nbytes: int
    stream: int
    small: bool
    page: int = 0
    mapped: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    @property
    def reserved(self) -> int:
        return len(self.mapped) * self.page if self.page else self.nbytes

    def pages(self, left: int, right: int) -> set[int]:
        """Pages that have a byte between ``left`` and ``right``."""
        first = left - (left - self.address) % self.page
        return set(range(first, right, self.page))

    def parts(self, left: int, right: int) -> list[tuple[int, int, bool]]:
        """``left`` to ``right`` cut where memory begins or ends: from, to, whether it is mapped."""
        if not self.page:
            return [(left, right, True)] if left < right else []
        parts: list[tuple[int, int, bool]] = []
        runs = [(page, page + self.page) for page in sorted(self.mapped)]
        at = left
        for start, end in runs:
            start, end = max(start, left), min(end, right)
            if start >= end:
                continue
            if start > at:
                parts.append((at, start, False))
            if parts and parts[-1][1] == start and parts[-1][2]:
                parts[-1] = (parts[-1][0], end, True)
            else:
                parts.append((start, end, True))
            at = end
        return [*parts, (at, right, False)] if at < right else parts


@dataclass
class Memory:
    """All segments, and the bytes of live blocks by address. Changes assert what has to hold."""

    large_page: int
    segments: list[Segment] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        return sum(segment.reserved for segment in self.segments)

    def page(self, small: bool) -> int:
        return 2 * MIB if small else self.large_page

    def of(self, stream: int, small: bool) -> list[Segment]:
        """Segments of a stream and a pool, by address."""
        mine = [s for s in self.segments if (s.stream, s.small) == (stream, small)]
        return sorted(mine, key=lambda segment: segment.address)

    def home(self, address: int) -> Segment | None:
        """The segment of an address."""
        found = [s for s in self.segments if s.address <= address < s.end]
        assert len(found) < 2, "segments overlap"
        return found[0] if found else None

    def rooms(self, segment: Segment) -> list[list[tuple[int, int, bool]]]:
        """For each stretch between live blocks, its parts with memory and without."""
        inside = sorted(a for a in self.live if segment.address <= a < segment.end)
        ends = [segment.address, *(a + self.live[a] for a in inside)]
        pairs = zip(ends, [*inside, segment.end], strict=True)
        return [segment.parts(left, right) for left, right in pairs]

    def gaps(self, segment: Segment) -> list[Gap]:
        """Free memory of a segment, in the largest stretches there are."""
        gaps = []
        for parts in self.rooms(segment):
            for index, (left, right, mapped) in enumerate(parts):
                if mapped:
                    last = parts[index + 1] if index + 1 < len(parts) else (0, right, False)
                    gaps.append(Gap(left, right - left, last[1] - left))
        return gaps

    def all_gaps(self) -> list[tuple[int, int, int, bool]]:
        """Every gap: stream, bytes, address, whether it is of the small pool; sorted."""
        pairs = [(s, gap) for s in self.segments for gap in self.gaps(s)]
        return sorted((s.stream, gap.nbytes, gap.address, s.small) for s, gap in pairs)

    def split_bytes(self) -> int:
        """Free bytes in segments from cudaMalloc that are not free as a whole."""
        plain = [(s, gap) for s in self.segments if not s.page for gap in self.gaps(s)]
        return sum(gap.nbytes for s, gap in plain if gap.nbytes < s.nbytes)

    def apply(self, entry: Entry) -> None:
        """Applies one entry of the log."""
        changes = {
            "segment_alloc": self._take,
            "segment_map": self._map,
            "segment_free": self._give,
            "segment_unmap": self._unmap,
            "alloc": self._place,
            "free_completed": self._free,
        }
        changes[entry.action](entry)

    def assert_nothing_to_release(self) -> None:
        """No segment and no page is free as a whole."""
        for segment in self.segments:
            for gap in self.gaps(segment):
                assert segment.page or gap.nbytes < segment.nbytes, "a free segment was kept"
                end = gap.address + gap.nbytes
                kept = [p for p in segment.mapped if gap.address <= p <= end - segment.page]
                assert not kept, "a free page was kept"

    def _add(self, new: Segment) -> None:
        for other in self.segments:
            assert new.end <= other.address or other.end <= new.address, "segments overlap"
        self.segments.append(new)

    def _take(self, entry: Entry) -> None:
        self._add(Segment(entry.address, entry.nbytes, entry.stream, entry.small))

    def _map(self, entry: Entry) -> None:
        segment = self.home(entry.address)
        if segment is None:
            page = self.page(entry.small)
            nbytes = (2**46 + page - 1) // page * page
            segment = Segment(entry.address, nbytes, entry.stream, entry.small, page)
            self._add(segment)
        self._assert_mine(segment, entry)
        pages = segment.pages(entry.address, entry.address + entry.nbytes)
        assert len(pages) * segment.page == entry.nbytes, "pages are mapped whole"
        assert min(pages) == entry.address, "pages are aligned"
        assert not pages & segment.mapped, "a page is mapped once"
        segment.mapped |= pages

    def _give(self, entry: Entry) -> None:
        segment = self.home(entry.address)
        assert segment is not None
        assert not segment.page, "pages are unmapped, not freed"
        self._assert_mine(segment, entry)
        assert (segment.address, segment.nbytes) == (entry.address, entry.nbytes), (
            "given back whole"
        )
        self._assert_unused(entry)
        self.segments.remove(segment)

    def _unmap(self, entry: Entry) -> None:
        segment = self.home(entry.address)
        assert segment is not None
        self._assert_mine(segment, entry)
        self._assert_unused(entry)
        pages = segment.pages(entry.address, entry.address + entry.nbytes)
        assert len(pages) * segment.page == entry.nbytes, "pages are unmapped whole"
        assert pages <= segment.mapped, "only mapped pages are unmapped"
        segment.mapped -= pages
        if not segment.mapped:
            self.segments.remove(segment)

    def _place(self, entry: Entry) -> None:
        segment = self.home(entry.address)
        assert segment is not None, "a block lies in a segment"
        self._assert_mine(segment, entry)
        end = entry.address + entry.nbytes
        gaps = [g for g in self.gaps(segment) if g.address <= entry.address < g.address + g.nbytes]
        assert gaps, "a block lies in free memory"
        assert end <= gaps[0].address + gaps[0].nbytes, "blocks overlap"
        self.live[entry.address] = entry.nbytes

    def _free(self, entry: Entry) -> None:
        assert self.live.pop(entry.address, None) == entry.nbytes, "freed as it was placed"

    def _assert_mine(self, segment: Segment, entry: Entry) -> None:
        same = (segment.stream, segment.small) == (entry.stream, entry.small)
        assert same, "pools and streams share no segment"

    def _assert_unused(self, entry: Entry) -> None:
        end = entry.address + entry.nbytes
        used = [a for a, n in self.live.items() if a < end and entry.address < a + n]
        assert not used, "memory of a live block is given back"


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

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.memory = Memory(settings.large_segment_bytes)

    def on_free(self, address: int, entries: Sequence[Entry]) -> None:
        assert [e.action for e in entries] == ["free_completed"], "a free does nothing else"
        assert entries[0].address == address, "what is asked for is freed"
        self.memory.apply(entries[0])

    def on_empty_cache(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.action in ("segment_free", "segment_unmap"), "memory only goes back"
            self.memory.apply(entry)
        self.memory.assert_nothing_to_release()

    def on_allocate(self, nbytes: int, stream: int, entries: Sequence[Entry]) -> None:
        request = Request(stream, rounded(nbytes, self.settings))
        gap = self.best_gap(request)
        if gap is not None:
            assert [e.action for e in entries] == ["alloc"], "a cached block needs nothing else"
            assert entries[0].address == gap.address, "the best fit is used"
        elif self.settings.expandable_segments:
            gap = self.grow(request, entries)
        else:
            gap = self.extend(request, entries)
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

    def extend(self, request: Request, entries: Sequence[Entry]) -> Gap:
        """A new segment."""
        size = segment_size(request.need, self.settings)
        assert [e.action for e in entries] == ["segment_alloc", "alloc"], "a segment, and a block"
        new = entries[0]
        assert (new.nbytes, new.stream, new.small) == (size, request.stream, request.small)
        self.memory.apply(new)
        return Gap(new.address, size, size)

    def grow(self, request: Request, entries: Sequence[Entry]) -> Gap:
        """New pages at the lowest address that has room."""
        start = self.lowest_room(request)
        missing = self.missing_pages(request, start)
        maps = [e for e in entries if e.action == "segment_map"]
        for entry in maps:
            self.memory.apply(entry)
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


@dataclass(frozen=True)
class Request:
    """A request on a stream, rounded to ``need`` bytes."""

    stream: int
    need: int

    @property
    def small(self) -> bool:
        return self.need <= MIB
