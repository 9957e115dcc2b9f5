"""What a device can do at best: rates by dtype, bandwidths, launch time.

Figures for GPUs are the vendors' dense peak rates, of which kernels reach a part; those for a CPU
are what matmuls and copies reach on two cores of a server. They matter by their ratios, to each
other and to the microseconds of a launch. Plans must be equal on every rank and machine, so nothing
here is probed at run time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from fxremat.compat.absent.pretending import Properties
from fxremat.core.constants import PEAK_REACHED
from fxremat.errors import UnknownDevice, nearest
from fxremat.sizes import MIB


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


CPU = DeviceSpec("cpu", 120e9, 120e9, 30e9, 2.0, 4e9, 1e9, 500.0)
OTHER_GPU = DeviceSpec(
    "gpu", 20e12, 160e12, 1.0e12, 4.0, 12e9, 12e9, reached=PEAK_REACHED, tf32=True
)


CONTEXT_BYTES = 600 * MIB
"""What a CUDA context and the kernels of torch's libraries are taken to hold of a card that is not
here; torch counts it nowhere."""
BLOCK_SHARED_BYTES = 49152
"""Of shared memory, what a CUDA block has without asking for more, on all of them."""


LIMITS: Mapping[tuple[int, int], tuple[int, int, int]] = {
    (7, 0): (2048, 98304, 98304),
    (7, 5): (1024, 65536, 65536),
    (8, 0): (2048, 167936, 166912),
    (8, 6): (1536, 102400, 101376),
    (8, 9): (1536, 102400, 101376),
    (9, 0): (2048, 233472, 232448),
    (10, 0): (2048, 233472, 232448),
    (12, 0): (1536, 102400, 101376),
}
"""By compute capability, what a multiprocessor has: threads, bytes of shared memory, and how many
of these one block may ask for."""


@dataclass(frozen=True)
class Card:
    """One GPU. ``full_name`` is what CUDA calls it, ``spec`` are the rates that its vendor says.

    Multiprocessors, capabilities, cache and memory are as the vendor's data sheets and
    ``deviceQuery`` give them; limits of a multiprocessor are those of its compute capability (CUDA
    programming guide, "Technical specifications per compute capability"). The memory is the least
    that drivers of the last years leave to a process, as torch's out-of-memory errors name it ("has
    a total capacity of").
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    l2_cache: int
    spec: DeviceSpec

    @property
    def usable(self) -> int:
        """What torch may reserve: all but the CUDA context."""
        return self.total_bytes - CONTEXT_BYTES

    def properties(self) -> Properties:
        """What torch would say of it."""
        threads, shared, block_shared = LIMITS[self.capability]
        return Properties(
            name=self.full_name,
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.total_bytes,
            multi_processor_count=self.multiprocessors,
            max_threads_per_multi_processor=threads,
            max_threads_per_block=1024,  # on all of them
            regs_per_multiprocessor=65536,  # too
            shared_memory_per_block=BLOCK_SHARED_BYTES,
            shared_memory_per_block_optin=block_shared,
            shared_memory_per_multiprocessor=shared,
            L2_cache_size=self.l2_cache,
        )


def _card(
    name: str, full_name: str, capability: tuple[int, int], multiprocessors: int, gib: float,
    l2_mib: int, fp32: float, in_16bit: float, memory: float, host: int, link: int = 0,
) -> Card:  # fmt: skip
    """Rates are in 10^12 operations and bytes per second, but in 10^9 bytes to the host and others.

    Without NVLink, ranks are linked by the bus to the host.
    """
    fp32, in_16bit, memory = (float(round(1e12 * rate)) for rate in (fp32, in_16bit, memory))
    spec = DeviceSpec(
        name, fp32, in_16bit, memory, OTHER_GPU.launch_us, 1e9 * host, 1e9 * (link or host),
        reached=PEAK_REACHED, tf32=capability >= (8, 0),
    )  # fmt: skip
    total = int(gib * 1024) * MIB
    return Card(name, full_name, capability, multiprocessors, total, l2_mib * MIB, spec)


CARDS = (
    _card("B200", "NVIDIA B200", (10, 0), 148, 178.35, 126, 75, 2250, 8.0, 55, 900),
    _card("H200", "NVIDIA H200", (9, 0), 132, 139.80, 60, 67, 990, 4.8, 55, 450),
    _card("H100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 79.10, 50, 67, 990, 3.35, 55, 450),
    _card("A100-40GB", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.39, 40, 19.5, 312, 1.55, 25, 300),
    _card("A100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.15, 40, 19.5, 312, 2.0, 25, 300),
    _card("L40S", "NVIDIA L40S", (8, 9), 142, 44.39, 96, 91.6, 362, 0.864, 25),
    _card("A10", "NVIDIA A10", (8, 6), 72, 21.98, 6, 31, 125, 0.6, 25),
    _card("L4", "NVIDIA L4", (8, 9), 58, 21.95, 48, 30, 121, 0.3, 25),
    _card("V100", "Tesla V100-SXM2-32GB", (7, 0), 80, 31.73, 6, 15.7, 125, 0.9, 12, 150),
    _card("T4", "Tesla T4", (7, 5), 40, 14.56, 4, 8.1, 65, 0.32, 12),
    _card("A6000", "NVIDIA RTX A6000", (8, 6), 84, 47.53, 6, 38.7, 155, 0.768, 25),
    _card("5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 31.36, 96, 105, 210, 1.79, 55),
    _card("4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 23.49, 72, 83, 165, 1.0, 25),
    _card("3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 23.67, 6, 36, 71, 0.94, 25),
)
"""What is more special comes first. Links are NVLink where the card has it: one direction, as its
data sheet says."""
GPUS = tuple(card.spec for card in CARDS)


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


def card_named(name: str) -> Card:
    """The card of that name, as "H100", "a100-80gb" or "RTX 4090".

    Raises `UnknownDevice`, with the names there are.
    """
    known = {_plain(card.name): card for card in CARDS}
    known |= {_plain(card.full_name): card for card in CARDS}
    known |= {"a10080gb": known["a100"], "h10080gb": known["h100"], "v10032gb": known["v100"]}
    asked = _plain(name)
    if asked not in known:
        close = nearest(asked, known)
        near = known[close].name if close else None
        raise UnknownDevice(name, tuple(card.name for card in CARDS), near)
    return known[asked]


def _plain(name: str) -> str:
    """A name without the words in which names of one card differ."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(w for w in words if w not in {"nvidia", "geforce", "rtx", "tesla", "sxm4"})


PLANNED_FOR: ContextVar[Card | None] = ContextVar("fxremat_card", default=None)
"""Set by `fxremat.device.absent`."""


def absent_card() -> Card | None:
    """The card that is planned for although it is not here; None: what is here."""
    return PLANNED_FOR.get()
