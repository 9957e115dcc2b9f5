"""What a collective sends over the link between ranks, and what it takes inside.

Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009),
section 3: to gather what n ranks have, or to sum it into a part for each, every one of them sends
(n-1)/n of the whole; to sum it for all, twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.distributed.ranks import (
    gathers,
    moves_between_ranks,
    number_of_ranks,
    sums_for_all_ranks,
    sums_into_parts,
    sums_over_ranks,
)
from fxremat.passes.memory_estimation import nbytes


def sent_by(node: fx.Node) -> int:
    """Bytes that a rank sends in the collective that a node starts; 0 for other nodes."""
    if not (moves_between_ranks(node) or sums_over_ranks(node)):
        return 0
    given = _bytes([one.meta.get("val") for one in node.all_input_nodes])
    whole, ranks = max(_bytes(node.meta.get("val")), given), number_of_ranks(node)
    sent = whole if ranks is None else whole * (ranks - 1) // ranks
    return 2 * sent if sums_for_all_ranks(node) else sent


def scratch_of(target: object, args: Sequence[Any]) -> int:
    """What gloo allocates inside of a collective on the CPU, by its arguments.

    It gathers into a list of results, and copies them; it sums into a copy of what it is given.
    NCCL has buffers that torch's allocator does not know.
    """
    if gathers(target):
        given = _bytes(args)
        whole = given * next(one for one in args if isinstance(one, int))
        return whole + (given if isinstance(args[0], (tuple, list)) else 0)
    return _bytes(args) if sums_into_parts(target) else 0


def _bytes(values: Any) -> int:
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
    return sum(map(nbytes, tensors))
