"""Copies between a device and host memory that run beside the computation.

Graphs that fxremat transforms call four operators, `to_host`, `wait_host`, `to_device` and
`wait_device`; importing this package registers them, so whatever runs such a graph has to import
it. Weights that live in host memory are read through `fetch`, which gets their gradients by `put`
(all in `copies`); `arrived` lets their optimizer step before the backward is over
(`optimizer_steps`). Gradients on the device are added to ``grad`` by `accumulated`
(`accumulation`). `copy_trace` records what was copied when.
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
from fxremat.runtime.host_memory import (
    is_host,
)
from fxremat.runtime.optimizer_steps import Stepped, arrived

__all__ = [
    "CopyRecord",
    "MeasuredSpeed",
    "Stepped",
    "accumulated",
    "arrived",
    "copy_trace",
    "fetch",
    "host_copy",
    "is_host",
    "measure_copy_speed",
    "put",
    "settle",
    "to_device",
    "to_host",
    "wait_device",
    "wait_host",
]
