"""How fast copies are, both directions busy at once: what a plan has to reckon with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fxremat.runtime.copies.operators import to_device, to_host, wait_device, wait_host
from fxremat.runtime.copy_engine import Direction
from fxremat.runtime.copy_trace import CopyRecord, copy_trace

_SMALLEST, _LARGEST = 2**16, 2**24
_ENOUGH_S = 0.02
_COPIES = 3


class MeasuredSpeed(NamedTuple):
    """Bytes per second of each direction while the other is busy too."""

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float


def measure_copy_speed(device: torch.device | str) -> MeasuredSpeed:
    """Copy ever larger tensors, to 16 MiB each, until that takes long enough to be measured.

    It holds at most 64 MiB of host memory, which count for the cap, and as much on the device.
    On the CPU it measures what `set_copy_speed` says, less what really copying costs.
    """
    nbytes = _SMALLEST
    while True:
        _copy_both_ways(torch.device(device), nbytes)  # fills the pool of host memory
        records = _copy_both_ways(torch.device(device), nbytes)
        seconds = max(record.end_s - record.start_s for record in records)
        if seconds >= _ENOUGH_S or nbytes >= _LARGEST:
            return MeasuredSpeed(_speed(records, "to_host"), _speed(records, "to_device"))
        nbytes *= 4


def _copy_both_ways(device: torch.device, nbytes: int) -> list[CopyRecord]:
    """Records of some copies in both directions at once."""
    x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    host = to_host(x)
    wait_host(host, x)
    with copy_trace() as records:
        pairs = [(to_host(x), to_device(host, device)) for _ in range(_COPIES)]
        for copied, fetched in pairs:
            wait_host(copied, x)
            wait_device(fetched, host)
    return records


def _speed(records: Iterable[CopyRecord], direction: Direction) -> float:
    """Bytes of all copies of a direction over the time they took."""
    ours = [record for record in records if record.what == direction]
    return sum(r.nbytes for r in ours) / sum(r.end_s - r.start_s for r in ours)
