"""Calls with smaller sizes in their arguments, by the schemas of their operators.

What a schema calls a SymInt is a size; a number may be one. Chunks are made smaller so that there
are still several: how a loop cuts its rows, and what it does with the last of them, is tried too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.configuration import OpOverload
from fxremat.runtime import kernels
from fxremat.runtime.chunks.call import RowsCall, pieces
from fxremat.runtime.chunks.convolutions import CONVOLUTION, CONVOLUTION_BACKWARD
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import (
    Instruction,
    Program,
    dump,
    operator_of,
    overload,
    parse,
    with_values,
)
from fxremat.verify.small_sizes import Sizes

CHUNKS, TILES = 3, 2
"""So many are left of what were more."""


class Misfit(Exception):
    """Smaller sizes that do not agree with each other; the message says where."""


@functools.cache
def _kinds(op: Any) -> Mapping[str, str]:
    """Of each argument of an operator: "size", "number", or neither."""
    text = str(op._schema)
    sizes = set(re.findall(r"SymInt(?:\?|\[\d*\])* (\w+)", text))
    # a number may stand where a tensor is asked for
    numbers = set(re.findall(r"(?:Tensor|Scalar|float)(?:\?|\[\d*\])* (\w+)", text))
    names = [argument.name for argument in op._schema.arguments]
    return {n: "size" if n in sizes else "number" if n in numbers else "" for n in names}


def small_arguments(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes, constants: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other sizes; ``constants``: also in numbers that follow."""
    if not isinstance(op, OpOverload):
        return tuple(args), dict(kwargs)
    kinds = _kinds(op)

    def small(thing: Any, kind: str) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not kind:
                return leaf
            if type(leaf) is int:
                return sizes.of(leaf)
            is_constant = constants and kind == "number" and type(leaf) is float
            return sizes.constant(leaf) if is_constant else leaf

        return pytree.tree_map(one, thing)

    # an operator like rows may be called with fewer arguments than it has, never with more
    made = tuple(small(arg, kind) for arg, kind in zip(args, kinds.values(), strict=False))
    return made, {key: small(arg, kinds[key]) for key, arg in kwargs.items()}


def _fewer(total: int, size: int, small_total: int, most: int) -> int:
    """The size of a piece of ``small_total``, cut like ``total`` in pieces of ``size``."""
    count = len(pieces(total, size))
    if count <= 1:
        return max(small_total, size)
    if small_total < 2:
        raise Misfit("its chunks would be one")
    return ceil(small_total / min(count, most, small_total))


def small_call(
    node: fx.Node, forms: Mapping[fx.Node, Any], sizes: Sizes, constants: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node in smaller sizes; ``forms`` are the small values it reads."""
    args, kwargs = small_arguments(node.target, node.args, node.kwargs, sizes, constants)
    if node.target in (CONVOLUTION, CONVOLUTION_BACKWARD):
        given, images = node.args[0], node.args[-2]
        total, small_total = given.meta["val"].shape[0], forms[given].shape[0]  # type: ignore
        args = (*args[:-2], _fewer(total, images, small_total, CHUNKS), args[-1])  # type: ignore
    elif node.target is ROWS:
        args = _small_rows(node, args, forms, sizes, constants)
    return args, kwargs


def _small_rows(
    node: fx.Node, args: tuple[Any, ...], forms: Mapping[fx.Node, Any], sizes: Sizes,
    constants: bool,
) -> tuple[Any, ...]:  # fmt: skip
    whole: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    given: Any = fx.map_arg((args[0], args[1]), forms.__getitem__)
    call, total = RowsCall(*whole), given[0][0].shape[0]
    program = parse(call.text)
    small = replace(
        program,
        setup=tuple(_small_instruction(one, sizes, constants) for one in program.setup),
        loop=tuple(_small_instruction(one, sizes, constants) for one in program.loop),
    )
    chunk = _fewer(call.total, call.chunk, total, CHUNKS)
    made = RowsCall(args[0], args[1], dump(small), chunk, chunk)
    chunk = pieces(total, chunk)[0][1]
    tile = _fewer(call.chunk, call.tile, chunk, TILES)
    _run_instructions(small, given, chunk)
    return (*args[:2], made.text, chunk, tile, *args[5:])


def _small_instruction(one: Instruction, sizes: Sizes, constants: bool) -> Instruction:
    args, kwargs = small_arguments(operator_of(one.op), one.args, one.kwargs, sizes, constants)
    return replace(one, args=args, kwargs=kwargs, row_shape=sizes.shape(one.row_shape))


def _run_instructions(program: Program, given: Any, rows: int) -> None:
    """Whether all instructions give what they say, for some rows of tensors without memory."""
    tensors = [row[:rows] for row in given[0]] + list(given[1])
    values = dict(enumerate(tensors))
    for number, one in enumerate(program.instructions, program.first):
        args = with_values(one.args, values.__getitem__, rows)
        kwargs = {k: with_values(v, values.__getitem__, rows) for k, v in one.kwargs.items()}
        args, kwargs = on_device((args, kwargs), torch.device("meta"))
        made = values[number] = overload(one.op)(*args, **kwargs)
        shape = (rows, *one.row_shape) if one.kind == "row" else one.row_shape
        if one.kind != "last" and tuple(made.shape) != shape:
            raise Misfit(f"{one.op} in its rows gives {tuple(made.shape)} and not {shape}")


def is_own(node: fx.Node) -> bool:
    """Whether an operator of ours gives forms of its own, such as blocks of a fixed size."""
    if not isinstance(node.target, OpOverload):
        return False
    ours = node.target._schema.name.partition("::")[0] == kernels.NAMESPACE
    return ours and node.target not in (ROWS, CONVOLUTION, CONVOLUTION_BACKWARD)


def dims_of(node: fx.Node) -> list[tuple[int, ...]]:
    """Shapes inside a call of ``rows``, which are sizes as well."""
    if node.target is not ROWS:
        return []
    program = parse(str(node.args[2]))
    return [one.row_shape for one in program.instructions]


def on_device(thing: Any, device: torch.device) -> Any:
    """Arguments with another device in them."""
    return pytree.tree_map(lambda x: device if isinstance(x, torch.device) else x, thing)
