"""Places in a block of memory: tensors over their bytes, who holds them, and which lie where."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from sys import getrefcount

import torch

from fxremat.compat.tensors import storage_number, storage_uses, tensor_over


class Slot:
    """The bytes of a block from ``begin`` to ``end``, and a tensor with these as its storage.

    ``uses`` and ``references`` count who holds the storage when nobody does who is given it.
    """

    __slots__ = (
        "_block", "_dtype", "address", "base", "begin", "end", "number", "references", "storage",
        "uses",
    )  # fmt: skip

    def __init__(self, block: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> None:
        self.begin, self.end, self._block, self._dtype = begin, end, block, dtype
        self.renew()
        self.address = self.base.data_ptr()
        self.uses = storage_uses(self.number)
        self.references = getrefcount(self.storage)

    def renew(self) -> None:
        """Take another storage over the same bytes: who holds the one of now does not count."""
        self.base = tensor_over(self._block, self.begin, self.end, self._dtype)
        self.storage = self.base.untyped_storage()
        self.number = storage_number(self.storage)

    @property
    def is_moved(self) -> bool:
        """Whether somebody has given the storage other memory, as `Tensor.share_memory_` does."""
        return self.base.data_ptr() != self.address


def held(slots: Iterable[Slot]) -> list[Slot]:
    """Those of which somebody holds a tensor that lies there, or its storage."""
    return [
        slot
        for slot in slots
        if storage_uses(slot.number) > slot.uses or getrefcount(slot.storage) > slot.references
    ]


class Covered:
    """Which slot was the last to have which bytes."""

    def __init__(self, slots: Iterable[Slot | None] = ()) -> None:
        self._begins, self._ends, self._slots = list[int](), list[int](), list[Slot]()
        for slot in slots:
            if slot is not None:
                self.cover(slot)

    def _range(self, slot: Slot) -> tuple[int, int]:
        return bisect_right(self._ends, slot.begin), bisect_left(self._begins, slot.end)

    def owners(self, slot: Slot) -> tuple[Slot, ...]:
        """Those who have any of the slot's bytes."""
        low, high = self._range(slot)
        return tuple(dict.fromkeys(self._slots[low:high]))

    def cover(self, slot: Slot) -> None:
        """Give its bytes to ``slot``."""
        low, high = self._range(slot)
        parts = [(slot.begin, slot.end, slot)]
        if low < high and self._begins[low] < slot.begin:
            parts.insert(0, (self._begins[low], slot.begin, self._slots[low]))
        if low < high and self._ends[high - 1] > slot.end:
            parts.append((slot.end, self._ends[high - 1], self._slots[high - 1]))
        self._begins[low:high] = [begin for begin, _, _ in parts]
        self._ends[low:high] = [end for _, end, _ in parts]
        self._slots[low:high] = [owner for _, _, owner in parts]
