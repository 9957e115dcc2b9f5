"""The peak of a step as an expression of its sizes: exact, and solved for the size that fits.

The code of a step is the same at every size, and so is the order of what it allocates. At each
point the live bytes are a sum of products of sizes: a polynomial. It is found from a few sizes
and confirmed at others. The peak is the maximum over all points. Written in Bernstein's basis
over a range of sizes, a polynomial lies below another one wherever all its coefficients do
(G. Farin, Curves and Surfaces for CAGD, chapter 5); so few of thousands remain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import cycle, islice, product
from math import comb, prod
from typing import Any

import sympy

from fxremat.compat.sizes import size_ranges, sizes_at
from fxremat.compile.dry_run.dry_run import DryRun, generate_step
from fxremat.compile.pipeline import PLAN, Runner
from fxremat.compile.search.search import SearchResult
from fxremat.core.timeline import Timeline, replay
from fxremat.errors import CannotVary

Sizes = Mapping[str, int]
LiveBytes = Callable[[Sizes], Sequence[int]]
"""Bytes that are live at each point of a step of these sizes."""

DEGREE = 2
"""Of the polynomials, in each size; scores of attention have two dimensions of one size."""
ALIGNED = (1, 8, 64)
"""Sizes of which only multiples may be looked at. Allocators round up what is no multiple: 8
numbers in int64, and 64 in uint8, are the 64 bytes that Inductor rounds up to."""


@dataclass(frozen=True)
class SizeRange:
    """The sizes from ``low`` to ``high``, both among them, that something may have."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class PeakExpression:
    """Peak bytes of a plan at every size in its ranges.

    ``expression`` is a maximum of polynomials in symbols named like the sizes. It is exact where
    each size is a multiple of ``multiple_of``; for others `at` gives the peak of the next multiple.
    """

    expression: sympy.Expr
    ranges: tuple[SizeRange, ...]
    multiple_of: int = 1

    def at(self, sizes: Sizes) -> int:
        """The peak at these sizes. Raises `CannotVary` outside of what was planned for."""
        values = {}
        for one in self.ranges:
            size = sizes[one.name]
            if not one.low <= size <= one.high:
                raise CannotVary(one.name, f"{size} is not from {one.low} to {one.high}")
            values[_symbol(one.name)] = -(-size // self.multiple_of) * self.multiple_of
        return int(self.expression.xreplace(values).doit())

    def largest(self, what: str, budget_bytes: int, others: Sizes | None = None) -> int:
        """The largest size of ``what`` whose peak is within a budget; 0 where none is."""
        one = next(each for each in self.ranges if each.name == what)
        sizes = range(one.low, one.high + 1)

        def peak(size: int) -> int:
            return self.at({**(others or {}), what: size})

        fitting = bisect_right(sizes, budget_bytes, key=peak)
        return sizes[fitting - 1] if fitting else 0

    def __str__(self) -> str:
        sizes = ", ".join(f"{one.low} <= {one.name} <= {one.high}" for one in self.ranges)
        multiple = f", multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.expression} for {sizes}{multiple}" if sizes else str(self.expression)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def peak_expression(live: LiveBytes, ranges: Sequence[SizeRange]) -> PeakExpression:
    """The peak of a step at all sizes in ``ranges``.

    Raises `CannotVary` where the live bytes are no polynomials of the sizes, not even at multiples
    of 64 of them.
    """
    for multiple in ALIGNED:
        axes = [_Axis.of(one, multiple) for one in ranges]
        if all(axis is not None for axis in axes):
            found = _highest(live, [axis for axis in axes if axis is not None])
            if found is not None:
                return PeakExpression(found, tuple(ranges), multiple)
    names = ", ".join(one.name for one in ranges)
    raise CannotVary(names, "the bytes of a step are no polynomial of it")


def expression_of(found: SearchResult, runner: Runner) -> PeakExpression:
    """Allocated bytes at the peak of what was found, with what is held beside the graph.

    The code is generated once more, and counted by dry runs at a few sizes; a plan that is not
    compiled is replayed. Raises `CannotVary` as `peak_expression` does.
    """
    evaluation, costs = found.evaluation, runner.costs
    ranges = size_ranges(evaluation.draft.joint.module.graph)
    symbols = {name: symbol for symbol, (name, _, _) in ranges.items()}
    held = costs.request.budget.held
    generated, draft = None, evaluation.draft
    if costs.request.compiled:
        generated = generate_step(*draft.halves, num_fwd_outputs=draft.num_forward_outputs)

    def live(sizes: Sizes) -> tuple[int, ...]:
        shown: DryRun | Timeline
        with sizes_at({symbols[name]: size for name, size in sizes.items()}):
            if generated is not None:
                shown = generated.dry_run(costs.device.type, costs.workspaces.blocks_of_call)
            else:
                again = runner.run("estimate", PLAN, replace(found.plain, sites=draft.sites))
                shown = replay(again.problem, evaluation.plan.steps)
        return tuple(held + nbytes for nbytes in shown.live_bytes)

    return peak_expression(live, [SizeRange(*one) for one in ranges.values()])


@dataclass(frozen=True)
class _Axis:
    """One size: where it is looked at, and where what was found is confirmed."""

    name: str
    low: int
    high: int
    nodes: tuple[int, ...]
    checks: tuple[int, ...]

    @staticmethod
    def of(one: SizeRange, multiple: int) -> _Axis | None:
        low, high = -(-one.low // multiple), -(-one.high // multiple)
        count = high - low
        if count < 0 or (multiple > 1 and count < DEGREE):
            return None
        nodes = sorted({low + count * k // DEGREE for k in range(DEGREE + 1)})
        rest = {low + count * k // 7 for k in (1, 2, 5)} | {low + 1, high - 1}
        checks = sorted(size for size in rest - set(nodes) if low < size < high)
        return _Axis(
            one.name,
            low * multiple,
            high * multiple,
            tuple(size * multiple for size in nodes),
            tuple(size * multiple for size in checks),
        )

    def basis(self, x: Any) -> list[Any]:
        """Bernstein's polynomials of this degree over the range, at a number or a symbol."""
        n = len(self.nodes) - 1
        t = (x - self.low) * Fraction(1, max(1, self.high - self.low))
        return [comb(n, k) * t**k * (1 - t) ** (n - k) for k in range(n + 1)]

    def from_values(self) -> list[list[Fraction]]:
        """The matrix that turns values at the nodes into coefficients."""
        rows = sympy.Matrix([[sympy.Rational(b) for b in self.basis(x)] for x in self.nodes])
        return [[Fraction(int(one.p), int(one.q)) for one in row] for row in rows.inv().tolist()]


Coefficients = tuple[Fraction, ...]


def _highest(live: LiveBytes, axes: Sequence[_Axis]) -> sympy.Expr | None:
    """The maximum over all points of a step; None where these are no polynomials."""
    names = [axis.name for axis in axes]
    grid = list(product(*(axis.nodes for axis in axes)))
    seen = [tuple(live(dict(zip(names, point, strict=True)))) for point in grid]
    if len({len(one) for one in seen}) != 1:
        return None
    weights = [
        [prod(rows) for rows in product(*columns)]
        for columns in product(*(axis.from_values() for axis in axes))
    ]
    polynomials = dict.fromkeys(
        tuple(Fraction(sum(w * v for w, v in zip(row, values, strict=True))) for row in weights)
        for values in dict.fromkeys(zip(*seen, strict=True))
    )
    confirmed = all(_is_right(live, axes, polynomials, point) for point in _checks(axes))
    return _written(axes, _undominated(polynomials)) if confirmed else None


def _checks(axes: Sequence[_Axis]) -> list[tuple[int, ...]]:
    """Sizes at which nothing was looked at: along the diagonal and along each axis."""
    diagonal = zip(*(cycle(axis.checks or axis.nodes) for axis in axes), strict=True)
    points = list(islice(diagonal, max((len(axis.checks) for axis in axes), default=0)))
    for axis in axes:
        for size in axis.checks[:1]:
            points.append(tuple(size if other is axis else other.high for other in axes))
    return list(dict.fromkeys(points))


def _is_right(
    live: LiveBytes,
    axes: Sequence[_Axis],
    polynomials: Iterable[Coefficients],
    point: tuple[int, ...],
) -> bool:
    """Whether the live bytes at a point are those of the polynomials, all of them."""
    basis = [
        prod(each)
        for each in product(*(axis.basis(x) for axis, x in zip(axes, point, strict=True)))
    ]
    told = {sum(c * b for c, b in zip(one, basis, strict=True)) for one in polynomials}
    names = [axis.name for axis in axes]
    return told == set(live(dict(zip(names, point, strict=True))))


def _undominated(polynomials: Iterable[Coefficients]) -> list[Coefficients]:
    """Those that no other one is above of everywhere in the ranges."""
    kept: list[Coefficients] = []
    for one in sorted(polynomials, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in kept):
            kept.append(one)
    return kept


def _written(axes: Sequence[_Axis], polynomials: Sequence[Coefficients]) -> sympy.Expr:
    bases = [axis.basis(_symbol(axis.name)) for axis in axes]
    terms = [prod(each) for each in product(*bases)]
    sums = [
        sympy.expand(
            sympy.Add(*(sympy.Rational(c.numerator, c.denominator) * term
                        for c, term in zip(one, terms, strict=True)))
        )
        for one in polynomials
    ]  # fmt: skip
    return sympy.Max(*sums, evaluate=False) if len(sums) > 1 else sums[0]
