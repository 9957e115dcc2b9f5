"""Which operators work row by row, and how each is called on a few rows.

A tensor *has N rows* if some leading dimensions of it multiply to N. Its ``row_shape`` is the shape
behind these dimensions. On c rows it is [c, *row_shape]. Row numbers are positions in the flattened
leading dimensions, so a reshape that keeps all rows in front keeps every row where it is.

`calls_of` gives, for one node and one kind of value (`fxremat.runtime.chunks.program`), what it
needs of its operands and its calls. It is None if the operator could mix rows, or is not known.
The kinds, and why a chunk of the result follows from chunks of the operands:

* row: elementwise with broadcasting, where an operand has the very rows of the result or none;
  reductions, gathers and scatters within a row; mm and bmm of rows with what is the same for
  all rows, or with the same rows;
* last: a matrix [K, N] that is the transpose of [N, K];
* sum: a matmul or a sum that contracts exactly over the rows.

Where rows are images, a convolution and the gradient of its input are rows. Gradients of weight and
bias are sums, and so are mean and variance over all images.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.passes.nodes import (
    Shape,
    arguments_of,
    dtype_of,
    first_operand,
    known_shape,
    packet_name,
    shape_of,
)
from fxremat.passes.variants.convolutions import of_input
from fxremat.runtime.chunks.buffers import CONVOLUTION, GRADIENT_OF_WEIGHT, accumulates_in
from fxremat.runtime.chunks.program import Instruction, Kind, RowCount

VIEWS = frozenset(
    {
        "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "permute", "t",
        "transpose", "slice", "select", "expand",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """An operand of one kind; ``row_shape`` is that of one row, or the shape of the whole."""

    node: fx.Node
    kind: Kind
    row_shape: Shape


@dataclass(frozen=True)
class Result:
    """The result of an earlier call of the same node."""

    position: int


Calls = tuple[Instruction, ...]
"""Instructions to be: their arguments hold `Operand` and `Result` in place of references."""


def operands(calls: Calls) -> Iterator[Operand]:
    for call in calls:
        yield from call.of_type(Operand)


def row_cut(shape: Shape, rows: int) -> int | None:
    """How many leading dimensions are the rows; None if their product is never ``rows``."""
    products = list(accumulate(shape, operator.mul))
    return products.index(rows) + 1 if rows in products else None


def row_shape_of(node: fx.Node, rows: int) -> Shape | None:
    """The shape behind the rows; None for what does not have so many rows."""
    shape = shape_of(node)
    if shape is None:
        return None
    cut = row_cut(shape, rows)
    return None if cut is None else shape[cut:]


class _MixesRows(Exception):
    """The operator could mix rows, or reads what it may not."""


def _demand(fits: bool) -> None:
    if not fits:
        raise _MixesRows


def calls_of(node: fx.Node, kind: Kind, rows: int) -> Calls | None:
    """The calls that compute ``node`` as ``kind``, a few of ``rows`` rows at a time."""
    name = _name(node)
    try:
        if kind != "row":
            return _OTHERS[kind, name](node, rows) if (kind, name) in _OTHERS else None
        rule = _ROWS.get(name, _elementwise if _is_elementwise(node) else None)
        cut = row_cut(_shape(node), rows)
        return None if rule is None or cut is None else rule(node, cut)
    except _MixesRows:
        return None


def _name(node: fx.Node) -> str:
    """The operator; of one of several results with its place, as ``var_mean#0``."""
    if node.target is operator.getitem:
        return f"{packet_name(first_operand(node))}#{node.args[1]}"
    return packet_name(node)


def _is_elementwise(node: fx.Node) -> bool:
    known = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return known or packet_name(node) in ("convert_element_type", "clone", "where")


# --- operands ------------------------------------------------------------------------------


def _shape(node: Any) -> Shape:
    shape = shape_of(node) if isinstance(node, fx.Node) else None
    if shape is None:
        raise _MixesRows
    return shape


def _aligned(node: fx.Node, shape: Shape, cut: int) -> Operand:
    """An operand that broadcasts to ``shape``, whose first ``cut`` dimensions are the rows."""
    own = _shape(node)
    _demand(len(own) <= len(shape))
    padded = (1,) * (len(shape) - len(own)) + own
    front, row_shape = padded[:cut], padded[cut:]
    if front == shape[:cut]:
        return Operand(node, "row", row_shape)
    _demand(all(size == 1 for size in front))
    return Operand(node, "whole", own if len(own) <= len(row_shape) else row_shape)


def _same_rows(node: Any, shape: Shape, cut: int) -> Operand:
    """An operand with the leading dimensions of the result."""
    own = _shape(node)
    _demand(own[:cut] == shape[:cut])
    return Operand(node, "row", own[cut:])


def _images(node: Any, rows: int) -> Operand:
    return _same_rows(node, (rows,), 1)


def _whole(node: Any) -> Operand:
    return Operand(node, "whole", _shape(node))


def _row(node: fx.Node, cut: int, op: str, *args: Any, **kwargs: Any) -> Instruction:
    return Instruction(op, args, kwargs, "row", known_shape(node)[cut:], dtype_of(node))


def _cast(given: Operand, dtype: torch.dtype) -> Instruction:
    op = "prims.convert_element_type.default"
    return Instruction(op, (given, dtype), {}, given.kind, given.row_shape, dtype)


# --- calls that follow from their arguments ------------------------------------------------

RowRule = Callable[[fx.Node, int], Calls]
Read = Callable[[Any, fx.Node, int], Any]
"""It gives what stands in the call for an argument of a node."""


def _rows(given: Any, node: fx.Node, cut: int) -> Any:
    """One or several operands with the rows of the result, or a number."""
    if isinstance(given, (list, tuple)):
        _demand(all(dtype_of(one) == dtype_of(node) for one in given))
        return [_rows(one, node, cut) for one in given]
    return _same_rows(given, known_shape(node), cut) if isinstance(given, fx.Node) else given


def _broadcast(given: Any, node: fx.Node, cut: int) -> Operand:
    return _aligned(given, known_shape(node), cut)


def _same_for_all(given: Any, node: fx.Node, cut: int) -> Operand | None:
    return None if given is None else _whole(given)


def _dims(given: Any, node: fx.Node, cut: int) -> int | list[int]:
    """Dimensions of an operand as those of [c, *row_shape]; none may be of the rows."""
    rank = len(_shape(node.all_input_nodes[0]))
    listed = [given] if isinstance(given, int) else list(given or [])
    found = [d % rank - cut + 1 for d in listed]
    _demand(bool(found) and min(found) > 0)
    return found[0] if isinstance(given, int) else found


def _number(given: Any, node: fx.Node, cut: int) -> Any:
    _demand(not isinstance(given, fx.Node))
    return given


def _pads(given: Any, node: fx.Node, cut: int) -> list[int]:
    _demand(len(given) // 2 <= len(known_shape(node)) - cut)
    return list(given)


def _same_call(*reads: Read, one_dim: bool = False) -> RowRule:
    """The same operator, its first arguments read so; the others say nothing more of a row.

    With ``one_dim`` the rows have to be one dimension.
    """

    def calls(node: fx.Node, cut: int) -> Calls:
        named = arguments_of(node)
        _demand(len(named) >= len(reads) and "reduce" not in named and (cut == 1 or not one_dim))
        args = [read(given, node, cut) for read, given in zip(reads, named.values(), strict=False)]
        scales = {k: named[k] for k in ("beta", "alpha") if named.get(k, 1) != 1}
        return (_row(node, cut, str(node.target), *args, **scales),)

    return calls


_reduce = _same_call(_rows, _dims, _number)


def _total(node: fx.Node, cut: int) -> Calls:
    """A sum or a mean: in the type of the result."""
    (call,) = _reduce(node, cut)
    given, *rest = call.args
    if dtype_of(given.node) == dtype_of(node):
        return (call,)
    return _cast(given, dtype_of(node)), replace(call, args=(Result(0), *rest))


# --- one row in, one row out ---------------------------------------------------------------


_COMPARING = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan",
        "isinf", "where", "convert_element_type", "clone",
    }
)  # fmt: skip
# The same functions in a form that writes into given memory.
_WRITTEN_INSTEAD = {
    "aten.relu.default": "aten.clamp_min.default",
    **{f"aten.{name}.Scalar": f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")},
}


def _common_type(node: fx.Node, given: Sequence[fx.Node]) -> torch.dtype:
    """The type that operands are brought to before the operator sees them."""
    if packet_name(node) not in _COMPARING:
        return dtype_of(node)
    types = [dtype_of(n) for n in given if n.meta["val"].dim()] or [dtype_of(given[0])]
    return reduce(torch.promote_types, types)


def _elementwise(node: fx.Node, cut: int) -> Calls:
    """Operands of another type are cast in an instruction of their own, which has its memory."""
    shape, name, named = known_shape(node), packet_name(node), arguments_of(node)
    given = {key: v for key, v in named.items() if isinstance(v, fx.Node)}
    values = [v for key, v in given.items() if key != "condition"]
    _demand(bool(given) and not any(isinstance(v, (list, tuple)) for v in named.values()))
    replaced: dict[fx.Node, Any] = {n: _aligned(n, shape, cut) for n in given.values()}
    calls: list[Instruction] = []
    if values and name not in ("convert_element_type", "clone"):
        common = _common_type(node, values)
        for one in dict.fromkeys(values):
            if dtype_of(one) != common and one.meta["val"].dim():
                _demand(replaced[one].kind == "row")  # every instruction of the loop has rows
                calls.append(_cast(replaced[one], common))
                replaced[one] = Result(len(calls) - 1)
    args, kwargs = fx.map_arg((node.args, node.kwargs), replaced.__getitem__)
    if name == "clone":
        args, kwargs = args[:1], {}
    op = _WRITTEN_INSTEAD.get(str(node.target), str(node.target))
    calls.append(_row(node, cut, op, *args, *([0] if name == "relu" else []), **kwargs))
    return tuple(calls)


def _reshape(node: fx.Node, cut: int) -> Calls:
    source, shape = first_operand(node), known_shape(node)
    _demand(row_shape_of(source, prod(shape[:cut])) is not None)
    given = Operand(source, "row", shape[cut:])
    return (_row(node, cut, "aten.view.default", given, [RowCount(), *shape[cut:]]),)


def _expand(node: fx.Node, cut: int) -> Calls:
    shape = known_shape(node)
    given = _aligned(first_operand(node), shape, cut)
    return (_row(node, cut, "aten.expand.default", given, [RowCount(), *shape[cut:]]),)


def _order(node: fx.Node) -> list[int]:
    named = arguments_of(node)
    rank = named["self"].meta["val"].dim()
    if "dims" in named:
        return [d % rank for d in named["dims"]]
    order = list(range(rank))
    one, other = (named["dim0"] % rank, named["dim1"] % rank) if "dim0" in named else (0, rank - 1)
    order[one], order[other] = order[other], order[one]
    return order


def _permute(node: fx.Node, cut: int) -> Calls:
    source, order = first_operand(node), _order(node)
    shape = _shape(source)
    _demand(row_cut(shape, prod(known_shape(node)[:cut])) == cut)
    _demand(order[:cut] == list(range(cut)))
    behind = [d - cut + 1 for d in order[cut:]]
    read = Operand(source, "row", shape[cut:])
    return (_row(node, cut, "aten.permute.default", read, [0, *behind]),)


def _transposed(node: fx.Node, rows: int) -> Calls:
    """[N, K] seen as [K, N]."""
    read = _images(first_operand(node), rows)
    _demand(len(read.row_shape) == 1 and _order(node) == [1, 0])
    args = (read, [1, 0])
    return (Instruction("aten.permute.default", args, {}, "last", read.row_shape, dtype_of(node)),)


def _full(node: fx.Node, cut: int) -> Calls:
    value = arguments_of(node)["fill_value"]
    _demand(not isinstance(value, fx.Node))
    size = [RowCount(), *known_shape(node)[cut:]]
    kwargs = {"dtype": dtype_of(node), "device": node.meta["val"].device}
    return (_row(node, cut, "aten.full.default", size, value, **kwargs),)


# --- sums over rows --------------------------------------------------------------------------


def _sum_of_products(node: fx.Node, rows: int) -> Calls:
    named, shape = arguments_of(node), known_shape(node)
    (_, inner), (rows_of_right, width) = _shape(named["self"]), _shape(named["mat2"])
    _demand(len(named) == 2 and inner == rows == rows_of_right)
    args = (Operand(named["self"], "last", shape[:1]), Operand(named["mat2"], "row", (width,)))
    return (Instruction("aten.mm.default", args, {}, "sum", shape, dtype_of(node)),)


def _sum_over_rows(node: fx.Node, rows: int) -> Calls:
    """A sum over all row dimensions, and perhaps some of the rest, which is added up before."""
    named = arguments_of(node)
    own = _shape(named["self"])
    cut = row_cut(own, rows)
    if cut is None:
        raise _MixesRows
    dims = {d % len(own) for d in named.get("dim") or range(len(own))}
    _demand(dims >= set(range(cut)))
    behind = [d - cut + 1 for d in sorted(dims) if d >= cut]
    return _added_up(Operand(named["self"], "row", own[cut:]), behind, node)


def _added_up(read: Operand, behind: list[int], node: fx.Node) -> Calls:
    """What ``node`` is: a sum along dimensions of [c, *row_shape] and then over the rows."""
    dtype = dtype_of(node)
    wide, row_shape = accumulates_in(dtype), read.row_shape
    given: Any = read
    calls: list[Instruction] = []
    if dtype_of(read.node) != wide:
        calls, given = [_cast(read, wide)], Result(0)
    if behind:
        row_shape = tuple(size for d, size in enumerate(row_shape, 1) if d not in behind)
        calls.append(
            Instruction("aten.sum.dim_IntList", (given, behind), {}, "row", row_shape, wide)
        )
        given = Result(len(calls) - 1)
    _demand(prod(row_shape) == prod(_shape(node)))
    calls.append(Instruction("aten.sum.dim_IntList", (given, [0]), {}, "sum", row_shape, dtype))
    return tuple(calls)


# --- convolutions and normalisation: rows are images -------------------------------------------


def _gradient_of_input(item: fx.Node, cut: int) -> Calls:
    call = first_operand(item)
    gradient, _, weight = call.args[:3]
    read = _same_rows(gradient, _shape(item), cut)
    return (_row(item, cut, CONVOLUTION, read, _whole(weight), None, *of_input(call)),)


def _gradient_of_weight(item: fx.Node, rows: int) -> Calls:
    gradient, given, weight, _, *how, _ = first_operand(item).args
    pair = [_images(n, rows) for n in (gradient, given)]
    args = (*pair, _whole(weight), None, *how, [False, True, False])
    return (Instruction(GRADIENT_OF_WEIGHT, args, {}, "sum", _shape(item), dtype_of(item)),)


def _gradient_of_bias(item: fx.Node, rows: int) -> Calls:
    read = _images(first_operand(item).args[0], rows)
    return _added_up(read, list(range(2, len(read.row_shape) + 1)), item)


def _moment(item: fx.Node, rows: int) -> Calls:
    """Mean or variance over all images and perhaps along the rest."""
    named = arguments_of(first_operand(item))
    read = _images(named["self"], rows)
    rank = len(read.row_shape) + 1
    dims = sorted(d % rank for d in named["dim"] or range(rank))
    left = tuple(size for d, size in enumerate(read.row_shape, 1) if d not in dims)
    _demand(dtype_of(item) == accumulates_in(dtype_of(item)))
    _demand(dims[0] == 0 and prod(left) == prod(_shape(item)))
    correction = 1 if named["correction"] is None else named["correction"]
    op = f"aten.var_mean.correction#{item.args[1]}"
    return (Instruction(op, (read, dims), {"correction": correction}, "sum", left, dtype_of(item)),)


_ROWS: dict[str, RowRule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias"), _reshape),
    **dict.fromkeys(("permute", "t", "transpose"), _permute),
    **dict.fromkeys(("sum", "mean"), _total),
    **dict.fromkeys(
        ("amax", "amin", "argmax", "argmin", "any", "_softmax", "_log_softmax"), _reduce
    ),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        _same_call(_rows, _rows, _dims, _number),
    ),
    "slice": _same_call(_rows, _dims, _number, _number, _number),
    "select": _same_call(_rows, _dims, _number),
    "gather": _same_call(_rows, _dims, _rows),
    **dict.fromkeys(("scatter", "scatter_add"), _same_call(_rows, _dims, _rows, _rows)),
    "mm": _same_call(_rows, _same_for_all, one_dim=True),
    "addmm": _same_call(_broadcast, _rows, _same_for_all, one_dim=True),
    "bmm": _same_call(_rows, _rows, one_dim=True),
    "baddbmm": _same_call(_broadcast, _rows, _rows, one_dim=True),
    "convolution": _same_call(_rows, _same_for_all, _same_for_all, *[_number] * 6, one_dim=True),
    "convolution_backward#0": _gradient_of_input,
    "expand": _expand,
    "cat": _same_call(_rows, _dims),
    "constant_pad_nd": _same_call(_rows, _pads, _number),
    "full": _full,
}
"""By the operator; the second argument is how many leading dimensions are the rows."""
_OTHERS: dict[tuple[Kind, str], Callable[[fx.Node, int], Calls]] = {
    **{("last", name): _transposed for name in ("permute", "t", "transpose")},
    ("sum", "mm"): _sum_of_products,
    ("sum", "sum"): _sum_over_rows,
    ("sum", "convolution_backward#1"): _gradient_of_weight,
    ("sum", "convolution_backward#2"): _gradient_of_bias,
    ("sum", "var_mean#0"): _moment,
    ("sum", "var_mean#1"): _moment,
}
"""By the kind and the operator; the second argument is how many rows there are."""
