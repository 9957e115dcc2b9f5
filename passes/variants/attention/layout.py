"""Where each element of a tensor comes from, followed through views, transposes and copies.

The layout of a tensor *over* another one gives for every dimension the pairs (size, step) that it
runs through, in positions of the other tensor's elements read in order (not in memory). A step of 0
repeats. So [B, T, H * D] seen as [B * H, T, D] is

    ((B, T * H * D), (H, D)), ((T, H * D),), ((D, 1),)

Two tensors are the same but for copies if they have the same layout over the same third one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.passes.nodes import dtype_of, packet_name, shape_of

Pairs = tuple[tuple[int, int], ...]
Layout = tuple[Pairs, ...]
Seen = tuple[fx.Node, Layout]
"""A node and a layout over it."""

_ATEN = torch.ops.aten


def merged(pairs: Sequence[tuple[int, int]]) -> Pairs:
    """The shortest form: sizes of 1 left out, neighbours that count on put together."""
    found: list[tuple[int, int]] = []
    for size, step in pairs:
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    return tuple(found)


def whole(shape: Sequence[int]) -> Layout:
    """The layout of a tensor over itself."""
    return tuple(merged([(size, prod(shape[d + 1 :]))]) for d, size in enumerate(shape))


def swapped(layout: Layout) -> Layout:
    """The last two dimensions exchanged."""
    return (*layout[:-2], layout[-1], layout[-2])


def viewed(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout in another shape; None where a dimension would be cut unevenly."""
    left = list(merged([pair for pairs in layout for pair in pairs]))
    found: list[Pairs] = []
    for size in reversed(shape):
        taken: list[tuple[int, int]] = []
        while size > 1:
            if not left:
                return None
            length, step = left.pop()
            part = min(size, length)
            if size % part or length % part:
                return None
            taken.insert(0, (part, step))
            size //= part
            if length > part:
                left.append((length // part, step * part))
        found.insert(0, merged(taken))
    return tuple(found) if not left else None


def _view(node: fx.Node, layout: Layout) -> Layout | None:
    shape = shape_of(node)
    return None if shape is None else viewed(layout, shape)


def _permute(node: fx.Node, layout: Layout) -> Layout | None:
    order: Any = node.args[1]
    return tuple(layout[d] for d in order)


def _transpose(node: fx.Node, layout: Layout) -> Layout | None:
    if len(layout) < 2:
        return layout
    one, other = (node.args[1], node.args[2]) if len(node.args) == 3 else (0, -1)
    found = list(layout)
    found[one], found[other] = layout[other], layout[one]  # type: ignore[index]
    return tuple(found)


def _expand(node: fx.Node, layout: Layout) -> Layout | None:
    shape = shape_of(node)
    old = shape_of(node.args[0])  # type: ignore[arg-type]
    assert shape is not None
    assert old is not None
    padded = ((),) * (len(shape) - len(old)) + layout
    sizes = (1,) * (len(shape) - len(old)) + old
    return tuple(
        pairs if size == wanted else ((wanted, 0),)
        for pairs, size, wanted in zip(padded, sizes, shape, strict=True)
    )


def _same(node: fx.Node, layout: Layout) -> Layout | None:
    return layout


_MOVES: dict[str, Callable[[fx.Node, Layout], Layout | None]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), _view),
    **dict.fromkeys(("clone", "alias", "detach", "contiguous"), _same),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "permute": _permute,
    "expand": _expand,
}


def is_move(node: fx.Node) -> bool:
    """Whether a node only moves its one operand, or copies it."""
    if packet_name(node) not in _MOVES or shape_of(node) is None:
        return False
    (given,) = node.all_input_nodes
    return shape_of(given) is not None and dtype_of(node) == dtype_of(given)


def moved(node: fx.Node, layout: Layout) -> Layout | None:
    """The layout of ``node`` if it only moves its operand, of this layout; None otherwise."""
    return _MOVES[packet_name(node)](node, layout) if is_move(node) else None


def seen_from(node: fx.Node) -> list[Seen]:
    """What ``node`` is a look at, or a copy of, with its layout over that: itself first."""
    chain = [node]
    while is_move(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    found: list[Seen] = []
    for length, base in enumerate(chain):
        shape = shape_of(base)
        layout: Layout | None = None if shape is None else whole(shape)
        for step in reversed(chain[:length]):
            layout = None if layout is None else moved(step, layout)
        if layout is None:
            break
        found.append((base, layout))
    return found


def origin(node: fx.Node) -> Seen:
    """The last of `seen_from`: equal for nodes that are equal but for copies."""
    found = seen_from(node)
    return found[-1] if found else (node, ())


# --- from one layout to another --------------------------------------------------------------

Moves = tuple[list[int], list[int], list[int]]
"""A view, the order of a permutation behind it, and the shape that follows."""


def _split(pairs: Pairs, cuts: Sequence[int]) -> list[int] | None:
    """The steps at which the pairs begin once cut, the largest first."""
    steps: list[int] = []
    for size, step in pairs:
        inside = [cut for cut in cuts if step <= cut <= step * size]
        if step == 0 or any(high % low for low, high in pairwise(inside)):
            return None
        steps += reversed(inside[:-1])
    return steps


def moves(given: Layout, wanted: Layout, shape: Sequence[int]) -> Moves | None:
    """How a tensor of layout ``given`` is brought to ``wanted``, of this shape.

    Both are over the same tensor and repeat nothing; None where that is not so.
    """
    pairs = [pair for pairs in (*given, *wanted) for pair in pairs]
    cuts = sorted({cut for size, step in pairs for cut in (step, step * size)})
    sizes = {low: high // low for low, high in pairwise(cuts) if low}
    have = [_split(pairs, cuts) for pairs in given]
    want = [_split(pairs, cuts) for pairs in wanted]
    if None in have or None in want:
        return None
    place = [step for steps in have for step in steps or []]
    order = [step for steps in want for step in steps or []]
    if sorted(place) != sorted(order) or len(set(place)) != len(place):
        return None
    return [sizes[s] for s in place], [place.index(s) for s in order], list(shape)


def moved_freely(tensor: torch.Tensor, how: Moves) -> torch.Tensor | None:
    """The tensor moved without a copy; None where there is no such view."""
    split, order, shape = how
    try:
        return tensor.view(split).permute(order).view(shape)
    except (RuntimeError, ValueError):
        return None
