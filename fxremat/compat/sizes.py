"""Sizes that Dynamo traced as symbols: their bounds, and guards on them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.utils._pytree import tree_map


def size_bound(size: Any) -> int:
    """A size as a number: the declared upper bound of a dynamic one, else the size seen.

    A bound counts as declared when it is a number that fits a tensor dimension.
    """
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    at, expression = _AT.get(), node.expr
    if at is not None and expression in at.found:
        return at.found[expression]
    env: ShapeEnv = node.shape_env
    substitution = {s: _symbol_bound(env, s) for s in expression.free_symbols}
    bound = int(expression.xreplace(substitution))
    if at is not None and substitution.keys() <= at.values.keys():
        at.found[expression] = bound
    return bound


def planned_input(value: Any) -> Any:
    """What a graph gets for an input: a tensor without memory, or the size planned for."""
    if isinstance(value, torch.Tensor):
        shape, stride = list(map(size_bound, value.shape)), list(map(size_bound, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return size_bound(value) if isinstance(value, torch.SymInt) else value


def planned_inputs(graph: fx.Graph) -> dict[str, Any]:
    """The inputs of a graph by their names, in order, each as a `planned_input`."""
    return {n.name: planned_input(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")}


def values_of_data(graph: fx.Graph) -> dict[str, Callable[[], Any]]:
    """Give the values whose sizes only data tells, each as a `planned_input`.

    They go by their names; a size alone goes by its own, too.
    """
    nodes = [node for node in graph.nodes if node.meta.get("unbacked_bindings")]
    values = {node.name: node.meta["val"] for node in nodes}
    values |= {str(x): x for x in values.values() if isinstance(x, torch.SymInt)}
    return {name: partial(tree_map, planned_input, value) for name, value in values.items()}


@dataclass(frozen=True)
class _At:
    """Values of symbols, and what expressions of these alone have come to."""

    values: Mapping[Any, int]
    found: dict[Any, int] = field(default_factory=dict)


_AT: ContextVar[_At | None] = ContextVar("fxremat_sizes_at", default=None)


@contextmanager
def sizes_at(values: Mapping[Any, int]) -> Iterator[None]:
    """Inside, symbols have these values, whatever was seen or declared."""
    token = _AT.set(_At(values))
    try:
        yield
    finally:
        _AT.reset(token)


def is_settled(value: Any) -> bool:
    """Whether an input is a tensor of known sizes, and no number that Dynamo made a tensor of."""
    number = isinstance(value, torch.Tensor) and not value.dim()
    if not isinstance(value, torch.Tensor) or (number and not value.requires_grad):
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def with_settled_sizes(value: Any) -> Any:
    """A tensor without memory in which symbols that came to stand for one number are that number.

    Where code runs with one size and then with another, Dynamo makes the size a symbol, and may
    find that the graph holds for this number only. The tensor keeps the symbol.
    """
    if not isinstance(value, FakeTensor):
        return value
    given = [[*value.shape], [*value.stride()]]
    sizes, strides = ([_settled(n) for n in each] for each in given)
    if all(map(operator.is_, (*sizes, *strides), (n for each in given for n in each))):
        return value
    with value.fake_mode:
        found = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(found, requires_grad=value.requires_grad)
    return found.requires_grad_(value.requires_grad)


def _settled(size: Any) -> Any:
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if number is None else number


def symbols_seen(graph: fx.Graph) -> dict[Any, int]:
    """The symbols among the graph's inputs, and the sizes that they were traced with."""
    return {symbol: seen for _, symbol, seen in _symbols(graph)}


def _symbols(graph: fx.Graph) -> Iterator[tuple[ShapeEnv, Any, int]]:
    """The symbols among the graph's inputs, each with what knows it and the size that was seen."""
    for placeholder in graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("val")
        for symbol in value.node.expr.free_symbols if isinstance(value, torch.SymInt) else ():
            seen = _seen(value.node.shape_env, symbol)
            if seen is not None:
                yield value.node.shape_env, symbol, seen


def size_ranges(graph: fx.Graph) -> dict[Any, tuple[str, int, int]]:
    """The symbols among the graph's inputs: what each is a size of, its least and its largest.

    The name is that of the source, as ``x.size()[0]``; the largest is what is planned for.
    """
    ranges: dict[Any, tuple[str, int, int]] = {}
    for env, symbol, seen in _symbols(graph):
        low, high = int(env.var_to_range[symbol].lower), _declared_bound(env, symbol)
        ranges[symbol] = (_source(env, symbol), low, seen if high is None else high)
    return ranges


def _source(env: ShapeEnv, symbol: Any) -> str:
    """``L['x'].size()[0]`` without what says that it is local."""
    sources = env.var_to_sources.get(symbol)
    if not sources:
        return str(symbol)
    return re.sub(r"L\['(\w+)'\]", r"\1", sources[0].name)


def _symbol_bound(env: ShapeEnv, symbol: Any) -> int:
    at = _AT.get()
    if at is not None and symbol in at.values:
        return at.values[symbol]
    declared, seen = _declared_bound(env, symbol), _seen(env, symbol)
    if declared is None and seen is None:
        return 1 if symbol in env.backed_var_to_val else 4096
    return cast("int", seen if declared is None else declared)


def _seen(env: ShapeEnv, symbol: Any) -> int | None:
    """The size that was traced; None for one that depends on data.

    The lengths of the rows of a jagged tensor are a symbol, too: a name that stands for no number.
    """
    try:
        return int(env.backed_var_to_val[symbol])
    except (KeyError, TypeError):
        return None


def plan_for_sizes_seen(graph: fx.Graph) -> None:
    """Guard dynamic sizes without a declared bound by what was seen: larger ones compile anew."""
    for env, symbol, seen in _symbols(graph):
        if _declared_bound(env, symbol) is None:
            env.evaluate_expr(sympy.Le(symbol, seen))


def _declared_bound(env: ShapeEnv, symbol: Any) -> int | None:
    upper = env.var_to_range[symbol].upper if symbol in env.var_to_range else None
    return int(upper) if isinstance(upper, sympy.Integer) and upper < 2**48 else None
