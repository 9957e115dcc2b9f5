"""What a device can do at best: rates by dtype, bandwidths, launch time.

Figures for GPUs are the vendors' dense peak rates, of which kernels reach a part; those for a CPU
are what matmuls and copies reach on two cores of a server. They matter by their ratios, to each
other and to the microseconds of a launch. Plans must be equal on every rank and machine, so nothing
here is probed at run time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fxremat.core.constants import PEAK_REACHED


@dataclass(frozen=True)
class DeviceSpec:
    """Rates of one device: operations per second, bytes per second, microseconds.

    ``host_bytes_per_s`` is what a copy to or from pinned host memory reaches in each direction.
    ``link_bytes_per_s`` is what a rank sends to others, and starting that takes ``link_us``.
    ``reached`` is the part of its operations per second that kernels reach. With ``tf32`` there is
    a format for float32 in which it computes half as fast as in 16 bits; torch has convolutions
    computed so, not matmuls.
    """

    name: str
    flops_fp32: float
    flops_16bit: float
    bytes_per_s: float
    launch_us: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    link_us: float = 15.0
    reached: float = 1.0
    tf32: bool = False

    def flops(self, dtype: torch.dtype, *, is_convolution: bool = False) -> float:
        """Floating-point operations per second that kernels reach at ``dtype``."""
        peak = self.flops_16bit if dtype.itemsize <= 2 else self.flops_fp32
        if self.tf32 and is_convolution and dtype == torch.float32:
            peak = max(peak, self.flops_16bit / 2)
        return self.reached * peak


def _gpu(
    name: str,
    fp32: float,
    in_16bit: float,
    bytes_per_s: float,
    launch_us: float,
    host_bytes_per_s: float,
    link_bytes_per_s: float | None = None,
    *,
    tf32: bool = True,
) -> DeviceSpec:
    """Without NVLink, ranks are linked by the bus to the host."""
    return DeviceSpec(
        name,
        fp32,
        in_16bit,
        bytes_per_s,
        launch_us,
        host_bytes_per_s,
        host_bytes_per_s if link_bytes_per_s is None else link_bytes_per_s,
        reached=PEAK_REACHED,
        tf32=tf32,
    )


CPU = DeviceSpec("cpu", 120e9, 120e9, 30e9, 2.0, 4e9, 1e9, 500.0)
GPUS = (
    _gpu("B200", 75e12, 2250e12, 8.0e12, 4.0, 55e9, 900e9),
    _gpu("H200", 67e12, 990e12, 4.8e12, 4.0, 55e9, 450e9),
    _gpu("H100", 67e12, 990e12, 3.35e12, 4.0, 55e9, 450e9),
    _gpu("A100-40GB", 19.5e12, 312e12, 1.55e12, 4.0, 25e9, 300e9),
    _gpu("A100", 19.5e12, 312e12, 2.0e12, 4.0, 25e9, 300e9),
    _gpu("L40S", 91.6e12, 362e12, 0.864e12, 4.0, 25e9),
    _gpu("A10", 31e12, 125e12, 0.6e12, 4.0, 25e9),
    _gpu("L4", 30e12, 121e12, 0.3e12, 4.0, 25e9),
    _gpu("V100", 15.7e12, 125e12, 0.9e12, 4.0, 12e9, 150e9, tf32=False),
    _gpu("T4", 8.1e12, 65e12, 0.32e12, 4.0, 12e9, tf32=False),
    _gpu("A6000", 38.7e12, 155e12, 0.768e12, 4.0, 25e9),
    _gpu("5090", 105e12, 210e12, 1.79e12, 4.0, 55e9),
    _gpu("4090", 83e12, 165e12, 1.0e12, 4.0, 25e9),
    _gpu("3090", 36e12, 71e12, 0.94e12, 4.0, 25e9),
)
"""By name; what is more special comes first. Links are NVLink where the card has it: one direction,
as its data sheet says."""
OTHER_GPU = _gpu("gpu", 20e12, 160e12, 1.0e12, 4.0, 12e9)


def device_spec(device: torch.device) -> DeviceSpec:
    """The spec of ``device``, by its name; a middling GPU where the name is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return CPU if device.type == "cpu" else OTHER_GPU
    return spec_of_card(torch.cuda.get_device_name(device))


def spec_of_card(card: str) -> DeviceSpec:
    """The spec of a card by the whole name that CUDA gives it, as "NVIDIA H100 80GB HBM3".

    Each word of the spec's name is one of the card's: an L40S is no L4. Cards of laptops share the
    names of faster ones.
    """
    words = set(re.split(r"[\s-]+", card))
    known = (spec for spec in GPUS if words.issuperset(spec.name.split("-")))
    return OTHER_GPU if "Laptop" in words else next(known, OTHER_GPU)


def spec_named(name: str) -> DeviceSpec:
    """The spec of that name; raises `KeyError` with the names there are."""
    specs = {spec.name: spec for spec in (CPU, *GPUS)}
    if name not in specs:
        raise KeyError(f"unknown device {name!r}; there are {', '.join(specs)}")
    return specs[name]
