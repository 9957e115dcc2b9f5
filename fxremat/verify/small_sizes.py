"""Smaller sizes for those of a graph: the same number becomes the same number everywhere.

    base 2048 -> 16:   2048 -> 16,  6144 -> 48,  16 x 2048 rows = 32768 -> 16 x 16 = 256

A size is a multiple of a base, or a product of sizes that lie side by side in some shape. Which
of both a number is cannot be seen from it; whoever uses this tries one after the other, and
demands that the calls of the graph agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isclose, prod, sqrt

Shape = tuple[int, ...]

LARGEST = 1 << 48
"""A larger number is no size: the end of a slice that has none."""
LEAST_BASE = 6
TARGETS = (4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128)
"""What a base may become."""
MOST_BASES = 16
MOST_WAYS = 4
"""So many guesses of which dimensions are products."""


_FORMS: tuple[Callable[[int], float], ...] = (
    lambda n: n, lambda n: 1 / n, sqrt, lambda n: 1 / sqrt(n),
    lambda n: 2 / n, lambda n: n - 1, lambda n: 1 / (n - 1), lambda n: n / (n - 1),
)  # fmt: skip
"""What constants are of sizes: scales, means, their derivatives, and variances."""


@dataclass(frozen=True)
class Change:
    """Multiples of ``base`` become the same multiples of ``target``; ``near``: also one beside."""

    base: int
    target: int
    near: bool = False

    def __call__(self, number: int) -> int:
        """The number in place of one."""
        count, rest = divmod(number, self.base)
        if not rest:
            return count * self.target
        if self.near and rest == 1 and count:
            return count * self.target + 1
        return (count + 1) * self.target - 1 if self.near and rest == self.base - 1 else number


@dataclass(frozen=True)
class Sizes:
    """What every number becomes.

    Dimensions from ``products`` on are products of others, where they may be.
    """

    shapes: tuple[Shape, ...]
    changes: tuple[Change, ...]
    products: int = LARGEST

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """All dimensions, in order."""
        return tuple(sorted({n for shape in self.shapes for n in shape if n > 1}))

    @cached_property
    def known(self) -> Mapping[int, int]:
        """What products become."""
        found: dict[int, int] = {}
        unclear, dims = set[int](), set(self.dims)
        for whole, run in _products(self.shapes):
            if whole in dims and whole < self.products:
                continue
            part = prod(found.get(n, self.changed(n)) for n in run)
            if found.setdefault(whole, part) != part:
                unclear.add(whole)
        return {whole: part for whole, part in found.items() if whole not in unclear}

    def changed(self, number: int) -> int:
        """By the bases alone."""
        for change in self.changes:
            number = change(number)
        return number

    def of(self, number: int) -> int:
        """The number in place of one; what is no size stays."""
        if not 1 < number < LARGEST:
            return number
        return self.known.get(number) or self.changed(number)

    def shape(self, shape: Iterable[int]) -> Shape:
        """The sizes of a tensor."""
        return tuple(self.of(n) for n in shape)

    def stride(self, shape: Sequence[int], stride: Sequence[int]) -> Shape:
        """Dense dimensions stay dense, in the same order; gaps are of the same number of rows."""
        order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d], -d))
        found, whole, part = [0] * len(shape), 1, 1
        for d in order:
            if shape[d] == 1 or stride[d] == 0:
                found[d] = self.of(stride[d])
                continue
            times, rest = divmod(stride[d], whole)
            found[d] = self.of(stride[d]) if rest else part * self.of(times)
            whole, part = stride[d] * shape[d], found[d] * self.of(shape[d])
        return tuple(found)

    @property
    def keep_apart(self) -> bool:
        """Whether different dimensions stay different, and none becomes a single one."""
        made = [self.of(n) for n in self.dims]
        return len(set(made)) == len(made) and min(made, default=2) > 1

    def constant(self, number: float) -> float:
        """A number that follows from a size, such as the scale of attention or of a mean."""
        for size, small in self._counts:
            for form in _FORMS:
                if isclose(abs(number), form(size), rel_tol=1e-6):
                    return float(form(small)) if number > 0 else -float(form(small))
        return number

    @cached_property
    def _counts(self) -> list[tuple[int, int]]:
        """Sizes and products that change."""
        sizes = {*self.dims, *self.known}
        return [(n, self.of(n)) for n in sorted(sizes) if self.of(n) != n and n > 1]


@functools.lru_cache(maxsize=16)
def _products(shapes: tuple[Shape, ...]) -> list[tuple[int, Shape]]:
    """Products of dimensions side by side, two or more of a shape, the least first."""
    runs = {
        shape[begin:end]
        for shape in shapes
        for begin in range(len(shape))
        for end in range(begin + 2, len(shape) + 1)
    }
    return sorted((prod(run), run) for run in runs if 0 not in run and sum(n > 1 for n in run) > 1)


def bases(dims: Collection[int]) -> list[int]:
    """What may be a unit of the sizes: they themselves, and what two have in common."""
    large = [n for n in dims if n >= LEAST_BASE]
    common = {gcd(a, b) for a in large for b in large}
    ordered = sorted({n for n in common if n >= LEAST_BASE}, reverse=True)
    return ordered[:MOST_BASES]


def targets(base: int) -> list[int]:
    """What a base may become, in order."""
    parts = {base // k for k in (2, 4, 8, 16, 32, 64, 128, 256) if base % k == 0}
    return sorted(t for t in {*TARGETS, *parts} if 3 <= t <= base // 2)


def changes(sizes: Sizes) -> Iterator[Change]:
    """What may change next in these sizes."""
    now = {sizes.of(n) for n in sizes.dims}
    for base in bases(now):
        beside = any(n % base in (1, base - 1) and n >= base - 1 for n in now)
        for target in targets(base):
            yield Change(base, target)
            if beside:
                yield Change(base, target, near=True)


def with_change(sizes: Sizes, change: Change) -> Iterator[Sizes]:
    """The sizes after a change, for each way to tell products from other dimensions."""
    dims = set(sizes.dims)
    whole = sorted({n for n, _ in _products(sizes.shapes) if n in dims})
    seen: list[list[int]] = []
    for least in (LARGEST, *whole[:MOST_WAYS]):
        found = Sizes(sizes.shapes, (*sizes.changes, change), least)
        made = [found.of(n) for n in found.dims]
        if made not in seen and found.keep_apart:
            seen.append(made)
            yield found
