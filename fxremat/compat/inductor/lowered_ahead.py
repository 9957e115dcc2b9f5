"""Graphs that Inductor need not lower again: what was generated ahead is what is compiled.

`generate` does what Inductor's compiler does until it has code. If the very same graph comes to
the compiler later, under the same configuration, that code is taken. Everything before and after
is done as always; what differs in any way is lowered as always.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from fxremat.compat.configuration import PARTITIONER, inductor_config
from fxremat.core.constants import MOST_READY

log = logging.getLogger(__name__)

_UNDERSTOOD = frozenset({
    "example_inputs", "extern_node_serializer", "get_decomp_fn", "graph_id", "inputs_to_check",
    "is_backward", "shape_env",
})  # fmt: skip
"""Arguments of Inductor's lowering; of others, which `generate` does not give, falsy is alike."""

_ready: dict[str, Lowered] = {}


@dataclass(frozen=True)
class Lowered:
    """A lowering of Inductor's that has run, the code it gave, and the key of its graph.

    ``counted`` is what Inductor has counted meanwhile: it counts where the code is taken.
    """

    key: str
    lowering: Any
    code: Any
    counted: Mapping[str, int]


def lowering_key(
    module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, donated: Sequence[int]
) -> str:
    """Equal for graphs, with all of Inductor's passes behind them, whose code is the same."""
    nodes = [
        (n.op, n.name, str(n.target), repr(n.args), repr(n.kwargs)) for n in module.graph.nodes
    ]
    values = [_described(n.meta.get("val")) for n in module.graph.nodes]
    output = module.graph.output_node().meta
    seen = output.get("user_visible_output_idxs") or [], str(output.get("original_output_strides"))
    text = repr((nodes, values, seen, list(map(_described, inputs)), is_backward, list(donated)))
    # The partitioner's work is done, and code does not depend on the threads that compile it.
    with inductor_config.patch({PARTITIONER: None, "compile_threads": 1}):
        return hashlib.sha256(text.encode() + inductor_config.get_hash()).hexdigest()


def hand_over(lowered: Lowered) -> None:
    """Have the compiler take the code of a lowering, when its graph comes."""
    if inductor_config.trace.enabled:  # the user wants to see Inductor at work
        return
    _take_over()
    lowered.lowering.run = lambda *inputs: None
    lowered.lowering.codegen = lambda: lowered.code
    _ready.pop(lowered.key, None)
    _ready[lowered.key] = lowered
    while len(_ready) > MOST_READY:
        del _ready[next(iter(_ready))]


def checks_are_written() -> bool:
    """Whether the code itself checks that inputs on a GPU are aligned, as from torch 2.13 on.

    Which ones it checks is not known ahead. Before, what calls the code checks them.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    return hasattr(PythonWrapperCodegen, "register_alignment_check_inputs")


def forget_lowered() -> None:
    """Drop what has been handed over and was never asked for."""
    _ready.clear()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.device), str(tuple(value.shape)), str(value.stride())
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    return str(value)


def _take_over() -> None:
    """Have Inductor's compiler ask us for the lowering of a graph first."""
    from torch._inductor import compile_fx

    compiler: Any = compile_fx
    if getattr(compiler.GraphLowering, "fxremat_asked_first", False):
        return
    lowers = compiler.GraphLowering

    def lower(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        ready = None if args else _taken(gm, kwargs)
        return lowers(gm, *args, **kwargs) if ready is None else ready

    lower.fxremat_asked_first = True  # type: ignore[attr-defined]
    compiler.GraphLowering = lower


def _taken(gm: fx.GraphModule, kwargs: dict[str, Any]) -> Any:
    """The lowering that was handed over for this graph, which no one else is given; or None."""
    from torch._inductor.utils import get_donated_idxs

    if not _ready or any(kwargs[name] for name in kwargs.keys() - _UNDERSTOOD):
        return None
    checked = kwargs.get("inputs_to_check")
    if checked and checks_are_written():
        return None
    is_backward = bool(kwargs.get("is_backward"))
    donated = get_donated_idxs() or [] if is_backward else []
    key = lowering_key(gm, kwargs["example_inputs"], is_backward=is_backward, donated=donated)
    ready = _ready.pop(key, None)
    log.debug("a %s is lowered %s", "backward" if is_backward else "forward",
              "already" if ready is not None else "now")  # fmt: skip
    if ready is None:
        return None
    counters["inductor"].update(ready.counted)
    ready.lowering.graph_id = kwargs.get("graph_id")
    ready.lowering.inputs_to_check = checked
    return ready.lowering
