"""What the pool that all share reserves on CUDA, beside graphs whose memory lies elsewhere.

In the first step of a loop it is asked, in this order, for

    inputs
    a workspace of cuBLAS, and what tuning writes over      in the forward, and in the backward
    the optimizer's states                                  for one weight after the other
    what a step of the optimizer makes on top               and frees again

Segments that the allocator has taken stay, so what it reserves then is what it reserves ever after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from fxremat.core.events import Allocate, Event, Free
from fxremat.memory.allocator.caching import replay
from fxremat.memory.allocator.rules import SMALL_SEGMENT_BYTES
from fxremat.memory.allocator.settings import AllocatorSettings

EAGER_SEGMENTS = 2
"""Of small blocks, for what eager code makes: a loss's gradient, counters, the next batch. Replayed
loops reserved as many more than is known otherwise (`python -m benchmarks.loops`)."""


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
        taken = replay(list(self._events()), settings).peak_reserved_bytes
        return self.others + taken + (EAGER_SEGMENTS * SMALL_SEGMENT_BYTES if self.inputs else 0)

    def _events(self) -> Iterator[Event]:
        yield from self._held(self.inputs)
        for workspace in self.workspaces or (0,):
            yield from self._held([workspace])
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
