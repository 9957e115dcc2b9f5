"""The operators that variants call: pure functions of their arguments, written with torch's own.

They have a namespace of their own, so that whoever meets one in a graph knows that it may run
again: it draws no random numbers (a seed is an argument), writes into nothing it is given, and
returns new memory. Every device has the same implementation.
"""

from __future__ import annotations

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
        return Inside(
            self.calls + other.calls,
            self.bytes + other.bytes,
            self.again + other.again,
            (*self.library, *other.library),
            (*self.functions, *other.functions),
        )


INSIDE: dict[OpOverload, Callable[..., Inside]] = {}
"""What says what happens in a call of an operator that runs others many times."""


HOLDS_STRIDES = (
    # Inductor neither pads the arguments nor, as a pass put the call in, forces strides on them.
    torch.Tag.needs_exact_strides,
    torch.Tag.pt2_compliant_tag,
)
COPIES = (*HOLDS_STRIDES, torch.Tag.cudagraph_unsafe)
WAITS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""The tags of operators that copy between host and device, and of those that wait or act."""


def register(
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
    namespace: str = "fxremat",
) -> OpOverload:
    """The new operator ``namespace::name``; ``fake`` says shapes, strides and dtypes."""
    qualified = f"{namespace}::{name}"
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", torch.no_grad()(real))
    torch.library.register_fake(qualified, fake)
    overload: OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return overload


def no_result(*_: Any) -> None:
    """The result, on tensors without contents, of an operator that only changes contents."""


def define(
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    workspace: Callable[..., int] | None = None,
    flops: Callable[..., int] | None = None,
    inside: Callable[..., Inside] | None = None,
) -> OpOverload:
    """Register ``fxremat_kernels::name``; ``fake`` says shapes, strides and dtypes.

    ``workspace`` gives the bytes of scratch memory of a call from its (fake) arguments, exactly,
    and from ``measure``, which says what another call takes that it makes inside; less exactly for
    a call that will be compiled ``by_inductor``. Without it the call is run once to find out.
    ``flops`` gives the floating-point operations of a call, which has shapes in place of tensors,
    as in `torch.utils.flop_counter`. ``inside`` says from the (fake) arguments, whether it runs
    ``on_cpu`` and whether in a graph that is compiled ``by_inductor``, what a call does beyond
    reading arguments and writing results.
    """
    overload = register(name, schema, real, fake, (torch.Tag.pt2_compliant_tag,), NAMESPACE)
    IMPLEMENTATIONS[overload] = real
    if workspace is not None:
        WORKSPACES[overload] = workspace
    if flops is not None:
        flop_registry[overload.overloadpacket] = flops
    if inside is not None:
        INSIDE[overload] = inside
    return overload
