"""One process at a time on a GPU that several share, while kernels are timed there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Wait until no other process of this machine times anything on ``device``.

    On CUDA alone, where another process's kernels run between ours and count as ours; on a CPU, a
    run that lost a core is noticed. Nothing is waited for where no lock file can be opened.
    """
    handle = _opened(device) if device.type == "cuda" and fcntl is not None else None
    try:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _opened(device: torch.device) -> int | None:
    """A file of the machine's, named by the GPU itself: processes may number them differently."""
    path = Path(tempfile.gettempdir()) / f"fxremat-timing-{_name(device)}.lock"
    with suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    return None


def _name(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
