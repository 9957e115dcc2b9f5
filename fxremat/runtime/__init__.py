"""Copies between a device and host memory that run beside the computation.

Graphs that fxremat transforms call four operators, `to_host`, `wait_host`, `to_device` and
`wait_device`; importing this package registers them, so whatever runs such a graph has to import
it. Weights that live in host memory are read through `fetch`, which gets their gradients by `put`
(all in `copies`); `arrived` lets their optimizer step before the backward is over
(`optimizer_steps`). Gradients on the device are added to ``grad`` by `accumulated`
(`accumulation`). The rest is for tests and benchmarks: a cap on host memory, a simulated speed for
copies of machines without a GPU, and records of what was copied when.
"""

from fxremat.runtime.accumulation import accumulated
from fxremat.runtime.copies import (
    MeasuredSpeed,
    fetch,
    host_copy,
    measure_copy_speed,
    put,
    settle,
    to_device,
    to_host,
    wait_device,
    wait_host,
)
from fxremat.runtime.copy_trace import CopyRecord, copy_trace
from fxremat.runtime.cpu_engine import set_copy_speed
from fxremat.runtime.host_memory import (
    HostBytes,
    host_bytes,
    is_host,
    reset_host_peak,
    set_host_memory_cap,
)
from fxremat.runtime.optimizer_steps import Stepped, arrived

__all__ = [
    "CopyRecord",
    "HostBytes",
    "MeasuredSpeed",
    "Stepped",
    "accumulated",
    "arrived",
    "copy_trace",
    "fetch",
    "host_bytes",
    "host_copy",
    "is_host",
    "measure_copy_speed",
    "put",
    "reset_host_peak",
    "set_copy_speed",
    "set_host_memory_cap",
    "settle",
    "to_device",
    "to_host",
    "wait_device",
    "wait_host",
]
