"""The job that this process is a rank of: where ranks leave word for each other, and who has to
compile the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import fx

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def is_a_rank() -> bool:
    """Whether this process is one of several that torch.distributed has brought together."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def job_store() -> Any:
    """The key-value store that the ranks have met at, with names of our own; `is_a_rank`."""
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d
    return group.PrefixStore("fxremat", group._get_default_store())


def has_within(store: Any, key: str, seconds: float) -> bool:
    """Whether a key is there, or comes within so many seconds.

    Raises `ConnectionError` where the store cannot be reached.
    """
    try:
        store.wait([key], timedelta(seconds=seconds))
    except Exception as error:
        if _is_timeout(error):
            return False
        raise ConnectionError(str(error)) from error
    return True


def _is_timeout(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timeout" in text or "timed out" in text


def ranks_together(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """The ranks that have to run the same graph at the same time: it has collectives among them.

    Those of the device meshes of its inputs, and of its collectives; none where it has neither.
    """
    if not is_a_rank():
        return ()
    from torch.distributed.tensor import DTensor

    found: set[int] = set()
    for one in inputs:
        if isinstance(one, DTensor):
            found |= set(one.device_mesh.mesh.flatten().tolist())
    for name in {name for node in gm.graph.nodes for name in _groups(node)}:
        found |= set(_ranks_of(name))
    return tuple(sorted(found)) if len(found) > 1 else ()


def is_collective(node: fx.Node) -> bool:
    """Whether a node has ranks talk to each other, or waits for that."""
    return getattr(node.target, "namespace", None) in _COLLECTIVES


def _groups(node: fx.Node) -> list[str]:
    """Names of process groups among the arguments of a collective."""
    if not is_collective(node):
        return []
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    name = given.get("group_name")
    return [name] if isinstance(name, str) else []


def _ranks_of(group_name: str) -> list[int]:
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d
    ranks: list[int] = group.get_process_group_ranks(group._resolve_process_group(group_name))
    return ranks


def sharded_and_gathered(module: Any) -> tuple[int, int]:
    """Bytes of the parameters that FSDP2 shards at this module: this rank's parts, and gathered.

    Gathered they are as wide as the gradients that are reduced, if these are wider.
    """
    state, part, whole = module._get_fsdp_state(), 0, 0
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    for one in (one for group in groups if group is not None for one in group.fsdp_params):
        policy, own = one.mp_policy, one._sharded_param_data
        widths = [each.itemsize for each in (policy.param_dtype, policy.reduce_dtype) if each]
        part += own.numel() * own.dtype.itemsize
        whole += one._orig_size.numel() * max(widths, default=own.dtype.itemsize)
    return part, whole
