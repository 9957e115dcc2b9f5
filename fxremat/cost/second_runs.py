"""Whether a kernel that is not torch's may run again: by what it declares, and what two runs show.

A custom op declares in its schema that it writes into no argument and returns none, and by
`torch.Tag.nondeterministic_seeded` that it draws random numbers. Torch takes ops at their word: it
drops and merges calls by that, and within an ``activation_memory_budget`` its partitioner runs them
again. But an op that forgets the tag would change gradients, and nothing would tell. So each
distinct call runs twice when the graph is compiled, on data of its sizes. A generator that moved,
or results that differ, show that it is not to run again. Results that it leaves as they were
allocated are filled: FlashAttention gives a seed that it never writes where nothing is dropped.

Where a call cannot be tried, it runs once, and a warning names the option that says better: among
several ranks (it might wait for others), on a device that is not here, or if it raises. What draws
random numbers for some contents of its inputs only would not be seen.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.configuration import OpOverload
from fxremat.compat.joint_graph import REPEATABLE, is_pure_attention
from fxremat.compat.measuring import memory_filled, random_state_kept, random_states
from fxremat.compat.ranks import is_a_rank
from fxremat.compat.tensors import outside_fake_mode
from fxremat.cost.call_times import call_key, has_room, made_call, operands

log = logging.getLogger(__name__)

_TORCH = frozenset({"aten", "prims", "fxremat", "_c10d_functional", "c10d_functional"})
_PLAIN = (torch.Tensor, torch.SymInt, int, float, bool, str, type(None))
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


_TRIED: dict[tuple[Any, str], bool | None] = {}
"""Whether two runs of a call gave the same; None: it could not be tried."""


def mark_functions(graph: fx.Graph, device: torch.device, *, here: bool) -> None:
    """Mark the calls that are not torch's and may run again.

    The device is that of the step; it may be ``here``, or one that is planned for only.
    """
    here = here and (device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()))
    for node in graph.nodes:
        if is_pure_attention(node):
            node.meta[REPEATABLE] = True
        elif REPEATABLE not in node.meta and _declares_a_function(node):
            same = _gives_the_same(node, device) if here and not is_a_rank() else None
            if same:
                node.meta[REPEATABLE] = True
            elif same is None:
                _tell_once(node.target._schema.name)


def _declares_a_function(node: fx.Node) -> bool:
    """Whether it is a custom op whose schema and tags say that it only computes its results."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace in _TORCH:
        return False
    schema = target._schema
    aliased = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    given = pytree.tree_leaves(operands(node, images_last=False))
    return (
        not (aliased or schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)
        and any(isinstance(one, torch.Tensor) for one in given)
        and all(isinstance(one, _PLAIN + _CONSTANTS) for one in given)
    )


def _gives_the_same(node: fx.Node, device: torch.device) -> bool | None:
    """Whether two runs of a call do; None where it cannot be tried."""
    args, kwargs = operands(node, images_last=False)
    key = node.target, f"{device} {call_key(node.target, args, kwargs)}"
    if key not in _TRIED:
        try:
            with outside_fake_mode(), random_state_kept(), memory_filled(), torch.no_grad():
                _TRIED[key] = _run_twice(node.target, args, kwargs, device)
        except Exception as error:
            log.info("%s does not run on random data: %s", node.target, error)
            _TRIED[key] = None
    return _TRIED[key]


def _run_twice(target: Any, args: Any, kwargs: Any, device: torch.device) -> bool | None:
    if not has_room(device, (args, kwargs)):
        return None
    real, named = made_call(target, args, kwargs, device)
    before = random_states()
    first = pytree.tree_leaves(target(*real, **named))
    second = pytree.tree_leaves(target(*real, **named))
    drew_none = all(map(torch.equal, before, random_states()))
    return drew_none and all(map(_equal, first, second))


def _equal(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit, NaN included."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    one, other = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


@cache
def _tell_once(name: str) -> None:
    log.warning(
        "%s runs once, because it could not be tried whether a second run gives the same. If it "
        "does, options={'repeatable': ['%s']} may lower the least budget", name, name,
    )  # fmt: skip
