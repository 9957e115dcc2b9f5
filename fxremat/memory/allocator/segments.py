"""Segments from cudaMalloc: taking them, and giving back those that hold no block in use.

Source: torch, c10/cuda/CUDACachingAllocator.cpp (`release_block`, `release_blocks`,
`release_available_cached_blocks`, `garbage_collect_cached_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.memory.allocator.blocks import Block, Pool
from fxremat.memory.allocator.device import Device


@dataclass(eq=False)
class Segments:
    """All segments from cudaMalloc of an allocator; ``count`` of them exist."""

    device: Device
    count: int = 0

    def allocate(self, pool: Pool, stream: int, nbytes: int) -> Block | None:
        """A segment as one free block, in no pool; None where the device has no room."""
        if not self.device.take(nbytes):
            return None
        self.count += 1
        block = Block(self.device.addresses(nbytes), nbytes, stream)
        self.device.record("segment_alloc", block.address, nbytes, stream, pool.small)
        return block

    def release(self, pool: Pool) -> None:
        """Gives back every segment that is one free block."""
        for block in _whole_segments(pool):
            self._release(pool, block)

    def release_oversize(
        self, pool: Pool, stream: int, block_bytes: int, oversize_bytes: int
    ) -> bool:
        """Gives back oversize blocks of a stream to make room for one more; whether it did.

        That is the smallest block that is large enough, or several from the largest down. The
        several have gone back even if they were not enough.
        """
        wanted = max(block_bytes, oversize_bytes)
        for block in pool.at_least(stream, wanted):
            self._release(pool, block)
            return True
        released = 0
        for block in pool.less_than(stream, wanted):
            if released >= wanted or block.nbytes < oversize_bytes:
                break
            released += block.nbytes
            self._release(pool, block)
        return released >= wanted

    def collect_garbage(self, pool: Pool, target_bytes: int) -> None:
        """Gives back segments that were not used for long, until ``target_bytes`` are reclaimed.

        The age of a free block is the number of searches of its pool since it was freed. All blocks
        that are at least as old as the average go back, then the average of the rest counts.
        """
        aged = [(pool.searches - block.freed_at, block) for block in _whole_segments(pool)]
        reclaimed = 0
        while aged and reclaimed < target_bytes:
            average = sum(age for age, _ in aged) / len(aged)
            for age, block in aged:
                if age >= average:
                    reclaimed += block.nbytes
                    self._release(pool, block)
            aged = [(age, block) for age, block in aged if age < average]

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        self.count -= 1
        self.device.give_back(block.nbytes)
        self.device.record("segment_free", block.address, block.nbytes, block.stream, pool.small)


def _whole_segments(pool: Pool) -> list[Block]:
    """Free blocks that are all of their segment."""
    return [b for b in pool.free_blocks() if b.space is None and not b.is_split]
