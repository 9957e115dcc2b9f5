"""What a result was measured on: machine and versions."""

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
WORKER_BYTES = 1.5 * GIB
LIVE_ON_GPU = 3
MOST_LIVE = 20


def cpu_name() -> str:
    """The processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _fxremat_version() -> str:
    try:
        return importlib.metadata.version("fxremat")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def describe_machine(device: str, threads: int) -> dict[str, Any]:
    """For the head of a JSON result."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fxremat": _fxremat_version(),
    }


def live_workers(device: str) -> int:
    """How many workers fit into memory at once, roughly."""
    if device == "cuda":
        return LIVE_ON_GPU
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(2, min(MOST_LIVE, int(free / WORKER_BYTES)))
