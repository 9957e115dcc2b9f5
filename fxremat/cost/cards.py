"""Cards: what CUDA says of a GPU, so that code for it can be written where it is not.

Multiprocessors, capabilities, cache and memory are as the vendor's data sheets and ``deviceQuery``
give them; limits of a multiprocessor are those of its compute capability (CUDA programming guide,
"Technical specifications per compute capability"). The memory is the least that drivers of the
last years leave to a process, as torch's out-of-memory errors name it ("has a total capacity of").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from fxremat.compat.absent.pretending import Properties
from fxremat.cost.device import DeviceSpec, spec_named
from fxremat.errors import UnknownDevice, nearest
from fxremat.sizes import MIB

CONTEXT_BYTES = 600 * MIB
"""What a CUDA context and the kernels of torch's libraries are taken to hold of a card that is not
here; torch counts it nowhere."""
BLOCK_SHARED_BYTES = 49152
"""Of shared memory, what a CUDA block has without asking for more, on all of them."""


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor of a compute capability has; shared memory in bytes.

    ``block_shared`` is the most that one block may ask for.
    """

    threads: int
    shared: int
    block_shared: int
    registers: int = 65536
    block_threads: int = 1024


LIMITS: Mapping[tuple[int, int], Limits] = {
    (7, 0): Limits(2048, 98304, 98304),
    (7, 5): Limits(1024, 65536, 65536),
    (8, 0): Limits(2048, 167936, 166912),
    (8, 6): Limits(1536, 102400, 101376),
    (8, 9): Limits(1536, 102400, 101376),
    (9, 0): Limits(2048, 233472, 232448),
    (10, 0): Limits(2048, 233472, 232448),
    (12, 0): Limits(1536, 102400, 101376),
}
"""What a multiprocessor has, by compute capability."""


@dataclass(frozen=True)
class Card:
    """One GPU. ``full_name`` is what CUDA calls it, ``spec`` what it can do at best."""

    name: str
    full_name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    l2_cache: int

    @property
    def limits(self) -> Limits:
        """What each of its multiprocessors has."""
        return LIMITS[self.capability]

    @property
    def spec(self) -> DeviceSpec:
        """The rates of the card, as its vendor publishes them."""
        return spec_named(self.name)

    @property
    def usable(self) -> int:
        """What torch may reserve: all but the CUDA context."""
        return self.total_bytes - CONTEXT_BYTES

    def properties(self) -> Properties:
        """What torch would say of it."""
        limits = self.limits
        return Properties(
            name=self.full_name,
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.total_bytes,
            multi_processor_count=self.multiprocessors,
            max_threads_per_multi_processor=limits.threads,
            max_threads_per_block=limits.block_threads,
            regs_per_multiprocessor=limits.registers,
            shared_memory_per_block=BLOCK_SHARED_BYTES,
            shared_memory_per_block_optin=limits.block_shared,
            shared_memory_per_multiprocessor=limits.shared,
            L2_cache_size=self.l2_cache,
        )


def _gib(value: float) -> int:
    """GiB in bytes, rounded down to whole MiB."""
    return int(value * 1024) * MIB


CARDS = (
    Card("B200", "NVIDIA B200", (10, 0), 148, _gib(178.35), 126 * MIB),
    Card("H200", "NVIDIA H200", (9, 0), 132, _gib(139.80), 60 * MIB),
    Card("H100", "NVIDIA H100 80GB HBM3", (9, 0), 132, _gib(79.10), 50 * MIB),
    Card("A100-40GB", "NVIDIA A100-SXM4-40GB", (8, 0), 108, _gib(39.39), 40 * MIB),
    Card("A100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, _gib(79.15), 40 * MIB),
    Card("L40S", "NVIDIA L40S", (8, 9), 142, _gib(44.39), 96 * MIB),
    Card("A10", "NVIDIA A10", (8, 6), 72, _gib(21.98), 6 * MIB),
    Card("L4", "NVIDIA L4", (8, 9), 58, _gib(21.95), 48 * MIB),
    Card("V100", "Tesla V100-SXM2-32GB", (7, 0), 80, _gib(31.73), 6 * MIB),
    Card("T4", "Tesla T4", (7, 5), 40, _gib(14.56), 4 * MIB),
    Card("A6000", "NVIDIA RTX A6000", (8, 6), 84, _gib(47.53), 6 * MIB),
    Card("5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, _gib(31.36), 96 * MIB),
    Card("4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, _gib(23.49), 72 * MIB),
    Card("3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, _gib(23.67), 6 * MIB),
)


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
