"""The operators that variants call: pure functions of their arguments, written with torch's own.

They have a namespace of their own, so that whoever meets one in a graph knows that it may run
again: it draws no random numbers (a seed is an argument), writes into nothing it is given, and
returns new memory. Every device has the same implementation.

`IN_PLACE` says of a call which other call writes the same result over its first argument; torch's
own, or one of two that are registered here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxremat.compat.configuration import OpOverload

NAMESPACE = "fxremat_kernels"


Measure = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes of scratch memory of a call: an operator, (fake) arguments by position and by name."""


def unmeasured(*_: Any) -> int:
    """A `Measure` for whoever does not want anything to be run."""
    return 0


WORKSPACES: dict[OpOverload, Callable[..., int]] = {}
"""What says how many bytes of scratch memory a call of an operator takes."""


IMPLEMENTATIONS: dict[OpOverload, Callable[..., Any]] = {}
"""What computes a call, of all operators of ours."""


def declared(node: fx.Node, measure: Measure = unmeasured, *, by_inductor: bool = False) -> int:
    """The scratch memory of a node whose operator says it, else 0, in a graph still to compile.

    Nothing is run but what ``measure`` runs.
    """
    if node.target not in WORKSPACES:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    found = WORKSPACES[node.target](*args, **kwargs, measure=measure, by_inductor=by_inductor)
    return int(found)


@dataclass(frozen=True)
class LibraryCall:
    """A call of an operator with (fake) arguments, made ``times`` times."""

    target: Any
    args: tuple[Any, ...]
    times: int


@dataclass(frozen=True)
class Inside:
    """What a call that runs many calls does inside: how many they are, and the bytes they move.

    ``again`` are bytes of operands that matmuls read (and pack) anew in each of the calls: their
    time comes on top, however long the matmuls take. ``library`` are the calls among them that
    compute rather than move: matmuls and convolutions. ``functions`` are those of single elements,
    by the operator's name, with the number of elements.
    """

    calls: int
    bytes: int
    again: int = 0
    library: tuple[LibraryCall, ...] = field(default=(), compare=False)
    functions: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Inside) -> Inside:
        return Inside(*map(operator.add, vars(self).values(), vars(other).values()))


INSIDE: dict[OpOverload, Callable[..., Inside]] = {}
"""What says what happens in a call of an operator that runs others many times."""


def pieces(total: int, size: int) -> list[tuple[int, int]]:
    """``total`` rows, images or elements in pieces of ``size``; the last may be smaller."""
    return [(a, min(a + size, total)) for a in range(0, total, size)] if size else []


HOLDS_STRIDES = (
    # Inductor neither pads the arguments nor, as a pass put the call in, forces strides on them.
    torch.Tag.needs_exact_strides,
    torch.Tag.pt2_compliant_tag,
)
COPIES = (*HOLDS_STRIDES, torch.Tag.cudagraph_unsafe)
WAITS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""The tags of operators that copy between host and device, and of those that wait or act."""


def register(
    schema: str,
    tags: tuple[torch.Tag, ...],
    fake: Callable[..., Any] = lambda *_: None,
    namespace: str = "fxremat",
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Make a function the new operator of its name; ``fake`` says shapes, strides and dtypes.

    Without it the operator gives nothing: it only changes contents.
    """

    def registered(real: Callable[..., Any]) -> OpOverload:
        name = real.__name__.lstrip("_")
        torch.library.define(f"{namespace}::{name}", schema, tags=tags)
        torch.library.impl(f"{namespace}::{name}", "default", torch.no_grad()(real))
        torch.library.register_fake(f"{namespace}::{name}", fake)
        overload: OpOverload = getattr(getattr(torch.ops, namespace), name).default
        return overload

    return registered


def define(
    schema: str,
    fake: Callable[..., Any],
    *,
    workspace: Callable[..., int] | None = None,
    flops: Callable[..., int] | None = None,
    inside: Callable[..., Inside] | None = None,
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Make a function the operator of `NAMESPACE`; ``fake`` says shapes, strides and dtypes.

    ``workspace`` gives the bytes of scratch memory of a call from its (fake) arguments, exactly,
    and from ``measure``, which says what another call takes that it makes inside; less exactly for
    a call that will be compiled ``by_inductor``. Without it the call is run once to find out.
    ``flops`` gives the floating-point operations of a call, which has shapes in place of tensors,
    as in `torch.utils.flop_counter`. ``inside`` says from the (fake) arguments, whether it runs
    ``on_cpu`` and whether in a graph that is compiled ``by_inductor``, what a call does beyond
    reading arguments and writing results.
    """

    def defined(real: Callable[..., Any]) -> OpOverload:
        overload = register(schema, (torch.Tag.pt2_compliant_tag,), fake, NAMESPACE)(real)
        IMPLEMENTATIONS[overload] = real
        if workspace is not None:
            WORKSPACES[overload] = workspace
        if flops is not None:
            flop_registry[overload.overloadpacket] = flops
        if inside is not None:
            INSIDE[overload] = inside
        return overload

    return defined


# --- adding to a tensor that is there -----------------------------------------------------


def _add(acc: torch.Tensor, shape: Any, op: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add to a tensor of any shape with as many elements as the product, in the same order.

    Memory is taken only where a pass of the compiler has laid ``acc`` out otherwise, for a while.
    """
    if acc.is_contiguous():
        into = acc.view(shape)
        op(into, a, b, out=into)
    else:
        acc.copy_(op(acc.reshape(shape), a, b).view(acc.shape))


@register("(Tensor(a!) acc, Tensor a, Tensor b) -> ()", HOLDS_STRIDES)
def addmm_into(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """acc += a @ b."""
    _add(acc, (a.size(0), b.size(1)), torch.addmm, a, b)


@register("(Tensor(a!) acc, Tensor a, Tensor b) -> ()", HOLDS_STRIDES)
def baddbmm_into(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the products of two batches of matrices to acc."""
    _add(acc, (a.size(0), a.size(1), b.size(2)), torch.baddbmm, a, b)


IN_PLACE: dict[OpOverload, OpOverload] = {
    torch.ops.aten.addmm.default: addmm_into,
    torch.ops.aten.baddbmm.default: baddbmm_into,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
"""Call -> the call with the same arguments that writes its result over the first of them."""
