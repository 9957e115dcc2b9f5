"""Reading `AllocatorSettings` from the text of PYTORCH_ALLOC_CONF.

Grammar and meaning of the keys: torch, c10/core/AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.cpp. Limits between two keys are checked when all have been read, so
that their order does not matter; torch checks them in order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from fxremat.errors import InvalidOption, UnknownOption
from fxremat.memory.allocator.settings import INTERVALS, AllocatorSettings
from fxremat.sizes import MIB

_VARIABLE = "PYTORCH_ALLOC_CONF"
_ITEM = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")

WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
"""Keys that are about the host's memory, locks or graph capture; their values are not read."""


def _invalid(key: str, value: str, expected: str) -> InvalidOption:
    return InvalidOption(key, value, expected, variable=_VARIABLE)


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


def _ratio(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _invalid(key, text, "a number between 0 and 1") from None
    if not 0.0 < number <= 1.0:
        raise _invalid(key, text, "a number between 0 and 1")
    return number


def _power_of_two(key: str, text: str) -> int:
    number = _integer(key, text)
    if number == 0 or number & (number - 1):
        raise _invalid(key, text, "a power of 2")
    return number


def _division_rows(key: str, text: str) -> Iterator[tuple[int | None, int]]:
    """The pairs of ``[64:8,256:4,>:1]``: interval (None for ``>``) and divisions."""
    for row in text[1:-1].split(","):
        megabytes, colon, count = row.partition(":")
        if not colon:
            raise _invalid(key, text, "pairs such as [64:8,256:4,>:1]")
        divisions = 0 if count == "0" else _power_of_two(key, count)
        if megabytes == ">":
            yield None, divisions
        else:
            interval = _power_of_two(key, megabytes).bit_length() - 1
            yield min(interval, INTERVALS - 1), divisions


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """One number for all sizes, or pairs of a size in MB and the number from that size on.

    The first pair is also for all smaller sizes, ``>`` for all sizes past the last pair. A size
    between two pairs that has none itself is not rounded.
    """
    if not text.startswith("["):
        return (_power_of_two(key, text),) * INTERVALS
    divisions = [0] * INTERVALS
    last: int | None = None
    for interval, count in _division_rows(key, text):
        if interval is None:
            first = 1 if last is None else last + 1
            divisions[first:] = [count] * (INTERVALS - first)
            continue
        if last is None:
            divisions[:interval] = [count] * interval
        divisions[interval] = count
        last = interval
    return tuple(divisions)


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "garbage_collection_threshold": ("garbage_collection_threshold", _ratio),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction", _ratio),
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


def _check_modelled(key: str, value: str) -> None:
    """Raises for values under which another allocator, or another policy, is at work."""
    if key == "backend" and value != "native":
        expected = "'native': the model is of that allocator alone; remove the key"
        raise _invalid(key, value, expected)
    if key == "throw_on_cudamalloc_oom" and _truth(key, value):
        raise _invalid(key, value, "False: failing before cached blocks are freed is not modelled")


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
        elif key in KEYS:
            _check_modelled(key, value)
        else:
            raise UnknownOption(key, value, KEYS)
    return AllocatorSettings(**values)
