"""Whether there is memory to run a call, before it is run to be measured.

On CUDA a call that has no room raises an error. Linux kills a process for memory that it has
promised and does not have, so on a CPU what a call holds is estimated first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.compat.sizes import size_bound
from fxremat.sizes import KIB

OPERANDS_IN_A_RUN = 4
"""A run holds its operands, results, and workspace: taken to be this many times the operands."""


def has_room(device: torch.device, arguments: Any, batch: tuple[int, int] | None = None) -> bool:
    """Whether a call with these (fake) arguments fits into the memory of this machine.

    With a ``batch``, for the part of it that its second number says.
    """
    return device.type != "cpu" or _run_bytes(arguments, batch) <= _available_bytes()


def _run_bytes(arguments: Any, batch: tuple[int, int] | None) -> int:
    """About what a run on the CPU holds."""
    size = size_bound
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor)]
    operands = sum(size(tensor.numel()) * tensor.element_size() for tensor in tensors)
    whole, part = (1, 1) if batch is None else batch
    return OPERANDS_IN_A_RUN * operands * part // whole


def _available_bytes() -> int:
    """What this machine can still give to a process without writing anything out."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
