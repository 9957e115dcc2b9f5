"""Copies between a device and host memory that run beside the computation.

Graphs that fxremat transforms call four operators, `to_host`, `wait_host`, `to_device` and
`wait_device` (`fxremat.runtime.copies`); importing this package registers them, so whatever runs
such a graph has to import it. The rest is for tests and benchmarks: a cap on host memory, a
simulated speed for copies of machines without a GPU, and records of what was copied when.
"""

from fxremat.runtime.copies import to_device, to_host, wait_device, wait_host
from fxremat.runtime.copy_speed import MeasuredSpeed, measure_copy_speed
from fxremat.runtime.cpu_engine import set_copy_speed
from fxremat.runtime.host_memory import (
    HostBytes,
    host_bytes,
    reset_host_peak,
    set_host_memory_cap,
)
from fxremat.runtime.trace import CopyRecord, copy_trace

__all__ = [
    "CopyRecord",
    "HostBytes",
    "MeasuredSpeed",
    "copy_trace",
    "host_bytes",
    "measure_copy_speed",
    "reset_host_peak",
    "set_copy_speed",
    "set_host_memory_cap",
    "to_device",
    "to_host",
    "wait_device",
    "wait_host",
]
