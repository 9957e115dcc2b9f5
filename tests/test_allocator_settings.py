"""Reading the settings of the allocator from the text of PYTORCH_ALLOC_CONF."""

from __future__ import annotations

from typing import Any

import pytest

from fxremat.memory.allocator_settings import AllocatorSettings, parse_settings

MIB = 2**20


@pytest.mark.parametrize("text", ["", " ", "backend:native", "pinned_num_register_threads:8,"])
def test_defaults_are_those_of_torch(text: str) -> None:
    settings = parse_settings(text)
    assert settings == AllocatorSettings()
    assert settings.max_split is None
    assert settings.max_non_split_rounding == settings.large_segment == 20 * MIB
    assert settings.divisions == (0,) * 16
    assert not settings.expandable_segments


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("max_split_size_mb:64", {"max_split": 64 * MIB}),
        ("max_non_split_rounding_mb:30", {"max_non_split_rounding": 30 * MIB}),
        ("large_segment_size_mb:12", {"large_segment": 12 * MIB}),
        ("garbage_collection_threshold:0.8", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:True,expandable_segments:False", {}),
        ("per_process_memory_fraction:0.5", {}),
        ("roundup_power2_divisions:8", {"divisions": (8,) * 16}),
        (
            " max_split_size_mb : 64 , pinned_use_background_threads : True",
            {"max_split": 64 * MIB},
        ),
        ("throw_on_cudamalloc_oom:False,graph_capture_record_stream_reuse:True", {}),
    ],
)
def test_one_key(text: str, fields: dict[str, Any]) -> None:
    assert parse_settings(text) == AllocatorSettings(**fields)


def test_divisions_by_size() -> None:
    """The first pair holds for smaller sizes too, ``>`` past the last; 128 MB has none."""
    settings = parse_settings("roundup_power2_divisions:[64:8,256:4,512:0,1024:2,>:1]")
    divisions = [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 2, 1, 1, 1, 1, 1]
    assert settings.divisions == tuple(divisions)
    sizes = (1, MIB, 64 * MIB, 128 * MIB - 1, 128 * MIB, 256 * MIB, 2**30, 2**31, 2**50)
    assert [settings.divisions_for(nbytes) for nbytes in sizes] == [8, 8, 8, 8, 0, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_split_sizemb:64", "did you mean 'max_split_size_mb'"),
        ("max_split_size_mb", "key:value pairs"),
        ("max_split_size_mb:", "key:value pairs"),
        (",max_split_size_mb:64", "key:value pairs"),
        ("roundup_power2_divisions:[64:8", "key:value pairs"),
        ("max_split_size_mb:big", "expected a whole number"),
        ("max_split_size_mb:19", "at least one large segment"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "at least one large segment"),
        ("max_non_split_rounding_mb:19", "at least one large segment"),
        ("large_segment_size_mb:10", "expected more than 10"),
        ("expandable_segments:true", "expected True or False"),
        ("roundup_power2_divisions:3", "a power of 2"),
        ("roundup_power2_divisions:0", "a power of 2"),
        ("roundup_power2_divisions:[64:3]", "a power of 2"),
        ("roundup_power2_divisions:[63:4]", "a power of 2"),
        ("roundup_power2_divisions:[4]", "pairs such as"),
        ("backend:cudaMallocAsync", "remove the key"),
        ("throw_on_cudamalloc_oom:True", "not modelled"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_settings(text)
    assert text.split(":")[0].strip(",") in str(caught.value)


def test_fields_are_checked_too() -> None:
    with pytest.raises(ValueError, match="powers of 2"):
        AllocatorSettings(divisions=(3,) * 16)
