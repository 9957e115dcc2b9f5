"""Trying a site of a variant on random numbers: old values and stand-ins, computed side by side.

A part of the graph before is cut out that ends in the old values and in all that the stand-ins
read; what it begins with gets random numbers. Values may be functions of each other there (a
softmax and its input), so a difference counts only if it stays when the cut begins further back.
What rounding makes is measured: the old computation is run again with numbers moved by a rounding
error, and what that changes is allowed several times over.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import compat
from fxremat.checking.predicates import is_fetch, is_mutating, is_view

MOST_BYTES = 1 << 29
"""Of all values of a cut together: a larger one is not run."""
STEPS = (2, 8, 32, None)
"""So many calls back from what is compared the cut begins; None: at the inputs of the graph."""
SEEDS = (0, 1)
SLACK = 16
"""Times the change that a rounding error of the inputs makes: what is allowed."""

_right: set[str] = set()
"""Digests of sites that were found right in this process."""


class Unchecked(Exception):
    """No numbers were tried on a site; the message says why."""


class _Inconclusive(Exception):
    """Numbers that say nothing: an operator refused them, or made NaN of them."""


@dataclass(frozen=True)
class SiteCut:
    """What computes the stand-ins of one site.

    ``nodes`` are of the graph after, in its order; ``reads`` are nodes there that they read, with
    the node of the graph before that has the same value.
    """

    before: fx.Graph
    stand_ins: Mapping[fx.Node, fx.Node]
    nodes: Sequence[fx.Node]
    reads: Mapping[fx.Node, fx.Node]

    @property
    def wanted(self) -> set[fx.Node]:
        """Nodes of the graph before whose values are compared or read."""
        return {*self.stand_ins.values(), *self.reads.values()}


def _reach(start: Iterable[fx.Node], next_: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, stack = set[fx.Node](), list(start)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack.extend(next_(node))
    return found


def _inputs(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _computed(cut: SiteCut, steps: int | None) -> list[fx.Node]:
    """The nodes of the graph before that are run: between what is wanted, and some before it."""
    above = _reach(cut.wanted, _inputs)
    if steps is None:
        chosen = above
    else:
        chosen = above & _reach(cut.reads.values(), lambda n: n.users)
        chosen |= cut.wanted
        edge = set(chosen)
        for _ in range(steps):
            edge = {i for n in edge for i in n.all_input_nodes} - chosen
            chosen |= edge
    chosen = _whole(chosen)
    return [n for n in cut.before.nodes if n in chosen and _runs(n)]


def _whole(chosen: set[fx.Node]) -> set[fx.Node]:
    """With the calls whose items or views are among them: those are no random numbers."""
    found, stack = set(chosen), list(chosen)
    while stack:
        node = stack.pop()
        if node.target is operator.getitem or is_view(node):
            for source in node.all_input_nodes:
                if source not in found:
                    found.add(source)
                    stack.append(source)
    return found


def _runs(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_mutating(node)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _bytes(nodes: Iterable[fx.Node]) -> int:
    total = 0
    for node in nodes:
        for one in _tensors(node) if not is_view(node) else ():
            if not all(type(n) is int for n in (*one.shape, *one.stride())):
                raise Unchecked("it has sizes that are not known")
            total += one.numel() * one.dtype.itemsize
    return total


def _frontier(cut: SiteCut, computed: Sequence[fx.Node]) -> list[fx.Node]:
    runs = set(computed)
    read = {i for n in computed for i in n.all_input_nodes} | cut.wanted
    return [n for n in cut.before.nodes if n in read and n not in runs]


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


def _given(nodes: Iterable[fx.Node], seed: int) -> dict[fx.Node, Any]:
    generator = torch.Generator().manual_seed(seed)

    def fill(leaf: Any) -> Any:
        return _like(leaf, generator) if isinstance(leaf, torch.Tensor) else leaf

    return {n: pytree.tree_map(fill, n.meta.get("val")) for n in nodes}


def _moved(values: Mapping[fx.Node, Any], eps: float) -> dict[fx.Node, Any]:
    """The same numbers, each off by about a rounding error."""
    generator = torch.Generator().manual_seed(99)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
            return leaf
        noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * eps
        return _laid_out((leaf.double() * (1 + noise)).to(leaf.dtype), leaf)

    return {node: pytree.tree_map(move, value) for node, value in values.items()}


def _run(nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Run calls on real tensors of the CPU; random operators draw the same in every run."""
    torch.manual_seed(0)
    for node in nodes:
        if is_fetch(node):
            values[node] = values[node.all_input_nodes[0]]
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _eps(nodes: Iterable[fx.Node]) -> float:
    """The coarsest rounding among the values."""
    floats = [t.dtype for n in nodes for t in _tensors(n) if t.dtype.is_floating_point]
    return max((torch.finfo(d).eps for d in floats if d.itemsize > 1), default=0.0)


def _norm(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _difference(cut: SiteCut, computed: Sequence[fx.Node], error: float | None, seed: int) -> str:
    """What differs on the numbers of one seed; empty where nothing does."""
    given = _given(_frontier(cut, computed), seed)
    values, again = dict(given), _moved(given, _eps((*computed, *given)))
    try:
        _run(computed, values)
        _run(computed, again)
        made = {new: values[old] for new, old in cut.reads.items()}
        _run(cut.nodes, made)
    except Exception as refusal:  # any operator may refuse numbers that are not from the model
        raise _Inconclusive(f"{type(refusal).__name__}: {refusal}") from refusal
    # what a lossy form rounds is in the error it may make
    eps = _eps((*computed, *given, *(cut.nodes if error is None else ())))
    for new, old in cut.stand_ins.items():
        one, other, near = values[old], made[new], again[old]
        if not isinstance(one, torch.Tensor):
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{new.name} has another size or dtype than {old.name} when it runs"
        if not (one.isfinite().all() and near.isfinite().all()):
            raise _Inconclusive("numbers that are not finite")
        allowed = SLACK * (_norm(near.double() - one.double()) + eps * _norm(one))
        if one.dtype.is_floating_point and error is not None:
            allowed += error * _norm(one)
        off = _norm(other.double() - one.double())
        if not off <= allowed:
            return (
                f"on random numbers {new.name} is off from {old.name} by {off:.3g} in norm, "
                f"where {allowed:.3g} is allowed"
            )
    return ""


def spot_check(cut: SiteCut, error: float | None) -> str | None:
    """What differs, None where nothing does; `error` is allowed beside rounding.

    Raises `Unchecked`, with the reason, where no numbers could be tried.
    """
    key = digest(cut)
    if key in _right:
        return None
    with compat.apart(), compat.random_state_kept(), torch.no_grad():
        wrong = _first_verdict(cut, error)
    if wrong is None:
        _right.add(key)
    return wrong


def _first_verdict(cut: SiteCut, error: float | None) -> str | None:
    wrong, why = "", "it is too large to be run"
    for steps in STEPS:
        computed = _computed(cut, steps)
        if _bytes((*computed, *_frontier(cut, computed), *cut.nodes)) > MOST_BYTES:
            break
        try:
            found = [_difference(cut, computed, error, seed) for seed in SEEDS]
        except _Inconclusive as reason:
            why = str(reason).partition("\n")[0]
            continue
        if not all(found):
            return None
        wrong, why = found[0], "a difference was seen, but not from far enough back"
        if steps is None or steps >= STEPS[-2]:
            return wrong
    raise Unchecked(why)


def digest(cut: SiteCut) -> str:
    """The same for sites that compute the same on values of the same form."""
    known: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        return f"%{known.setdefault(node, len(known))}"

    def form(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)}{value.stride()}{value.dtype}"
        return type(value).__name__

    lines = []
    near = _computed(cut, STEPS[0])
    frontier = _frontier(cut, near)
    for node in (*frontier, *near):
        what = (
            "" if node in frontier else f"{node.target}{fx.map_arg((node.args, node.kwargs), name)}"
        )
        lines.append(f"{name(node)} {what} {pytree.tree_map(form, node.meta.get('val'))}")
    for new, old in cut.reads.items():
        lines.append(f"{name(new)} is {name(old)}")
    for node in cut.nodes:
        what = f"{node.target}{fx.map_arg((node.args, node.kwargs), name)}"
        lines.append(f"{name(node)} {what}")
    for new, old in cut.stand_ins.items():
        lines.append(f"{name(new)} for {name(old)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
