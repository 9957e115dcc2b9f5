"""The settings of PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF) that change bytes on the device.

With them it says how requests and segments are rounded (c10/cuda/CUDACachingAllocator.cpp,
`round_size`, `get_allocation_size`, `should_split`). They are read from the text that torch reads:
``key:value`` pairs between commas, lists in brackets. Names, defaults and grammar: torch,
c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp}. Limits between two keys
are checked when all have been read, so that their order does not matter; torch checks in order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxremat.errors import InvalidOption, UnknownOption
from fxremat.sizes import MIB, format_bytes

_VARIABLE = "PYTORCH_ALLOC_CONF"
INTERVALS = 16
"""In torch, sizes from 1 MiB to 64 GiB have this many powers of two, each with its own rounding."""


@dataclass(frozen=True)
class AllocatorSettings:
    """How torch's caching allocator is set, with sizes in bytes; the defaults are torch's.

    ``max_split`` None: blocks of every size are split. ``divisions`` has one number for each
    power of two from 1 MiB on; 0 and 1 round to 512 bytes alone. Raises `InvalidOption` (a
    `ValueError`) for values that torch does not take.
    """

    max_split: int | None = None
    max_non_split_rounding: int = 20 * MIB
    large_segment: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        large = format_bytes(self.large_segment)
        least = f"at least one large segment ({large}); raise it, or lower large_segment_size_mb"
        if self.large_segment <= 10 * MIB:
            raise _invalid("large_segment_size_mb", self.large_segment // MIB, "more than 10")
        if self.max_split is not None and self.max_split < self.large_segment:
            raise _invalid("max_split_size_mb", self.max_split // MIB, least)
        rounding, divisions = self.max_non_split_rounding, self.divisions
        if rounding < self.large_segment:
            raise _invalid("max_non_split_rounding_mb", rounding // MIB, least)
        if len(divisions) != INTERVALS or not all(n >= 0 and n & (n - 1) == 0 for n in divisions):
            raise _invalid("roundup_power2_divisions", divisions, f"{INTERVALS} powers of 2 or 0")

    def divisions_for(self, nbytes: int) -> int:
        """Into how many parts the power of two below ``nbytes`` is cut; 0 and 1: no such grid."""
        interval = nbytes.bit_length() - MIB.bit_length()
        return self.divisions[min(max(interval, 0), INTERVALS - 1)]

    def is_oversize(self, nbytes: int) -> bool:
        """Whether a block of ``nbytes`` is never split."""
        return self.max_split is not None and nbytes >= self.max_split


def _invalid(key: str, value: object, expected: str) -> InvalidOption:
    return InvalidOption(key, value, expected, variable=_VARIABLE)


_ITEM = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")

WITHOUT_EFFECT = (
    "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "per_process_memory_fraction", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
)  # fmt: skip
"""Keys about the host's memory, locks, graph capture, or what happens when the device is full."""


def _integer(key: str, text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise _invalid(key, text, "a whole number")
    return int(text)


def _mebibytes(key: str, text: str) -> int:
    return _integer(key, text) * MIB


def _truth(key: str, text: str) -> bool:
    if text not in ("True", "False"):
        raise _invalid(key, text, "True or False")
    return text == "True"


def _power_of_two(key: str, text: str) -> int:
    number = _integer(key, text)
    if number == 0 or number & (number - 1):
        raise _invalid(key, text, "a power of 2")
    return number


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """One number for all sizes, or pairs of a size in MB and the number from that size on.

    The first pair is also for all smaller sizes, ``>`` for all sizes past the last pair. A size
    between two pairs that has none itself is not rounded.
    """
    if not text.startswith("["):
        return (_power_of_two(key, text),) * INTERVALS
    divisions = [0] * INTERVALS
    last: int | None = None
    for row in text[1:-1].split(","):
        megabytes, colon, number = row.partition(":")
        if not colon:
            raise _invalid(key, text, "pairs such as [64:8,256:4,>:1]")
        count = 0 if number == "0" else _power_of_two(key, number)
        if megabytes == ">":
            first = 1 if last is None else last + 1
            divisions[first:] = [count] * (INTERVALS - first)
        else:
            interval = min(_power_of_two(key, megabytes).bit_length(), INTERVALS) - 1
            lowest = 0 if last is None else interval
            divisions[lowest : interval + 1] = [count] * (interval + 1 - lowest)
            last = interval
    return tuple(divisions)


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "large_segment_size_mb": ("large_segment", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "max_split_size_mb": ("max_split", _mebibytes),
    "roundup_power2_divisions": ("divisions", _divisions),
}
KEYS = tuple(sorted({*_FIELDS, *WITHOUT_EFFECT, "backend", "throw_on_cudamalloc_oom"}))


def _items(text: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"\s", "", text)
    position = 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            expected = "key:value pairs between commas, such as max_split_size_mb:64"
            raise InvalidOption(_VARIABLE, text[position:], expected)
        yield match[1], match[2]
        position = match.end()


def settings_of_environment() -> AllocatorSettings:
    """Those that torch's allocator runs with in this process; it reads the newer name first.

    Raises as `parse_settings` does.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return parse_settings(next((os.environ[name] for name in names if name in os.environ), ""))


def parse_settings(text: str) -> AllocatorSettings:
    """The settings that ``text``, a value of PYTORCH_ALLOC_CONF, stands for.

    Raises `InvalidOption` or `UnknownOption`, both `ValueError`, which say what was expected. A key
    that is given twice has the later value, as in torch.
    """
    values: dict[str, Any] = {}
    for key, value in _items(text):
        if key in _FIELDS:
            field, read = _FIELDS[key]
            values[field] = read(key, value)
        elif key not in KEYS:
            raise UnknownOption(key, value, KEYS)
        elif key == "backend" and value != "native":
            expected = "'native': the model is of that allocator alone; remove the key"
            raise _invalid(key, value, expected)
        elif key == "throw_on_cudamalloc_oom" and _truth(key, value):
            expected = "False: failing before cached blocks are freed is not modelled"
            raise _invalid(key, value, expected)
    return AllocatorSettings(**values)


MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this; no block is smaller."""
LARGEST_SMALL_BYTES = MIB
"""A request is small, after rounding, up to this size."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""What one cudaMalloc of the small pool takes, and a page of its expandable segments."""
LARGE_REQUEST_BYTES = 10 * MIB
"""From here on, a request of the large pool has a segment of its own size."""
SEGMENT_STEP_BYTES = 2 * MIB
"""Segments of such requests are multiples of this."""


def round_up(nbytes: int, multiple: int) -> int:
    """The least of the multiples that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


def in_blocks(nbytes: int, device: torch.device) -> int:
    """What torch's allocator takes for so many: on CUDA whole blocks."""
    return round_up(nbytes, MIN_BLOCK_BYTES) if device.type == "cuda" else nbytes


def round_request(nbytes: int, settings: AllocatorSettings) -> int:
    """Bytes of the block that a request of ``nbytes`` (at least one) asks for."""
    if nbytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.divisions_for(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
        power = 1 << (nbytes.bit_length() - 1)
        return round_up(nbytes, power // divisions)
    return round_up(nbytes, MIN_BLOCK_BYTES)


def segment_bytes_for(block: int, settings: AllocatorSettings) -> int:
    """Bytes that cudaMalloc is asked for when no cached block serves ``block`` bytes."""
    if block <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block < LARGE_REQUEST_BYTES:
        return settings.large_segment
    return round_up(block, SEGMENT_STEP_BYTES)


def is_worth_splitting(free: int, block: int, small: bool, settings: AllocatorSettings) -> bool:
    """Whether the rest of a free block of ``free`` bytes becomes a free block of its own."""
    rest = free - block
    if small or settings.expandable_segments:
        return rest >= MIN_BLOCK_BYTES
    if settings.is_oversize(block):
        return False
    return rest > LARGEST_SMALL_BYTES
