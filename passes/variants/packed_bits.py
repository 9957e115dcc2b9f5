"""Masks in bits: exact, and the same gradients bit for bit.

A bool takes a byte; eight fit into one. A mask that the forward makes and the backward reads is
packed behind where it is made, and unpacked before its first reader (`packed_masks`). Where the
backward *computes* a mask from floats of the forward, the comparison is done in the forward as well
and its bits are kept in place of the floats (`sign_masks`): the binarised ReLU of Gist (Jain et al.
2018, section 4.1).

    relu ── ... (forward)                relu ── le' ── pack ── bits        (forward)
    relu ── le ── where (backward)       bits ── unpack ── le'' ── where    (backward)

Byte ``j`` of the packed mask holds the elements ``j``, ``j + m``, ... ``j + 7 m`` along one
dimension of size ``8 m``, and not eight neighbours: so a loop over the other dimensions reads and
writes whole vectors. Both directions are plain calls on 32-bit numbers, which Inductor makes part
of the loops around them, as vectors on the CPU too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import fx

from fxremat.core.constants import LOOSE_PACKING
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_repeatable,
    is_tensor,
    is_view,
    reached,
)
from fxremat.passes.materialisation import is_fusable
from fxremat.passes.nodes import Add, copy_calls, fake
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.passes.variants.saved_values import (
    as_dtype,
    by_memory,
    counting,
    has_order,
    is_large,
    laid_out,
    order_of,
    rule_of_form,
)

_ATEN = torch.ops.aten


# --- bits --------------------------------------------------------------------------------


BITS = 8


def packed_dim(sizes: Sequence[int]) -> int:
    """The dimension along which elements share bytes: fewest bytes, not the last, an outer one.

    Vectors go along the last; what is packed there is read element by element.
    """

    def cost(dim: int) -> tuple[bool, int, int]:
        rounded = -(-sizes[dim] // BITS) * prod(sizes[:dim]) * prod(sizes[dim + 1 :])
        is_loose = rounded * BITS > LOOSE_PACKING * prod(sizes)
        return is_loose or dim == len(sizes) - 1, rounded, dim

    return min(range(len(sizes)), key=cost)


def _laid_out_sizes(mask: torch.Tensor) -> tuple[list[int], int, int]:
    """The sizes in the order of memory, which of them is packed, and how many come behind it."""
    order = order_of(mask)
    assert order is not None
    sizes = [mask.shape[d] for d in order] or [1]
    dim = packed_dim(sizes)
    return sizes, dim, len(sizes) - dim - 1


def _shifts(add: Add, behind: int, like: fx.Node) -> fx.Node:
    """0 to 7, with so many dimensions behind."""
    return add(_ATEN.reshape.default, counting(add, BITS, torch.int32, like), [BITS] + [1] * behind)


def pack(add: Add, mask: fx.Node) -> fx.Node:
    """Eight elements of a mask, or of ones and zeros, in each byte."""
    sizes, dim, behind = _laid_out_sizes(fake(mask))
    missing = -sizes[dim] % BITS
    ones = as_dtype(add, by_memory(add, mask), torch.int32)
    if not fake(ones).dim():
        ones = add(_ATEN.reshape.default, ones, sizes)
    if missing:
        ones = add(_ATEN.constant_pad_nd.default, ones, [0, 0] * behind + [0, missing], 0)
    split = [*sizes[:dim], BITS, (sizes[dim] + missing) // BITS, *sizes[dim + 1 :]]
    rows = add(_ATEN.reshape.default, ones, split)
    shifted = add(_ATEN.bitwise_left_shift.Tensor, rows, _shifts(add, behind + 1, mask))
    total = add(_ATEN.sum.dim_IntList, shifted, [dim], dtype=torch.int32)
    return as_dtype(add, total, torch.uint8)


def unpack(add: Add, packed: fx.Node, like: torch.Tensor) -> fx.Node:
    """A mask from its bits, laid out as ``like`` is."""
    sizes, dim, behind = _laid_out_sizes(like)
    column = add(_ATEN.unsqueeze.default, as_dtype(add, packed, torch.int32), dim)
    shifted = add(_ATEN.bitwise_right_shift.Tensor, column, _shifts(add, behind + 1, packed))
    ones = add(_ATEN.bitwise_and.Scalar, shifted, 1)
    whole = [*sizes[:dim], BITS * fake(packed).shape[dim], *sizes[dim + 1 :]]
    ones = add(_ATEN.reshape.default, ones, whole)
    if whole[dim] != sizes[dim]:
        ones = add(_ATEN.slice.Tensor, ones, dim, 0, sizes[dim])
    return laid_out(add, add(_ATEN.ne.Scalar, ones, 0), like)


# --- masks of the forward ----------------------------------------------------------------


def _is_mask(node: fx.Node) -> bool:
    return fake(node).dtype == torch.bool and is_large(node)


# --- masks that only the backward computes -----------------------------------------------


def _insert_early(
    mask: fx.Node, cone: Iterable[fx.Node], last_read: fx.Node, into: Target
) -> StandIns:
    """Compute a mask early as well, by its ``cone``, pack it there, and unpack it at its place."""
    old = into(mask)
    early = into.behind(into(last_read), old)
    new: dict[fx.Node, fx.Node] = {}
    copy_calls(early, map(into, cone), new)
    return {mask: unpack(into.behind(old), pack(early, new[old]), fake(old))}


def _cone(joint: JointGraph, mask: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """What computes ``mask`` in the backward alone, and what of the forward that reads.

    Nothing where some of it is more than a loop.
    """

    def is_early(node: fx.Node) -> bool:
        return joint.role[node] is Role.FORWARD

    def is_loop(node: fx.Node) -> bool:
        fuses = is_view(node) or (is_fusable(node) and is_repeatable(node, joint.mutated))
        return fuses and is_tensor(node)

    found = reached([mask], lambda node: () if is_early(node) else node.all_input_nodes)
    reads = set(filter(is_early, found))
    return (found - reads, reads) if all(map(is_loop, found - reads)) else (set(), set())


def _is_last_mask(joint: JointGraph, node: fx.Node) -> bool:
    """Whether a mask of the backward is read there as a mask, not only to make another."""
    if joint.role[node] is not Role.LAZY or not is_tensor(node) or is_view(node):
        return False
    return _is_mask(node) and any(
        not is_tensor(u) or fake(u).dtype != torch.bool for u in node.users
    )


def find_sign_masks(joint: JointGraph) -> Iterator[Site]:
    for mask in joint.module.graph.nodes:
        if mask.op != "call_function" or not _is_last_mask(joint, mask) or not has_order(mask):
            continue
        inside, reads = _cone(joint, mask)
        calls = [node for node in reads if node.op == "call_function"]
        if any(is_tensor(node) and fake(node).is_floating_point() for node in calls):
            insert = partial(_insert_early, mask, sorted(inside), max(calls))
            yield Site("sign_masks", f"sign_masks:{mask.name}", insert)


RULES: tuple[Rule, ...] = (
    rule_of_form(
        "packed_masks",
        "masks saved for the backward in one bit an element",
        lambda early, late, mask: unpack(late, pack(early, mask), fake(mask)),
        _is_mask,
    ),
    Rule("sign_masks", "comparisons of the backward done early, one bit saved", find_sign_masks),
)
