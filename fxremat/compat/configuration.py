"""torch's configuration: the classes and keys that Inductor asks for, and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._functorch import config as _functorch_config
from torch._inductor import config as _inductor_config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._ops import OpOverload as OpOverload

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # torch 2.11 has one class for both
    CustomSchedulerPass = CustomGraphPass  # type: ignore[misc, assignment]

SchedulerPass = CustomSchedulerPass
functorch_config, inductor_config = _functorch_config, _inductor_config

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
