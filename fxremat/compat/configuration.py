"""torch's configuration: the classes and keys that Inductor asks for, and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch._functorch.config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._ops import OpOverload

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
except ImportError:  # torch 2.11 has one class for both
    SchedulerPass = CustomGraphPass  # type: ignore[misc, assignment]

__all__ = [
    "CUDAGRAPHS",
    "PARTITIONER",
    "POST_GRAD_PASS",
    "SCHEDULER_PASS",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "OpOverload",
    "SchedulerPass",
    "cache_directory",
    "caches_disabled",
    "functorch_config",
    "inductor_config",
    "inductor_patches",
    "passes_of",
]

CUDAGRAPHS = "triton.cudagraphs"
POST_GRAD_PASS = "post_grad_custom_post_pass"
SCHEDULER_PASS = "_pre_fusion_custom_pass"
PARTITIONER = "custom_partitioner_fn"


def cache_directory() -> Path:
    """Ours in Inductor's cache directory, which honours TORCHINDUCTOR_CACHE_DIR."""
    return Path(cache_dir()) / "fxremat"


def caches_disabled() -> bool:
    """Whether Inductor is asked to keep nothing on disk and to read nothing from there."""
    return bool(inductor_config.force_disable_caches)


def inductor_patches(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a torch.compile mode, with the user's options on top."""
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(list_mode_options(mode))
    patches.update({key.replace("-", "_"): value for key, value in options.items()})
    return patches


def passes_of(theirs: Any) -> tuple[Any, ...]:
    """What the user configured as passes of Inductor: none, one, or a list from torch 2.13 on."""
    return () if theirs is None else (theirs,) if callable(theirs) else tuple(theirs)
