"""A part of a graph in smaller sizes, to be run where the whole is too large.

Base sizes are chosen one after the other, each so that much of the memory goes; the calls run on
tensors without memory, and what they give must be what the sizes say: shape, strides, dtype. The
first choice that fits is taken, so it is the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.verify.predicates import is_fetch, is_view
from fxremat.verify.site_cuts import Part, tensors
from fxremat.verify.small_calls import Misfit, dims_of, is_own, on_device, small_call
from fxremat.verify.small_sizes import Change, Sizes, changes, with_change

MOST_CHANGES = 5
MOST_CALLS, FEW_CALLS = 12_000, 1_000
"""So many calls on tensors without memory before giving up: a few seconds; and where there are
sizes already that will do, or where the whole may be run."""
ENOUGH_BYTES = 1 << 26
"""Sizes that take no more will do, where none are found that take less."""

CPU, META = torch.device("cpu"), torch.device("meta")
Call = tuple[tuple[Any, ...], dict[str, Any]]
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Smaller:
    """Small forms of the values of a part, and the arguments of its calls for them."""

    sizes: Sizes
    forms: Mapping[fx.Node, Any]
    calls: Mapping[fx.Node, Call]


def shapes_of(part: Part) -> tuple[tuple[int, ...], ...]:
    """All shapes among the values, each once."""
    found = [tuple(t.shape) for n in part.nodes for t in tensors(n.meta.get("val"))]
    inside = [shape for n in part.cut.nodes for shape in dims_of(n)]
    return tuple(dict.fromkeys((*found, *inside)))


def shrunk(
    part: Part, most_bytes: int, start: Sizes | None = None, most_calls: int = MOST_CALLS
) -> Smaller:
    """The part in sizes that take at most so many bytes; ``start`` may be sizes that do.

    Raises `Misfit`, with a reason.
    """
    return _Search(part, most_bytes, most_calls, shapes_of(part)).run(start)


def with_constants(part: Part, smaller: Smaller) -> Smaller | None:
    """The same with other constants where these follow from sizes; None where none does."""
    try:
        found = _Propagation(part, smaller.sizes, constants=True).tried()
    except Misfit:
        return None
    return None if found.calls == smaller.calls else found


@dataclass
class _Search:
    """Looks for sizes: one change after the other, and back where no more of them fits."""

    part: Part
    most_bytes: int
    most_calls: int
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 0
    best: Smaller | None = None
    why: str = "no size in it can become smaller"

    def run(self, start: Sizes | None) -> Smaller:
        found = None
        if start is not None:
            found = self.fitting(Sizes(self.shapes, start.changes, start.products))
            found = found if found and self.nbytes(found.sizes) <= self.most_bytes else None
        found = found or self.smaller(Sizes(self.shapes, ())) or self.best
        if found is None or not self.is_enough(found):
            raise Misfit(self.why if found is None else f"it stays too large; {self.why}")
        return found

    def smaller(self, sizes: Sizes, hopeless: frozenset[int] = frozenset()) -> Smaller | None:
        """With one change more, or several; a base is given up with the first that do not fit."""
        given_up = set(hopeless)
        for base, next_changes in self.ordered(sizes, hopeless):
            for change in next_changes:
                for one in with_change(sizes, change):
                    if self.calls >= self.patience:
                        return None
                    found = self.fitting(one)
                    if found is not None and self.nbytes(one) > self.most_bytes:
                        deep = len(one.changes) >= MOST_CHANGES
                        found = None if deep else self.smaller(one, frozenset(given_up))
                    if found is not None:
                        return found
            given_up.add(base)
        return None

    def ordered(self, sizes: Sizes, hopeless: frozenset[int]) -> list[tuple[int, list[Change]]]:
        """Of every base a few changes; first the bases that make the most of it smaller."""
        now, of_base = self.nbytes(sizes), dict[int, list[tuple[bool, bool, int, Change]]]()
        for change in changes(sizes):
            size = self.nbytes(Sizes(self.shapes, (*sizes.changes, change)))
            if change.base in hopeless or size >= now:
                continue
            is_much = size > self.most_bytes
            price = change.base % change.target != 0, is_much, size if is_much else -size, change
            of_base.setdefault(change.base, []).append(price)
        found = []
        for base, prices in of_base.items():
            prices.sort(key=lambda one: one[:3])
            even = [change for odd, *_, change in prices if not odd]
            others = [change for odd, *_, change in prices if odd]
            # where sides are halved again and again, only small steps fit
            picked = (*even[:1], *others[:1], *even[-1:])
            least = min((one[1], abs(one[2])) for one in prices)
            found.append((least, base, list(dict.fromkeys(picked))))
        return [(base, picked) for _, base, picked in sorted(found, key=lambda one: one[:2])]

    def is_enough(self, found: Smaller) -> bool:
        """Whether it is small, if not as small as it was to be."""
        size, whole = self.nbytes(found.sizes), self.nbytes(Sizes(self.shapes, ()))
        return size <= max(self.most_bytes, min(ENOUGH_BYTES, whole // 4))

    @property
    def patience(self) -> int:
        """So many calls are made; fewer where sizes are known that will do."""
        settled = self.best is not None and self.is_enough(self.best)
        return min(self.most_calls, FEW_CALLS) if settled else self.most_calls

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes of all values in these sizes."""
        return sum(
            count * prod(map(sizes.of, shape)) * itemsize
            for (shape, itemsize), count in self.counted.items()
        )

    @cached_property
    def counted(self) -> Counter[tuple[tuple[int, ...], int]]:
        """How many values there are of each shape."""
        values = [t for n in self.part.nodes if not is_view(n) for t in tensors(n.meta.get("val"))]
        return Counter((tuple(t.shape), t.dtype.itemsize) for t in values)

    def fitting(self, sizes: Sizes) -> Smaller | None:
        trial = _Propagation(self.part, sizes, constants=False)
        try:
            found = trial.tried()
            if self.best is None or self.nbytes(sizes) < self.nbytes(self.best.sizes):
                self.best = found
            return found
        except Misfit as reason:
            self.why = f"no smaller sizes fit it: {reason}"
            return None
        finally:
            self.calls += len(trial.calls)


@dataclass
class _Propagation:
    """Runs a part on tensors without memory; ``free`` have forms that only our operators know."""

    part: Part
    sizes: Sizes
    constants: bool
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)

    def tried(self) -> Smaller:
        """Raises `Misfit` where the sizes do not agree."""
        try:
            return self.run()
        except Misfit:
            raise
        except Exception as refusal:  # an operator refuses arguments that do not agree
            what = str(refusal).partition("\n")[0]
            raise Misfit(f"{type(refusal).__name__}: {what}") from refusal

    def run(self) -> Smaller:
        cut = self.part.cut
        forms = {node: self.empty(node.meta.get("val")) for node in self.part.frontier}
        for node in self.part.computed:
            forms[node] = self.call(node, forms)
        for new, old in cut.reads.items():
            forms[new] = forms[old]
        for node in cut.nodes:
            forms[node] = self.call(node, forms)
        for new, old in cut.stand_ins.items():
            self.demand(new, forms[new], list(map(_form, tensors(forms[old]))))
        return Smaller(self.sizes, forms, self.calls)

    def empty(self, value: Any) -> Any:
        """What a value is in the small sizes, without memory."""

        def small(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape, stride = self.small(leaf)
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=META)

        return pytree.tree_map(small, value)

    def small(self, leaf: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.sizes.shape(leaf.shape), self.sizes.stride(leaf.shape, leaf.stride())

    def call(self, node: fx.Node, forms: Mapping[fx.Node, Any]) -> Any:
        if is_fetch(node):
            return forms[node.all_input_nodes[0]]
        self.calls[node] = small_call(node, forms, self.sizes, self.constants)
        made = called(node, self.calls[node], forms.__getitem__, META)
        if is_own(node) or not self.free.isdisjoint(node.all_input_nodes):
            self.free.add(node)
        else:
            wanted = [(*self.small(t), t.dtype) for t in tensors(node.meta.get("val"))]
            self.demand(node, made, [_reduced(*one) for one in wanted])
        return made

    def demand(self, node: fx.Node, made: Any, wanted: list[Form]) -> None:
        found = list(map(_form, tensors(made)))
        if found != wanted:
            raise Misfit(f"{node.name} gives {found} and not {wanted}")


def called(
    node: fx.Node, call: Call, value: Callable[[fx.Node], Any], device: torch.device = CPU
) -> Any:
    """What a node's operator gives for these arguments."""
    args, kwargs = on_device(fx.map_arg(call, value), device)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _reduced(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Form:
    """Strides where they matter."""
    return shape, tuple(s for s, n in zip(stride, shape, strict=True) if n > 1), dtype


def _form(tensor: torch.Tensor) -> Form:
    return _reduced(tuple(tensor.shape), tensor.stride(), tensor.dtype)
