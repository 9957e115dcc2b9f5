"""Lifetimes and sizes as training steps have them, made by rule.

A layer takes some steps forward and as many backward, in reverse. Its saved tensors live from the
one to the other, its temporaries a step or a few, the gradient between layers until the layer
before has used it, and the gradients of weights to the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fxremat.core.layout import Buffer

ALIGNMENT = 512
"""Of CUDA's caching allocator, in bytes."""
LONGEST = 3
"""Steps that a temporary lives."""


@dataclass
class _Step:
    """Buffers so far; ``now`` is the number of the next op."""

    chance: random.Random
    buffers: list[Buffer] = field(default_factory=list)
    now: int = 0

    def add(self, kind: str, begin: int, end: int, size_bytes: int) -> None:
        name = f"{kind}_{len(self.buffers)}"
        self.buffers.append(Buffer(name, begin, max(end, begin + 1), size_bytes, ALIGNMENT))

    def temporaries(self, count: int, unit_bytes: int) -> None:
        """Some ops, each with a buffer that lives for a few steps."""
        for _ in range(count):
            size = self.chance.choice((1, 1, 2, 3, 4, 8)) * unit_bytes // 2
            self.add("temporary", self.now, self.now + self.chance.randint(1, LONGEST), size)
            self.now += 1


def layers(units: list[int], weights: list[int], saved: int, ops: int, seed: int) -> list[Buffer]:
    """A step of one layer for each of ``units``: the bytes of one of its activations.

    ``weights`` are the bytes of a layer's weights; it saves ``saved`` tensors and runs ``ops`` ops
    each way.
    """
    step = _Step(random.Random(seed))
    kept: list[list[tuple[int, int]]] = []
    for unit in units:
        mine = []
        for number in range(saved):
            mine.append((step.now, unit * (1, 1, 3, 4, 4, 1)[number % 6]))
            step.temporaries(max(1, ops // saved), unit)
        kept.append(mine)
    gradient_from = step.now
    last = step.now + len(units) * saved * max(1, ops // saved) + LONGEST
    for unit, weight, mine in zip(reversed(units), reversed(weights), reversed(kept), strict=True):
        for begin, size in reversed(mine):
            step.temporaries(max(1, ops // saved), unit)
            step.add("saved", begin, step.now, size)
            step.add("gradient", step.now - 1, last, weight // saved)
        step.add("between", gradient_from, step.now, unit)
        gradient_from = step.now - 1
    return step.buffers


def transformer(depth: int, seed: int = 0) -> list[Buffer]:
    """Layers that are all alike."""
    return layers([1 << 20] * depth, [3 << 20] * depth, 6, 12, seed)


def pyramid(depth: int, seed: int = 0) -> list[Buffer]:
    """A convolution net: activations shrink and weights grow."""
    scales = [5 * layer // depth for layer in range(depth)]
    return layers([1 << (22 - s) for s in scales], [1 << (14 + 2 * s) for s in scales], 3, 6, seed)


def uneven(depth: int, seed: int = 0) -> list[Buffer]:
    """Layers of sizes that have nothing to do with each other."""
    chance = random.Random(seed)
    units = [chance.randint(1 << 12, 1 << 20) for _ in range(depth)]
    return layers(units, [chance.randint(1, 1 << 22) for _ in units], 4, 8, seed)


SHAPES: dict[str, Callable[[], list[Buffer]]] = {
    f"{make.__name__} {depth}": lambda make=make, depth=depth: make(depth)
    for make in (transformer, pyramid, uneven)
    for depth in (12, 48, 200)
} | {"transformer 540": lambda: transformer(540)}
"""By name and number of layers; the last has some 20,000 buffers."""
