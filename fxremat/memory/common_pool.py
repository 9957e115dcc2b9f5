"""What the pool that all share reserves on CUDA, beside graphs whose memory lies elsewhere.

In the first step of a loop it is asked, in this order, for

    inputs
    cuBLAS's workspaces of both threads      when graphs are compiled
    what tuning writes over                  and frees again
    the optimizer's states                   for one weight after the other
    what a step of the optimizer makes       and frees again

Segments that the allocator has taken stay, so what it reserves then is what it reserves ever after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from fxremat.core.events import Allocate, Event, Free
from fxremat.memory.allocator.caching import replay
from fxremat.memory.allocator.settings import AllocatorSettings


@dataclass(frozen=True)
class CommonPool:
    """What the pool is asked for, in bytes.

    The ``weights`` are those that are trained. Optimizers hold ``states`` for them that are not
    there yet, and make ``step`` bytes more while they step. So much is reserved for ``others``.
    """

    inputs: Sequence[int]
    others: int = 0
    workspaces: Sequence[int] = ()
    tuning: int = 0
    weights: Sequence[int] = ()
    states: int = 0
    step: int = 0
    _names: Iterator[int] = field(default_factory=count, compare=False)

    def reserved(self, settings: AllocatorSettings) -> int:
        """The most that is reserved."""
        return self.others + replay(list(self._events()), settings).peak_reserved_bytes

    def _events(self) -> Iterator[Event]:
        yield from self._held(self.inputs)
        yield from self._held(self.workspaces)
        yield from self._made([self.tuning])
        yield from self._held(self._like_weights(self.states))
        yield from self._made(self._like_weights(self.step))

    def _like_weights(self, nbytes: int) -> list[int]:
        """So many bytes in blocks as large as the weights, as often as that goes; else in one."""
        whole = sum(self.weights)
        times, rest = divmod(nbytes, whole) if whole else (0, nbytes)
        return [*(one for one in self.weights for _ in range(times)), rest]

    def _held(self, sizes: Sequence[int]) -> Iterator[Event]:
        yield from (Allocate(f"{next(self._names)}", nbytes) for nbytes in sizes)

    def _made(self, sizes: Sequence[int]) -> Iterator[Event]:
        made = list(self._held(sizes))
        yield from made
        yield from (Free(one.name) for one in made if isinstance(one, Allocate))
