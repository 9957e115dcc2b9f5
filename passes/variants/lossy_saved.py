"""Values saved for the backward in fewer bits: the forward is as it was, gradients are near.

Every float that the forward makes and the backward reads may be saved in another form, which is
decoded before its first reader. The forms of one value exclude one another. With a value x, a block
B of 128 values around it in memory, and its decoded form x':

| rule       | bytes for 4 | bound on abs(x' - x)                                  | bias |
|------------|-------------|-------------------------------------------------------|------|
| saved_8bit | 1.06        | (max B - min B) / 255                                 | none |
| saved_4bit | 0.56        | (max B - min B) / 15                                  | none |
| saved_fp8  | 1.03        | the larger of abs(x) / 16 and max abs(B) / 448 / 1024 | some |
| saved_bf16 | 2           | abs(x) / 256                                          | some |

plus the rounding of the arithmetic (`fxremat.runtime.quantised`). The first two round
stochastically, so gradients that are linear in the value are unbiased (ActNN, Chen et al. 2021,
arXiv 2104.14129, section 3). A value that the backward compares for equality or divides by is left
alone: the smallest error could turn a gradient into NaN. Encoding is one call; decoding is plain
calls, which Inductor makes part of the reader's loop.

**random_matmul** estimates the gradient of a linear layer's weight, ``X.T @ dY``, from random
combinations of rows (Bershatsky et al. 2022, arXiv 2201.13195, section 2). S X is saved in place of
X, for a matrix S of random signs with fewer rows than X; ``(S X).T @ (S dY)`` is unbiased over S,
with a mean square error of about ``norm(X)**2 * norm(dY)**2 / rows of S``. S is made anew from 8
saved bytes. Sites are products of which nothing else in the backward reads X.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, Role, is_view
from fxremat.passes.nodes import Add, fake, items, packet_of
from fxremat.passes.variants import few_bit
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.passes.variants.saved_values import (
    Saved,
    as_dtype,
    by_memory,
    counting,
    is_float,
    is_large,
    laid_out,
    rule_of_form,
    saved_values,
)
from fxremat.runtime import quantised

_ATEN = torch.ops.aten

ROWS = {"half": 0.5, "fifth": 0.2, "tenth": 0.1}
"""Rows of a sketch, as part of those of X."""


def seed_of(node: fx.Node) -> int:
    """A number for the noise of one value, the same in every run."""
    return crc32(node.name.encode())


# --- forms of one value ------------------------------------------------------------------


def _is_value(node: fx.Node) -> bool:
    return is_large(node) and is_float(node)


_BY_EQUALITY = frozenset({_ATEN.eq, _ATEN.ne, _ATEN.reciprocal, _ATEN.rsqrt, _ATEN.log})
_PASSED_ON = frozenset({_ATEN.neg, _ATEN.abs, _ATEN.mul, torch.ops.prims.convert_element_type})


def is_read_exactly(saved: Saved) -> bool:
    """Whether readers do with a value what the least error may spoil altogether.

    They ask whether it equals another (the backward of a maximum), or divide by it.
    """
    seen: set[fx.Node] = set()
    stack = [(node, user) for node in saved.read for user in node.users if user in saved.readers]
    while stack:
        node, user = stack.pop()
        packet = packet_of(user)
        if packet in _BY_EQUALITY or (packet is _ATEN.div and user.args[1] is node):
            return True
        if (is_view(user) or packet in _PASSED_ON) and user not in seen:
            seen.add(user)
            stack.extend((user, further) for further in user.users)
    return False


def takes_fp8(device: torch.device) -> bool:
    """Whether the device converts to fp8 and back: GPUs do from compute capability 8.9 on."""
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu"


def _column(add: Add, vector: fx.Node) -> fx.Node:
    return add(_ATEN.unsqueeze.default, vector, -1)


def _finished(add: Add, rows: fx.Node, value: fx.Node) -> fx.Node:
    flat = add(_ATEN.reshape.default, rows, [-1])
    return as_dtype(add, laid_out(add, flat, fake(value)), fake(value).dtype)


def _codes_of_4(add: Add, packed: fx.Node) -> fx.Node:
    shifts = add(_ATEN.mul.Tensor, counting(add, 2, torch.uint8, packed), 4)
    both = add(_ATEN.bitwise_right_shift.Tensor, _column(add, packed), shifts)
    codes = add(_ATEN.bitwise_and.Scalar, both, 15)
    return add(_ATEN.reshape.default, codes, [-1, quantised.BLOCK])


def through_blocks(early: Add, add: Add, value: fx.Node, *, width: int) -> fx.Node:
    """The value from codes of ``width`` bits, with a step and a least value for each block."""
    call = early(quantised.quantised, by_memory(early, value), width, seed_of(value))
    codes, scales = items(early, call, 0, 1)
    step, least = (_column(add, add(_ATEN.select.int, scales, 0, row)) for row in (0, 1))
    found = _codes_of_4(add, codes) if width == 4 else codes
    exact = as_dtype(add, found, fake(scales).dtype)
    rows = add(_ATEN.add.Tensor, add(_ATEN.mul.Tensor, exact, step), least)
    return _finished(add, rows, value)


def through_fp8(early: Add, add: Add, value: fx.Node) -> fx.Node:
    codes, scales = items(early, early(quantised.as_fp8, by_memory(early, value)), 0, 1)
    exact = as_dtype(add, codes, fake(scales).dtype)
    return _finished(add, add(_ATEN.mul.Tensor, exact, _column(add, scales)), value)


def through_bf16(early: Add, add: Add, value: fx.Node) -> fx.Node:
    return as_dtype(add, early(quantised.narrowed, value, torch.bfloat16), fake(value).dtype)


_form = partial(
    rule_of_form, accepts=_is_value, fits=lambda saved: not is_read_exactly(saved), lossy=True
)


# --- random matmul -----------------------------------------------------------------------


def _insert_sketches(
    product: fx.Node,
    saved: fx.Node,
    late: fx.Node,
    is_left: bool,
    into: Target,
    *,
    part: float,
) -> StandIns:
    """Sketch the saved matrix early, the other one late, and multiply what is left.

    The product is ``saved.T @ late`` (``is_left``) or ``late @ saved``; ``saved`` is the matrix of
    the forward, with the rows that are summed over first.
    """
    new, matrix, other = map(into, (product, saved, late))
    rows = max(1, round(part * fake(matrix).shape[0]))
    early, add = into.behind(matrix, new), into.before(new)
    small, salt = items(early, early(quantised.sketch, matrix, rows, seed_of(matrix)), 0, 1)
    other = add(quantised.sketch_again, other if is_left else _turned(add, other), rows, salt)
    left, right = (small, other) if is_left else (other, small)
    return {product: add(_ATEN.mm.default, _turned(add, left), right)}


def _turned(add: Add, matrix: fx.Node) -> fx.Node:
    return add(_ATEN.permute.default, matrix, [1, 0])


def _is_turned(node: fx.Node) -> bool:
    order: Any = node.args[1] if node.target is _ATEN.permute.default else ()
    return node.target is _ATEN.t.default or list(order) == [1, 0]


def find_random_matmuls(joint: JointGraph) -> Iterator[Site]:
    """Weight gradients whose saved matrix is read by nothing else in the backward."""
    for saved in saved_values(joint, _is_value):
        product, *others = saved.readers
        read, *more = saved.read
        if others or more or product.target is not _ATEN.mm.default:
            continue
        left, right = (n for n in product.args if isinstance(n, fx.Node))
        is_left = read is left
        if not all(map(is_view, saved.between)) or (is_left and not _is_turned(left)):
            continue
        late, matrix = (right, left.all_input_nodes[0]) if is_left else (left, right)
        if joint.role[late] is Role.BACKWARD and is_large(matrix):
            for form, part in ROWS.items():
                insert = partial(_insert_sketches, product, matrix, late, is_left, part=part)
                yield Site("random_matmul", f"random_matmul:{product.name}:{form}", insert)


RULES: tuple[Rule, ...] = (
    _form("saved_8bit", "values saved in 8 bits, by blocks", partial(through_blocks, width=8)),
    _form(
        "saved_4bit", "values saved in 4 bits, by blocks", partial(through_blocks, width=4),
        by_default=False,  # results/variants_convergence.json: a GPT diverged
    ),
    _form(
        "saved_fp8", "values saved in fp8, scaled by blocks", through_fp8,
        accepts=lambda node: _is_value(node) and takes_fp8(fake(node).device),
    ),
    _form(
        "saved_bf16", "float32 values saved in bfloat16", through_bf16,
        accepts=lambda node: _is_value(node) and fake(node).dtype.itemsize > 2,
    ),
    few_bit.RULE,
    Rule(
        "random_matmul", "weight gradients from random combinations of rows", find_random_matmuls,
        lossy=True,
        by_default=False,  # results/variants_convergence.json: a GPT diverged with a fifth of rows
    ),
)  # fmt: skip
