"""One segment of CUDA memory, taken before a graph first runs, for all that it will allocate.

torch's allocator takes segments from the device as a step asks for memory, and later requests fit
these only in part. From one segment that is large enough for the whole step, it cuts what is asked
for, joins what is freed, and cuts again. How large that segment is best is found by a model of the
allocator (`fxremat.compiling.reserved_bytes`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from fxremat.sizes import format_bytes

log = logging.getLogger(__name__)


@dataclass
class Segment:
    """``nbytes`` on a device; more for the part of ``reserve_bytes`` that is not there yet."""

    device: torch.device
    nbytes: int
    reserve_bytes: int
    reserved_bytes: int | None = None
    """All that the allocator had from the device when it was taken last."""
    address: int | None = None
    """Where it lies; None where the device had no such piece."""

    @property
    def is_due(self) -> bool:
        """Whether there is one, and it is not taken yet, or was given back to the device.

        `torch.cuda.empty_cache()` gives it back between two steps, unless something lives in it.
        """
        if self.nbytes == 0:
            return False
        if self.reserved_bytes is None:
            return True
        reserved_bytes = _reserved_bytes(self.device)
        if reserved_bytes >= self.reserved_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        return not self._is_there()

    def _is_there(self) -> bool:
        """Whether the allocator has it; this asks for a list of all segments, and takes long."""
        snapshot: Any = torch.cuda.memory_snapshot
        return self.address is not None and any(
            0 <= self.address - one["address"] < one["total_size"] for one in snapshot()
        )

    def take(self, own_bytes: int) -> None:
        """Have the allocator take it; ``own_bytes`` of what is allocated are the graph's.

        Optimizer states that the first step makes would be cut from it, too: there is room for
        them. What the allocator keeps from before goes back to the device. Where the device has no
        such piece, the allocator takes its segments as it goes.
        """
        beside = torch.cuda.memory_allocated(self.device) - own_bytes
        wanted = self.nbytes + max(0, self.reserve_bytes - beside)
        torch.cuda.empty_cache()
        try:
            whole = torch.empty(wanted, dtype=torch.uint8, device=self.device)
            self.address = whole.data_ptr()
        except torch.OutOfMemoryError:
            self.address = None
            size = format_bytes(wanted)
            log.warning("the device has no %s in one piece: more may be left unused", size)
        self.reserved_bytes = _reserved_bytes(self.device)


def _reserved_bytes(device: torch.device) -> int:
    """Now; `torch.cuda.memory_reserved` takes ten times as long."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics["reserved_bytes"]["all"]["current"])
