"""What the model of torch's caching allocator does when memory runs out, with numbers by hand."""

from __future__ import annotations

import pytest

from fxremat.memory.allocator import CachingAllocator, OutOfMemory, parse_settings

MIB = 2**20


def allocator(text: str = "", *, capacity: int) -> CachingAllocator:
    """An allocator with the settings of ``text`` on a device of ``capacity`` MiB."""
    return CachingAllocator(parse_settings(text), capacity * MIB)


def test_no_room_gives_all_free_segments_back() -> None:
    full = allocator(capacity=42)
    full.free(full.allocate(20 * MIB))
    full.free(full.allocate(1))
    full.allocate(40 * MIB)
    assert (full.reserved_bytes, full.retries, full.device_calls) == (40 * MIB, 1, 3)


def test_oversize_blocks_go_back_first() -> None:
    """60 and 34 MiB are enough for 70; the free segment of 20 MiB stays, and nothing is retried."""
    full = allocator("max_split_size_mb:32", capacity=130)
    blocks = [full.allocate(nbytes * MIB) for nbytes in (60, 34, 20)]
    for block in blocks:
        full.free(block)
    full.allocate(81 * MIB)
    assert (full.reserved_bytes, full.retries) == ((20 + 82) * MIB, 0)


def test_one_oversize_block_that_is_enough_goes_back() -> None:
    """Of free 60 and 90 MiB neither serves 38, since they would waste too much; the 60 go."""
    full = allocator("max_split_size_mb:32", capacity=160)
    blocks = [full.allocate(nbytes * MIB) for nbytes in (60, 90)]
    for block in blocks:
        full.free(block)
    full.allocate(38 * MIB)
    assert (full.reserved_bytes, full.retries) == ((90 + 38) * MIB, 0)


def test_no_more_oversize_blocks_go_back_than_are_needed() -> None:
    """60 and 50 MiB are enough for 90, so the 40 stay."""
    full = allocator("max_split_size_mb:32", capacity=160)
    blocks = [full.allocate(nbytes * MIB) for nbytes in (40, 60, 50)]
    for block in blocks:
        full.free(block)
    full.allocate(90 * MIB)
    assert (full.reserved_bytes, full.retries) == ((40 + 90) * MIB, 0)


def test_smaller_blocks_do_not_go_back_as_oversize_ones() -> None:
    """40 MiB are not enough for 58; the 20 are not oversize, and go when all blocks do."""
    full = allocator("max_split_size_mb:32", capacity=70)
    blocks = [full.allocate(nbytes * MIB) for nbytes in (20, 40)]
    for block in blocks:
        full.free(block)
    full.allocate(58 * MIB)
    assert (full.reserved_bytes, full.retries) == (58 * MIB, 1)


def test_a_fraction_of_the_device_may_be_used_whole() -> None:
    half = allocator("per_process_memory_fraction:0.5", capacity=40)
    half.allocate(20 * MIB)
    assert half.reserved_bytes == 20 * MIB
    with pytest.raises(OutOfMemory, match=r"of its 20.00 MiB are 20.00 MiB reserved"):
        half.allocate(1)


def test_out_of_memory_has_the_figures() -> None:
    full = allocator(capacity=40)
    full.allocate(3 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        full.allocate(21 * MIB)
    error = caught.value
    assert (error.asked_bytes, error.acquired_bytes) == (21 * MIB, 22 * MIB)
    assert (error.reserved_bytes, error.allocated_bytes) == (20 * MIB, 3 * MIB)
    assert (error.largest_free_bytes, error.fragmentation_bytes) == (17 * MIB, 17 * MIB)
    assert "smaller memory_budget" in str(error)
    assert "expandable_segments" not in str(error)
    full.allocate(20 * MIB)
    assert full.reserved_bytes == 40 * MIB


def test_out_of_memory_by_fragmentation_names_the_setting() -> None:
    """Two segments with 12 MiB free in each have no room for 13."""
    full = allocator(capacity=40)
    blocks = [full.allocate(nbytes * MIB) for nbytes in (8, 9, 8, 9)]
    full.free(blocks[1])
    full.free(blocks[3])
    assert [nbytes for _, nbytes, _, _ in full.free_blocks()] == [12 * MIB, 12 * MIB]
    with pytest.raises(OutOfMemory, match="expandable_segments:True"):
        full.allocate(13 * MIB)
    pages = allocator("expandable_segments:True", capacity=40)
    blocks = [pages.allocate(nbytes * MIB) for nbytes in (8, 9, 8, 9)]
    pages.free(blocks[2])
    pages.free(blocks[3])
    pages.allocate(13 * MIB)


@pytest.mark.parametrize(
    ("fraction", "threshold", "reserved"),
    [(0.5, 0.7, 96), (0.5, 0.6, 72), (0.5, 0.94, 72), (1.0, 0.6, 126)],
)
def test_garbage_is_collected_by_age(fraction: float, threshold: float, reserved: int) -> None:
    """Of 94 MiB, 30 were freed two searches ago and 24 one search ago.

    Above 70 MiB the 30 are enough. Above 60 MiB both go. Up to 94 MiB none is garbage; then 32 more
    pass the limit of 100, and both go to make room. Without a limit nothing goes back.
    """
    text = f"garbage_collection_threshold:{threshold},per_process_memory_fraction:{fraction}"
    cached = allocator(text, capacity=200)
    old, young = cached.allocate(30 * MIB), cached.allocate(24 * MIB)
    cached.free(old)
    cached.allocate(40 * MIB)
    cached.free(young)
    cached.allocate(32 * MIB)
    assert cached.reserved_bytes == reserved * MIB
    assert cached.retries == (threshold == 0.94)
