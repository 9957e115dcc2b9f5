"""Trying a site of a variant on random numbers: old values and stand-ins, computed side by side.

A part of the graph before is cut out that ends in the old values and in all that the stand-ins
read; what it begins with gets random numbers. Values may be functions of each other there (a
softmax and its input), so a difference counts only if it stays when the cut begins further back.
What rounding makes is measured: the old computation is run again with numbers moved by a rounding
error, and what that changes is allowed several times over.

A part that is large runs in smaller sizes (see `shrinking`). Where small numbers differ, the part
runs as it is, if it may be so large: sizes may be in constants in a way that nobody foresaw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.inductor.kernels import apart
from fxremat.compat.measuring import random_state_kept
from fxremat.runtime.chunks.program import Number
from fxremat.verify.ignored_rows import ignored_numbers, with_number
from fxremat.verify.predicates import is_fetch, is_view
from fxremat.verify.shrinking import (
    FEW_CALLS,
    MOST_CALLS,
    Smaller,
    called,
    shrunk,
    with_constants,
)
from fxremat.verify.site_cuts import Part, SiteCut, digest, tensors
from fxremat.verify.small_calls import Misfit
from fxremat.verify.small_sizes import Sizes

WHOLE_BYTES = 1 << 25
"""Of all values of a part together: it is run as it is."""
SMALL_BYTES = 1 << 22
"""A larger part is made as small as that, if it can be."""
MOST_BYTES = 1 << 29
"""So large a part is run as it is where smaller sizes do not fit it, or seem to differ."""
STEPS = (2, 8, 32, None)
"""So many calls back from what is compared a part begins; None: at the inputs of the graph."""
SEEDS = (0, 1)
SLACK = 16
"""Times the change that a rounding error of the inputs makes: what is allowed."""

_right: dict[str, Verdict] = {}
"""Of sites that were found right in this process, by their digests."""
_unchecked: dict[str, str] = {}
"""Why no numbers could be tried on sites: layers that are alike are not looked at again."""


class Unchecked(Exception):
    """No numbers were tried on a site; the message says why."""


class _Inconclusive(Exception):
    """Numbers that say nothing: an operator refused them, or made NaN of them."""


@dataclass(frozen=True)
class Verdict:
    """What differs, empty where nothing does; and whether smaller sizes were enough to tell."""

    wrong: str
    small: bool = False


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    total = 0
    for node in nodes:
        for one in tensors(node.meta.get("val")) if not is_view(node) else ():
            if not all(type(n) is int for n in (*one.shape, *one.stride())):
                raise Unchecked("it has sizes that are not known")
            total += one.numel() * one.dtype.itemsize
    return total


def _like(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in the form of a fake tensor."""
    if not fake.dtype.is_floating_point:
        data = torch.randint(0, 2, fake.shape, generator=generator)
    else:
        data = torch.randn(fake.shape, generator=generator, dtype=torch.float64)
    return _laid_out(data.to(fake.dtype), fake)


def _laid_out(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The numbers in the sizes and strides of a tensor; where elements share memory, the last."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    index = torch.arange(made.untyped_storage().nbytes() // made.element_size())
    places = index.as_strided(made.shape, made.stride()).reshape(-1)
    flat = torch.zeros(index.numel(), dtype=made.dtype)
    flat[places] = data.reshape(-1)
    return flat.as_strided(made.shape, made.stride())


def _given(
    forms: Mapping[fx.Node, Any], numbers: Mapping[fx.Node, Number], seed: int
) -> dict[fx.Node, Any]:
    generator = torch.Generator().manual_seed(seed)

    def fill(leaf: Any) -> Any:
        return _like(leaf, generator) if isinstance(leaf, torch.Tensor) else leaf

    made = {node: pytree.tree_map(fill, form) for node, form in forms.items()}
    return made | {
        node: _laid_out(with_number(made[node], number, generator), made[node])
        for node, number in numbers.items()
    }


def _moved(values: Mapping[fx.Node, Any], eps: float) -> dict[fx.Node, Any]:
    """The same numbers, each off by about a rounding error."""
    generator = torch.Generator().manual_seed(99)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
            return leaf
        noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * eps
        return _laid_out((leaf.double() * (1 + noise)).to(leaf.dtype), leaf)

    return {node: pytree.tree_map(move, value) for node, value in values.items()}


def _run(nodes: Iterable[fx.Node], values: dict[fx.Node, Any], smaller: Smaller | None) -> None:
    """Run calls on real tensors of the CPU; random operators draw the same in every run."""
    torch.manual_seed(0)
    for node in nodes:
        if is_fetch(node):
            values[node] = values[node.all_input_nodes[0]]
            continue
        call = (node.args, dict(node.kwargs)) if smaller is None else smaller.calls[node]
        values[node] = called(node, call, values.__getitem__)


def _eps(nodes: Iterable[fx.Node]) -> float:
    """The coarsest rounding among the values."""
    dtypes = {t.dtype for n in nodes for t in tensors(n.meta.get("val"))}
    floats = [d for d in dtypes if d.is_floating_point and d.itemsize > 1]
    return max((torch.finfo(d).eps for d in floats), default=0.0)


def _norm(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _difference(
    part: Part, smaller: Smaller | None, error: float | None, numbers: Mapping[fx.Node, Number],
    seed: int,
) -> str:  # fmt: skip
    """What differs on the numbers of one seed; empty where nothing does.

    ``numbers`` are in half of the elements of some values.
    """
    cut = part.cut
    forms = {n: n.meta.get("val") if smaller is None else smaller.forms[n] for n in part.frontier}
    known = (*part.computed, *part.frontier)
    given = _given(forms, numbers, seed)
    values, again = dict(given), _moved(given, _eps(known))
    try:
        _run(part.computed, values, smaller)
        _run(part.computed, again, smaller)
        made = {new: values[old] for new, old in cut.reads.items()}
        _run(cut.nodes, made, smaller)
    except Exception as refusal:  # any operator may refuse numbers that are not from the model
        raise _Inconclusive(f"{type(refusal).__name__}: {refusal}") from refusal
    # what a lossy form rounds is in the error it may make
    eps = _eps((*known, *(cut.nodes if error is None else ())))
    for new, old in cut.stand_ins.items():
        if isinstance(values[old], torch.Tensor):
            names = new.name, old.name
            found = _compared(names, values[old], made[new], again[old], eps, error)
            if found:
                return found
    return ""


def _compared(
    names: tuple[str, str], one: torch.Tensor, other: torch.Tensor, near: torch.Tensor,
    eps: float, error: float | None,
) -> str:  # fmt: skip
    new, old = names
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{new} has another size or dtype than {old} when it runs"
    if not (one.isfinite().all() and near.isfinite().all()):
        raise _Inconclusive("numbers that are not finite")
    allowed = SLACK * (_norm(near.double() - one.double()) + eps * _norm(one))
    if one.dtype.is_floating_point and error is not None:
        allowed += error * _norm(one)
    off = _norm(other.double() - one.double())
    if off <= allowed:
        return ""
    return (
        f"on random numbers {new} is off from {old} by {off:.3g} in norm, "
        f"where {allowed:.3g} is allowed"
    )


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Parts are small: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def spot_check(cut: SiteCut, error: float | None) -> Verdict:
    """What differs; `error` is allowed beside rounding.

    Raises `Unchecked`, with the reason, where no numbers could be tried.
    """
    key = digest(cut)
    if key in _right:
        return _right[key]
    if key in _unchecked:
        raise Unchecked(_unchecked[key])
    with apart(), random_state_kept(), _on_one_thread():
        try:
            verdict = _Trial(cut, error).verdict()
        except Unchecked as reason:
            _unchecked[key] = str(reason)
            raise
    if not verdict.wrong:
        _right[key] = verdict
    return verdict


@dataclass
class _Trial:
    """A site on its way through the parts; ``sizes`` are those that fitted the part before."""

    cut: SiteCut
    error: float | None
    sizes: Sizes | None = None

    def verdict(self) -> Verdict:
        wrong, why = Verdict(""), "it is too large to be run"
        for steps in STEPS:
            try:
                wrong = self.of_part(Part.of(self.cut, steps))
            except Misfit as reason:
                why = f"it is too large to be run, and {reason}"
                break
            except _Inconclusive as reason:
                why = str(reason).partition("\n")[0]
                continue
            if not wrong.wrong:
                return wrong
            why = "a difference was seen, but not from far enough back"
            if steps is None or steps >= (STEPS[-2] or 0):
                return wrong
        raise Unchecked(why)

    def of_part(self, part: Part) -> Verdict:
        """In smaller sizes where the part is large, and as it is where these do not tell."""
        nbytes = _nbytes(part.nodes)
        if nbytes <= WHOLE_BYTES:
            return Verdict(self.wrong(part, None))
        try:
            found = self.in_small(part, FEW_CALLS if nbytes <= MOST_BYTES else MOST_CALLS)
        except (Misfit, _Inconclusive):
            if nbytes > MOST_BYTES:
                raise
            return Verdict(self.wrong(part, None))
        if found.wrong and nbytes <= MOST_BYTES:
            return Verdict(self.wrong(part, None))
        return found

    def in_small(self, part: Part, most_calls: int) -> Verdict:
        """With constants as they are, and where that differs, as they would be for the sizes."""
        smaller = shrunk(part, SMALL_BYTES, self.sizes, most_calls)
        self.sizes = smaller.sizes
        wrong = self.wrong(part, smaller)
        if wrong and (other := with_constants(part, smaller)) is not None:
            wrong = self.wrong(part, other) and wrong
        return Verdict(wrong, small=True)

    def wrong(self, part: Part, smaller: Smaller | None) -> str:
        """What differs, whatever the numbers; with rows that are left out, if there may be such."""
        numbers = ignored_numbers(part)
        try:
            return self.on_seeds(part, smaller, numbers)
        except _Inconclusive:
            if not numbers:
                raise
            return self.on_seeds(part, smaller, {})  # tokens may be labels, too, and are places

    def on_seeds(
        self, part: Part, smaller: Smaller | None, numbers: Mapping[fx.Node, Number]
    ) -> str:
        found = [_difference(part, smaller, self.error, numbers, seed) for seed in SEEDS]
        return found[0] if all(found) else ""
