"""Device memory as an allocator's log describes it: segments, live blocks, and what is between.

Shares no code with the model that writes the log. What is free is derived each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxremat.memory.allocator import Entry

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

    capacity: int | None
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
        assert self.capacity is None or self.reserved <= self.capacity, "more than there is"

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
            wanted = 2**46 if self.capacity is None else self.capacity + self.capacity // 8
            nbytes = (wanted + page - 1) // page * page
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
