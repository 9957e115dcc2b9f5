"""The error of an allocation that does not fit, with the figures that say why."""

from __future__ import annotations

from fxremat.errors import FxrematError
from fxremat.sizes import format_bytes


class OutOfMemory(FxrematError):
    """The modelled device has no room, even after cached blocks were given back.

    ``asked_bytes`` is the request, ``acquired_bytes`` what the device was asked for to serve it.
    ``largest_free_bytes`` is the largest cached block that is left, ``fragmentation_bytes`` is what
    is reserved but not allocated.
    """

    def __init__(
        self,
        asked_bytes: int,
        acquired_bytes: int,
        limit_bytes: int,
        reserved_bytes: int,
        allocated_bytes: int,
        largest_free_bytes: int,
        expandable_segments: bool,
    ) -> None:
        super().__init__(
            asked_bytes,
            acquired_bytes,
            limit_bytes,
            reserved_bytes,
            allocated_bytes,
            largest_free_bytes,
            expandable_segments,
        )
        self.asked_bytes = asked_bytes
        self.acquired_bytes = acquired_bytes
        self.limit_bytes = limit_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.largest_free_bytes = largest_free_bytes
        self.expandable_segments = expandable_segments

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that are reserved but hold nothing."""
        return self.reserved_bytes - self.allocated_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.asked_bytes)} were asked for, which take "
            f"{format_bytes(self.acquired_bytes)} from the device, and of its "
            f"{format_bytes(self.limit_bytes)} are {format_bytes(self.reserved_bytes)} reserved. "
            f"{format_bytes(self.allocated_bytes)} of them are allocated, "
            f"{format_bytes(self.fragmentation_bytes)} are fragmentation (the largest free block "
            f"has {format_bytes(self.largest_free_bytes)}).\nWhat to do: {self._advice()}."
        )

    def _advice(self) -> str:
        if self.fragmentation_bytes >= self.asked_bytes and not self.expandable_segments:
            return "set PYTORCH_ALLOC_CONF=expandable_segments:True, or a smaller memory_budget"
        return "set a smaller memory_budget, or use a smaller batch"
