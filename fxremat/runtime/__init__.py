"""Copies between a device and host memory that run beside the computation.

Graphs that fxremat transforms call four operators, `to_host`, `wait_host`, `to_device` and
`wait_device`; importing this package registers them, so whatever runs such a graph has to import
it. Weights that live in host memory are read through `fetch`, which gets their gradients by `put`
(all in `copies`); `arrived` lets their optimizer step before the backward is over
(`optimizer_steps`). Gradients on the device are added to ``grad`` by `accumulated`
(`accumulation`).
"""

from fxremat.runtime.accumulation import accumulated
from fxremat.runtime.copies import fetch, put, settle, to_device, to_host, wait_device, wait_host
from fxremat.runtime.optimizer_steps import arrived

__all__ = [
    "accumulated",
    "arrived",
    "fetch",
    "put",
    "settle",
    "to_device",
    "to_host",
    "wait_device",
    "wait_host",
]
