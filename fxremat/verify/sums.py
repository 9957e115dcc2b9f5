"""Value numbers that do not see in which order a backward adds up, nor how elements are grouped.

What a tensor holds is its *elements*, row by row, and its kind: sizes and dtype. In what depends on
a tangent, the elements of a sum are the multiset of its summands (docs/design/verification.md):

    add(a, b)                                  a, b
    addmm(a, b, c), baddbmm(a, b, c)           a, mm(b, c)            alpha = beta = 1
    index_put(a, index, b, accumulate=True)    a, rows(index, b)
    embedding_dense_backward(b, index, ...)    rows(index, b)
    zeros                                      nothing

Every summand is a number of 128 bits, drawn by a hash, and they are added. Two multisets with one
integer would be a collision of that hash.

What is put to host memory has the elements that it had on the device, and is marked as being there:
sums of what was put, and what is put of sums, are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import fx

from fxremat.compat.joint_graph import is_tangent, must_be_in_backward
from fxremat.verify.data_flow import Numbering, ReadGraph
from fxremat.verify.predicates import (
    is_function,
    is_mutating,
    is_put,
    is_random,
    is_repeatable,
    is_view,
    regroups,
    root,
    tensor_of,
)

_ATEN = torch.ops.aten
_ADD_PRODUCT: dict[Any, Any] = {
    _ATEN.addmm.default: _ATEN.mm.default,
    _ATEN.baddbmm.default: _ATEN.bmm.default,
}
_ADD_ROWS = (_ATEN.index_put.default, _ATEN._unsafe_index_put.default)
_FILLED = (_ATEN.full.default, _ATEN.new_full.default, _ATEN.full_like.default)
_ZEROS = (_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default)
_BITS = 128

Elements = tuple[int, bool]
"""The summands as one integer, and whether they were put to host memory."""


@dataclass
class ReadSums(ReadGraph):
    """What one graph computes; its calls are counted by what they compute, views left out."""

    late: set[fx.Node] = field(default_factory=set)
    """What depends on a tangent, or on what is told to be in the backward."""
    fixed: list[fx.Node] = field(default_factory=list)
    """Calls that draw random numbers or write, in their order."""
    calls: Counter[int] = field(default_factory=Counter)
    opaque: dict[int, str] = field(default_factory=dict)
    """Calls of other libraries, which may be no functions of their arguments: number and name."""
    held: dict[int, str] = field(default_factory=dict)
    """Calls that may not run again; a number that is ``free`` too may, by another call."""
    free: set[int] = field(default_factory=set)


class SumNumbering(Numbering):
    """Value numbers; with ``sums`` of multisets, with ``clones`` the same for a clone of an input.

    The latter are clones of inputs that the step writes, taken before it does.
    """

    reading = ReadSums

    def __init__(self, mutated: frozenset[str], *, sums: bool, clones: bool) -> None:
        super().__init__(mutated)
        self.sums, self.clones = sums, clones
        self.elements_of: dict[int, Elements] = {}

    def only_moves(self, node: fx.Node) -> bool:
        """What is fetched is not what lies in host memory, and what is put is seen below."""
        return False

    def call(self, node: fx.Node, found: ReadGraph, mutated: frozenset[fx.Node]) -> None:
        """Number a call, and count it."""
        assert isinstance(found, ReadSums)
        reads_late = any(is_tangent(n) or n in found.late for n in node.all_input_nodes)
        if reads_late or must_be_in_backward(node):
            found.late.add(node)
        if is_random(node) or is_mutating(node):
            args = self.arguments((node.args, node.kwargs), found)
            found.of[node] = self.number((node.target, args, node.name))
            found.fixed.append(node)
        else:
            meant = self._meant(node, found)
            found.of[node] = self._counted(node, found, mutated) if meant is None else meant

    def _counted(self, node: fx.Node, found: ReadSums, mutated: frozenset[fx.Node]) -> int:
        """The number of a call that is what its operator and its arguments say."""
        args = self.arguments((node.args, node.kwargs), found)
        number = self.number((node.target, args))
        if not is_view(node):
            found.calls[number] += 1
            if not is_function(node):
                found.opaque[number] = node.name
            if is_repeatable(node, mutated):
                found.free.add(number)
            else:
                found.held[number] = node.name
        return number

    # --- what a call gives, other than by its operator and arguments -----------------------

    def _meant(self, node: fx.Node, found: ReadSums) -> int | None:
        """The number of a view, a sum, a clone, or of what was put; None for any other call."""
        source = node.args[0] if node.args else None
        if tensor_of(node) is None or not isinstance(source, fx.Node):
            return None
        if is_put(node):
            return self._number_of((self._elements(source, found)[0], True), node)
        if is_view(node):
            owner = root(node)
            same = regroups(node, owner) and _kind(owner)[1:] == _kind(node)[1:]
            return self._number_of(self._elements(owner, found), node) if same else None
        if self.clones and self._is_old_content(node, source, found):
            return found.of[source]
        parts = self._summands(node, found) if self.sums and node in found.late else ()
        if len({place for _, place in parts}) != 1:
            return None
        total = sum(part for part, _ in parts) % (1 << _BITS)
        return self._number_of((total, parts[0][1]), node)

    def _is_old_content(self, node: fx.Node, source: fx.Node, found: ReadSums) -> bool:
        """Whether a call clones an input, in front of all writes, that the step writes into."""
        of_input = source.op == "placeholder" and source.name in self.mutated
        plain = node.target is _ATEN.clone.default and not node.kwargs
        return of_input and plain and found.written_into(source) is None

    def _elements(self, node: fx.Node, found: ReadSums) -> Elements:
        """The elements of a node, which are its own where they are no sum."""
        return self._own_elements(found.of[node], node)

    def _own_elements(self, number: int, node: fx.Node) -> Elements:
        """The elements that a number has, or now gets, in the kind of a node."""
        if number not in self.elements_of:
            self.elements_of[number] = _drawn(number), False
        elements = self.elements_of[number]
        self.numbers.setdefault(("elements", elements, _kind(node)), number)
        return elements

    def _number_of(self, elements: Elements, node: fx.Node) -> int:
        """The number of these elements in the kind of a node."""
        number = self.number(("elements", elements, _kind(node)))
        self.elements_of.setdefault(number, elements)
        return number

    def _summands(self, node: fx.Node, found: ReadSums) -> Sequence[Elements]:
        """What a call adds up; empty where it is no sum. ``alpha`` and ``beta`` come by name."""
        first, *others = node.args
        if node.kwargs or not isinstance(first, fx.Node):
            return ()
        if node.target is _ATEN.embedding_dense_backward.default:
            (index, _, padding, by_frequency) = others
            plain = padding == -1 and by_frequency is False
            return (self._rows(node, [index], first, found),) if plain else ()
        if _kind(first) != _kind(node):
            return ()
        if node.target is _ATEN.add.Tensor and _kind(others[0]) == _kind(node):
            parts = [self._part(first, found), self._part(others[0], found)]
        elif node.target in _ADD_PRODUCT:
            parts = [self._part(first, found), self._product(node, found)]
        elif node.target in _ADD_ROWS and others[2:] == [True]:
            parts = [self._part(first, found), self._rows(node, others[0], others[1], found)]
        elif node.target is _ATEN._unsafe_masked_index_put_accumulate.default:
            mask, indices, values = others
            rows = self._masked_rows(node, mask, indices, values, found)
            parts = [self._part(first, found), rows]
        else:
            return ()
        return () if None in parts else cast("list[Elements]", parts)

    def _part(self, node: Any, found: ReadSums) -> Elements | None:
        """The elements of a summand; None where it was written over, and numbers do not tell."""
        if _is_zero(node):
            return 0, False
        return None if found.written_into(node) is not None else self._elements(node, found)

    def _product(self, node: fx.Node, found: ReadSums) -> Elements:
        """What the call that only multiplies would give, in the kind of the sum."""
        key = (_ADD_PRODUCT[node.target], self.arguments((node.args[1:], {}), found))
        return self._own_elements(self.number(key), node)

    def _rows(self, like: fx.Node, indices: Any, values: Any, found: ReadSums) -> Elements:
        """Rows that are added where an index says; masked where they were made so."""
        mask = _mask_of(values)
        sizes = like.meta["val"].shape
        given = [_unclamped(i, size) for i, size in zip(indices, sizes, strict=False)]
        if mask is not None and None not in given:
            return self._masked_rows(like, mask, given, values.args[1], found)
        seen = self.arguments(([*indices], values), found)
        return _drawn(self.number(("rows", _kind(like), seen))), False

    def _masked_rows(
        self, like: fx.Node, mask: Any, indices: Any, values: Any, found: ReadSums
    ) -> Elements:
        """Rows of which a mask keeps some, added where an index within bounds says."""
        seen = self.arguments((mask, [*indices], values), found)
        return _drawn(self.number(("masked rows", _kind(like), seen))), False


def _drawn(number: int) -> int:
    """An integer of so many bits, which stands for the number in sums."""
    return int.from_bytes(blake2b(str(number).encode(), digest_size=_BITS // 8).digest())


def _kind(node: Any) -> tuple[Any, ...]:
    """Sizes, dtype, and what is only noted of elements; symbols are not compared as numbers."""
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    if tensor is None:
        return ()
    return str(tuple(tensor.shape)), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_zero(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target in _ZEROS or (node.target in _FILLED and bool(node.args[-1] == 0))


def _mask_of(values: Any) -> fx.Node | None:
    """The mask of ``where(mask, values, 0)``, which keeps the dtype; None for all else."""
    if not isinstance(values, fx.Node) or values.target is not _ATEN.where.self:
        return None
    mask, kept, other = values.args
    is_masked = _is_zero(other) and _kind(kept)[1:] == _kind(values)[1:]
    return mask if is_masked and isinstance(mask, fx.Node) else None


def _unclamped(index: Any, size: Any) -> fx.Node | None:
    """The index of ``clamp_max(clamp_min(index, -size), size - 1)``; None for all else."""
    if type(size) is not int or not isinstance(index, fx.Node) or len(index.args) != 2:
        return None
    low, most = index.args
    if index.target is not _ATEN.clamp_max.default or most != size - 1:
        return None
    if not isinstance(low, fx.Node) or low.target is not _ATEN.clamp_min.default:
        return None
    source, least = low.args
    return source if least == -size and isinstance(source, fx.Node) else None
