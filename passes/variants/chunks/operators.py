"""Which operators work row by row, and how each is called on a few rows.

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
from collections.abc import Callable, Mapping, Sequence
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
from fxremat.passes.variants.chunks.calls import Call, Calls, Operand, Result, row_cut, row_shape_of
from fxremat.passes.variants.split_gradients import of_input
from fxremat.runtime.chunks.buffers import CONVOLUTION, GRADIENT_OF_WEIGHT, accumulates_in
from fxremat.runtime.chunks.program import Kind, RowCount


def calls_of(node: fx.Node, kind: Kind, rows: int) -> Calls | None:
    """The calls that compute ``node`` as ``kind``, a few of ``rows`` rows at a time."""
    if node.target is operator.getitem:
        return _item(node, kind, rows)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    shape = shape_of(node)
    if shape is None:
        return None
    name = packet_name(node)
    if kind == "sum":
        rule = _SUMS.get(name)
        return rule(node, rows) if rule else None
    if kind == "last":
        return _transposed(node, rows) if name in ("permute", "t", "transpose") else None
    cut = row_cut(shape, rows)
    if kind != "row" or cut is None:
        return None
    special = _ROWS.get(name)
    if special:
        return special(node, rows, cut)
    if torch.Tag.pointwise in node.target.tags or name in _ELEMENTWISE:
        return _elementwise(node, rows, cut)
    return None


# --- one row in, one row out ---------------------------------------------------------------


def _aligned(node: fx.Node, shape: Shape, cut: int) -> Operand | None:
    """An operand that broadcasts to ``shape``, whose first ``cut`` dimensions are the rows."""
    own = shape_of(node)
    if own is None or len(own) > len(shape):
        return None
    padded = (1,) * (len(shape) - len(own)) + own
    front, row_shape = padded[:cut], padded[cut:]
    if front == shape[:cut]:
        return Operand(node, "row", row_shape)
    if all(size == 1 for size in front):
        return Operand(node, "whole", own if len(own) <= len(row_shape) else row_shape)
    return None


def _row(node: fx.Node, cut: int, op: str, *args: Any, **kwargs: Any) -> Call:
    shape = known_shape(node)
    return Call(op, args, kwargs, "row", shape[cut:], dtype_of(node))


def _cast(given: Operand, dtype: torch.dtype) -> Call:
    op = "prims.convert_element_type.default"
    return Call(op, (given, dtype), {}, given.kind, given.row_shape, dtype)


_ELEMENTWISE = frozenset({"convert_element_type", "clone", "where"})
_COMPARING = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan",
        "isinf", "where", "convert_element_type", "clone",
    }
)  # fmt: skip


def _common_type(node: fx.Node, given: Sequence[fx.Node]) -> torch.dtype:
    """The type that operands are brought to before the operator sees them."""
    name = packet_name(node)
    if name not in _COMPARING:
        return dtype_of(node)
    types = [dtype_of(n) for n in given if n.meta["val"].dim()] or [dtype_of(given[0])]
    common = types[0]
    for one in types[1:]:
        common = torch.promote_types(common, one)
    return common


def _elementwise(node: fx.Node, rows: int, cut: int) -> Calls | None:
    """Operands of another type are cast in an instruction of their own, which has its memory."""
    shape = known_shape(node)
    name, named = packet_name(node), arguments_of(node)
    given = [v for v in named.values() if isinstance(v, fx.Node)]
    values = [v for key, v in named.items() if isinstance(v, fx.Node) and key != "condition"]
    if not given or any(isinstance(v, (list, tuple)) for v in named.values()):
        return None
    found = {n: _aligned(n, shape, cut) for n in given}
    if any(one is None for one in found.values()):
        return None
    calls: list[Call] = []
    replaced: dict[fx.Node, Any] = dict(found)
    common = _common_type(node, values) if values else None
    if name not in ("convert_element_type", "clone"):
        for one in dict.fromkeys(values):
            if dtype_of(one) != common and one.meta["val"].dim():
                given_as = found[one]
                assert given_as is not None
                assert common is not None
                if given_as.kind == "whole":  # every instruction of the loop has rows
                    return None
                calls.append(_cast(given_as, common))
                replaced[one] = Result(len(calls) - 1)
    args = [replaced[v] if isinstance(v, fx.Node) else v for v in node.args]
    kwargs = {k: replaced[v] if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
    if name == "clone":
        args, kwargs = args[:1], {}
    op = _WRITTEN_INSTEAD.get(str(node.target), str(node.target))
    calls.append(_row(node, cut, op, *args, *([0] if name == "relu" else []), **kwargs))
    return tuple(calls)


# The same functions in a form that writes into given memory.
_WRITTEN_INSTEAD = {
    "aten.relu.default": "aten.clamp_min.default",
    **{f"aten.{name}.Scalar": f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")},
}


def _same_rows(node: Any, shape: Shape, rows: int, cut: int) -> Operand | None:
    """An operand with the leading dimensions of the result."""
    own = shape_of(node) if isinstance(node, fx.Node) else None
    if own is None or own[:cut] != shape[:cut]:
        return None
    return Operand(node, "row", own[cut:])


def _behind(dims: Any, rank: int, cut: int) -> list[int] | None:
    """Dimensions of an operand as those of [c, *row_shape]; None if one of them is of the rows."""
    listed = [dims] if isinstance(dims, int) else list(dims or [])
    found = [d + rank if d < 0 else d for d in listed]
    return [d - cut + 1 for d in found] if listed and min(found) >= cut else None


def _reshape(node: fx.Node, rows: int, cut: int) -> Calls | None:
    source, shape = node.args[0], known_shape(node)
    assert isinstance(source, fx.Node)
    if row_shape_of(source, rows) is None:
        return None
    row_shape = list(shape[cut:])
    given = Operand(source, "row", shape[cut:])
    return (_row(node, cut, "aten.view.default", given, [RowCount(), *row_shape]),)


def _expand(node: fx.Node, rows: int, cut: int) -> Calls | None:
    shape, source = known_shape(node), node.args[0]
    assert isinstance(source, fx.Node)
    given = _aligned(source, shape, cut)
    if given is None:
        return None
    return (_row(node, cut, "aten.expand.default", given, [RowCount(), *shape[cut:]]),)


def _order(node: fx.Node) -> list[int] | None:
    named = arguments_of(node)
    source = named["self"]
    rank = source.meta["val"].dim()
    if "dims" in named:
        return [d % rank for d in named["dims"]]
    order = list(range(rank))
    one, other = (named["dim0"] % rank, named["dim1"] % rank) if "dim0" in named else (0, rank - 1)
    order[one], order[other] = order[other], order[one]
    return order


def _permute(node: fx.Node, rows: int, cut: int) -> Calls | None:
    source, order = first_operand(node), _order(node)
    shape = shape_of(source)
    if shape is None or order is None or row_cut(shape, rows) != cut:
        return None
    if order[:cut] != list(range(cut)):
        return None
    behind = [d - cut + 1 for d in order[cut:]]
    read = Operand(source, "row", shape[cut:])
    return (_row(node, cut, "aten.permute.default", read, [0, *behind]),)


def _transposed(node: fx.Node, rows: int) -> Calls | None:
    """[N, K] seen as [K, N]."""
    source = first_operand(node)
    shape = shape_of(source)
    if shape is None or len(shape) != 2 or shape[0] != rows or _order(node) != [1, 0]:
        return None
    args = (Operand(source, "row", shape[1:]), [1, 0])
    return (Call("aten.permute.default", args, {}, "last", shape[1:], dtype_of(node)),)


def _reduce(node: fx.Node, rows: int, cut: int) -> Calls | None:
    """Reductions along the rest; the first argument behind the operand says which dimensions."""
    named, name = arguments_of(node), packet_name(node)
    source = named["self"]
    own, shape = shape_of(source), known_shape(node)
    if own is None or own[:cut] != shape[:cut]:
        return None
    dims = _behind(named.get("dim"), len(own), cut)
    if dims is None:
        return None
    given: Any = Operand(source, "row", own[cut:])
    calls: list[Call] = []
    if name in ("sum", "mean") and dtype_of(source) != dtype_of(node):
        calls, given = [_cast(given, dtype_of(node))], Result(0)
    one = isinstance(named["dim"], int)
    args = [given, dims[0] if one else dims]
    args.append(named["half_to_float"] if "half_to_float" in named else named["keepdim"])
    calls.append(_row(node, cut, str(node.target), *args))
    return tuple(calls)


def _softmax_backward(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    grad = _same_rows(named["grad_output"], shape, rows, cut)
    output = _same_rows(named["output"], shape, rows, cut)
    dims = _behind(named["dim"], len(shape), cut)
    if grad is None or output is None or dims is None:
        return None
    return (_row(node, cut, str(node.target), grad, output, dims[0], named["input_dtype"]),)


def _pick(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    source = _same_rows(named["self"], shape, rows, cut)
    if source is None:
        return None
    dims = _behind(named["dim"], len(source.row_shape) + cut, cut)
    others = [v for key, v in named.items() if key not in ("self", "dim")]
    if dims is None or any(isinstance(v, fx.Node) for v in others):
        return None
    return (_row(node, cut, str(node.target), source, dims[0], *others),)


def _cat(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    parts = [_same_rows(one, shape, rows, cut) for one in named["tensors"]]
    dims = _behind(named["dim"], len(shape), cut)
    if dims is None or any(p is None or dtype_of(p.node) != dtype_of(node) for p in parts):
        return None
    return (_row(node, cut, "aten.cat.default", parts, dims[0]),)


def _pad(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    source = _same_rows(named["self"], shape, rows, cut)
    if source is None or len(named["pad"]) // 2 > len(source.row_shape):
        return None
    return (_row(node, cut, str(node.target), source, list(named["pad"]), named["value"]),)


def _gather(node: fx.Node, rows: int, cut: int) -> Calls | None:
    """gather and the scatters: along the rest, operands with the same rows."""
    named, shape = arguments_of(node), known_shape(node)
    dims = _behind(named["dim"], len(shape), cut)
    tensors = {k: _same_rows(v, shape, rows, cut) for k, v in named.items()
               if isinstance(v, fx.Node)}  # fmt: skip
    if dims is None or any(one is None for one in tensors.values()):
        return None
    args = [tensors.get(k, dims[0] if k == "dim" else v) for k, v in named.items()
            if k != "sparse_grad"]  # fmt: skip
    return (_row(node, cut, str(node.target), *args),)


def _full(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    if isinstance(named["fill_value"], fx.Node):
        return None
    device = node.meta["val"].device
    size = [RowCount(), *shape[cut:]]
    kwargs = {"dtype": dtype_of(node), "device": device}
    return (_row(node, cut, "aten.full.default", size, named["fill_value"], **kwargs),)


# --- matmuls ---------------------------------------------------------------------------------


def _whole(node: Any) -> Operand | None:
    shape = shape_of(node) if isinstance(node, fx.Node) else None
    return None if shape is None else Operand(node, "whole", shape)


def _scales(named: Mapping[str, Any]) -> dict[str, Any]:
    return {k: named[k] for k in ("beta", "alpha") if named.get(k, 1) != 1}


def _mm(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named = arguments_of(node)
    left, right = named.get("self"), named["mat2"]
    added: list[Operand | None] = []
    if "mat1" in named:  # addmm
        added, left = [_aligned(named["self"], known_shape(node), cut)], named["mat1"]
    own = shape_of(left)  # type: ignore[arg-type]
    if own is None or cut != 1 or own[0] != rows or None in added:
        return None
    args = [*added, Operand(left, "row", own[1:]), _whole(right)]  # type: ignore[arg-type]
    return (_row(node, cut, str(node.target), *args, **_scales(named)),)


def _bmm(node: fx.Node, rows: int, cut: int) -> Calls | None:
    named, shape = arguments_of(node), known_shape(node)
    added: list[Operand | None] = []
    pair = [named["self"], named["mat2"]] if "mat2" in named else [named["batch1"], named["batch2"]]
    if "batch1" in named:
        added = [_aligned(named["self"], shape, cut)]
    given = [_same_rows(one, shape, rows, cut) for one in pair]
    if cut != 1 or None in added or None in given:
        return None
    return (_row(node, cut, str(node.target), *added, *given, **_scales(named)),)


def _sum_of_products(node: fx.Node, rows: int) -> Calls | None:
    named, shape = arguments_of(node), shape_of(node)
    left, right = named.get("self"), named.get("mat2")
    sizes = shape_of(left), shape_of(right)  # type: ignore[arg-type]
    if shape is None or None in sizes or len(named) != 2:
        return None
    (_, inner), (rows_of_right, width) = sizes  # type: ignore[misc]
    if inner != rows or rows_of_right != rows:
        return None
    args = (Operand(left, "last", shape[:1]), Operand(right, "row", (width,)))  # type: ignore[arg-type]
    return (Call("aten.mm.default", args, {}, "sum", shape, dtype_of(node)),)


def _sum_over_rows(node: fx.Node, rows: int) -> Calls | None:
    """A sum over all row dimensions, and perhaps some of the rest, which is added up before."""
    named = arguments_of(node)
    source, shape = named["self"], shape_of(node)
    row_shape, own = row_shape_of(source, rows), shape_of(source)
    if shape is None or row_shape is None or own is None:
        return None
    cut = len(own) - len(row_shape)
    dims = {d % len(own) for d in named.get("dim") or range(len(own))}
    if not dims >= set(range(cut)):
        return None
    behind = [d - cut + 1 for d in sorted(dims) if d >= cut]
    return _added_up(Operand(source, "row", row_shape), behind, shape, dtype_of(node))


def _added_up(read: Operand, behind: list[int], shape: Shape, dtype: torch.dtype) -> Calls | None:
    """A sum of type ``dtype`` along dimensions of [c, *row_shape] and then over the rows."""
    wide, row_shape = accumulates_in(dtype), read.row_shape
    given: Any = read
    calls: list[Call] = []
    if dtype_of(read.node) != wide:
        calls, given = [_cast(given, wide)], Result(0)
    if behind:
        left = tuple(size for d, size in enumerate(row_shape, 1) if d not in behind)
        calls.append(Call("aten.sum.dim_IntList", (given, behind), {}, "row", left, wide))
        given, row_shape = Result(len(calls) - 1), left
    calls.append(Call("aten.sum.dim_IntList", (given, [0]), {}, "sum", row_shape, dtype))
    return tuple(calls) if prod(row_shape) == prod(shape) else None


# --- convolutions and normalisation: rows are images -------------------------------------------


def _convolution(node: fx.Node, rows: int, cut: int) -> Calls | None:
    given, weight, bias, *how_ = node.args
    shape = known_shape(node)
    images, wide = _same_rows(given, shape, rows, cut), _whole(weight)
    added = None if bias is None else _whole(bias)
    if cut != 1 or len(shape) < len(("images", "channels", "places")):
        return None
    if images is None or wide is None or (bias is not None and added is None):
        return None
    return (_row(node, cut, CONVOLUTION, images, wide, added, *how_),)


def _gradient_of_input(item: fx.Node, call: fx.Node, rows: int) -> Calls | None:
    gradient, _, weight = call.args[:3]
    read, wide, shape = _images(gradient, rows), _whole(weight), shape_of(item)
    if read is None or wide is None or shape is None:
        return None
    return (_row(item, 1, CONVOLUTION, read, wide, None, *of_input(call)),)


def _gradient_of_weight(item: fx.Node, call: fx.Node, rows: int) -> Calls | None:
    gradient, given, weight, _, *how_, _ = call.args
    shape = shape_of(item)
    pair = [_images(n, rows) for n in (gradient, given)]
    wide = _whole(weight)
    if shape is None or None in pair or wide is None:
        return None
    args = (*pair, wide, None, *how_, [False, True, False])
    return (Call(GRADIENT_OF_WEIGHT, args, {}, "sum", shape, dtype_of(item)),)


def _gradient_of_bias(item: fx.Node, call: fx.Node, rows: int) -> Calls | None:
    read, shape = _images(call.args[0], rows), shape_of(item)
    if read is None or shape is None:
        return None
    places = range(1, len(read.row_shape))
    return _added_up(read, [p + 1 for p in places], shape, dtype_of(item))


def _images(node: Any, rows: int) -> Operand | None:
    shape = shape_of(node) if isinstance(node, fx.Node) else None
    return Operand(node, "row", shape[1:]) if shape is not None and shape[0] == rows else None


def _moment(item: fx.Node, call: fx.Node, rows: int) -> Calls | None:
    """Mean or variance over all images and perhaps along the rest."""
    named, shape = arguments_of(call), shape_of(item)
    read = _images(named["self"], rows)
    if read is None or shape is None or dtype_of(item) != accumulates_in(dtype_of(item)):
        return None
    rank = len(read.row_shape) + 1
    dims = sorted(d % rank for d in named["dim"] or range(rank))
    left = tuple(size for d, size in enumerate(read.row_shape, 1) if d not in dims)
    if dims[0] != 0 or prod(left) != prod(shape):
        return None
    correction = 1 if named["correction"] is None else named["correction"]
    op = f"aten.var_mean.correction#{item.args[1]}"
    kwargs = {"correction": correction}
    return (Call(op, (read, dims), kwargs, "sum", left, dtype_of(item)),)


ItemRule = Callable[[fx.Node, fx.Node, int], Calls | None]
_ITEMS: dict[tuple[str, int], tuple[Kind, ItemRule]] = {
    ("convolution_backward", 0): ("row", _gradient_of_input),
    ("convolution_backward", 1): ("sum", _gradient_of_weight),
    ("convolution_backward", 2): ("sum", _gradient_of_bias),
    ("var_mean", 0): ("sum", _moment),
    ("var_mean", 1): ("sum", _moment),
}


def _item(node: fx.Node, kind: Kind, rows: int) -> Calls | None:
    call, place = node.args
    assert isinstance(call, fx.Node)
    wanted, rule = _ITEMS.get((packet_name(call), place), (None, None))  # type: ignore[arg-type]
    return rule(node, call, rows) if rule is not None and wanted == kind else None


RowRule = Callable[[fx.Node, int, int], Calls | None]
_ROWS: dict[str, RowRule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias"), _reshape),
    **dict.fromkeys(("permute", "t", "transpose"), _permute),
    **dict.fromkeys(("sum", "amax", "amin", "mean", "argmax", "argmin", "any"), _reduce),
    **dict.fromkeys(("_softmax", "_log_softmax"), _reduce),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("slice", "select"), _pick),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), _gather),
    **dict.fromkeys(("mm", "addmm"), _mm),
    **dict.fromkeys(("bmm", "baddbmm"), _bmm),
    "convolution": _convolution,
    "expand": _expand,
    "cat": _cat,
    "constant_pad_nd": _pad,
    "full": _full,
}
_SUMS = {"mm": _sum_of_products, "sum": _sum_over_rows}
