"""Expandable segments in the model of torch's CUDA caching allocator, with numbers by hand."""

from __future__ import annotations

from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.allocator.settings import parse_settings

MIB = 2**20


def allocator(more: str = "") -> CachingAllocator:
    """An allocator with expandable segments."""
    return CachingAllocator(parse_settings(f"expandable_segments:True{more}"))


def test_they_grow_by_pages() -> None:
    """1.5 MiB map 20; 30 more need 31.5 in all and map another 20, not 30 of their own."""
    growing = allocator()
    growing.allocate(1)
    assert growing.reserved_bytes == 2 * MIB
    first = growing.allocate(3 * MIB // 2)
    assert growing.reserved_bytes == 22 * MIB
    second = growing.allocate(30 * MIB)
    assert second - first == 3 * MIB // 2
    assert (growing.reserved_bytes, growing.segment_count) == (42 * MIB, 2)
    assert growing.allocated_bytes == 512 + 3 * MIB // 2 + 30 * MIB


def test_they_unmap_whole_pages() -> None:
    growing = allocator()
    growing.allocate(3 * MIB // 2)
    growing.free(growing.allocate(50 * MIB))
    assert growing.reserved_bytes == 60 * MIB
    growing.empty_cache()
    assert growing.reserved_bytes == 20 * MIB


def test_they_fill_holes_first() -> None:
    growing = allocator()
    blocks = [growing.allocate(20 * MIB) for _ in range(3)]
    growing.free(blocks[0])
    growing.empty_cache()
    assert growing.reserved_bytes == 40 * MIB
    assert growing.allocate(15 * MIB) == blocks[0]
    assert growing.reserved_bytes == 60 * MIB
    growing.free(blocks[1])
    assert [nbytes for _, nbytes, _, _ in growing.free_blocks()] == [25 * MIB]


def test_they_are_gone_when_nothing_is_mapped() -> None:
    growing = allocator()
    growing.free(growing.allocate(50 * MIB))
    assert (growing.reserved_bytes, growing.segment_count) == (60 * MIB, 1)
    growing.empty_cache()
    assert (growing.reserved_bytes, growing.segment_count) == (0, 0)
    growing.allocate(1)
    assert (growing.reserved_bytes, growing.segment_count) == (2 * MIB, 1)


def test_they_keep_what_lies_in_a_page_in_use() -> None:
    """The free block begins 512 bytes before a page; they stay when the page goes."""
    growing = allocator()
    first = growing.allocate(20 * MIB - 512)
    growing.free(growing.allocate(20 * MIB))
    assert [nbytes for _, nbytes, _, _ in growing.free_blocks()] == [20 * MIB + 512]
    growing.empty_cache()
    assert growing.free_blocks() == [(0, 512, first + 20 * MIB - 512, False)]
    assert growing.reserved_bytes == 20 * MIB


def test_they_split_large_blocks_to_512_bytes() -> None:
    growing = allocator()
    first = growing.allocate(3 * MIB)
    growing.allocate(2 * MIB)
    growing.free(first)
    growing.allocate(3 * MIB - 512)
    assert growing.allocated_bytes == 5 * MIB - 512
    assert growing.inactive_split_bytes == 0


def test_they_prefer_a_block_that_cannot_grow() -> None:
    """12 MiB are free at the end and could grow, 14 between two blocks could not."""
    growing = allocator()
    blocks = [growing.allocate(nbytes * MIB) for nbytes in (14, 14)]
    growing.free(blocks[0])
    assert growing.allocate(11 * MIB) == blocks[0]


def test_large_pages_have_the_size_of_large_segments() -> None:
    growing = allocator(",large_segment_size_mb:12")
    growing.allocate(13 * MIB)
    assert growing.reserved_bytes == 24 * MIB
