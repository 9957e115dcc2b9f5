"""The node of a compiled forward in the graph of autograd, and the tensors that it saves.

Nodes are told by their class: AOTAutograd makes one of the class ``CompiledFunctionBackward`` in
each call of a compiled forward whose results need gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

_NODE_CLASS = "CompiledFunctionBackward"
_VIEWS_BETWEEN = 3  # a result that is a view is made anew behind the compiled function


def autograd_position() -> int:
    """A number that grows with each node which autograd makes in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def node_of_forward(results: object, since: int) -> Any:
    """The node of the compiled forward that gave ``results``; None if it saves nothing.

    ``since`` is the `autograd_position` before the call: older nodes are those of arguments that
    the forward returned as they were. A forward that runs with hooks on what is saved, as under
    `torch.utils.checkpoint`, saves what the hooks make of it; it counts as saving nothing.
    """
    if not torch.is_grad_enabled() or _hooks_on_what_is_saved():
        return None
    values: Iterable[object] = results if isinstance(results, (list, tuple)) else (results,)
    with torch._C.DisableTorchFunctionSubclass():
        for value in values:
            node = value.grad_fn if isinstance(value, torch.Tensor) else None
            found = _compiled_node(node)
            if found is not None and found._sequence_nr() >= since:
                return found
    return None


def _hooks_on_what_is_saved() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _compiled_node(node: Any) -> Any:
    """The node itself, or the one that it is a view of."""
    for _ in range(_VIEWS_BETWEEN):
        if node is None or type(node).__name__ == _NODE_CLASS:
            return node
        following = node.next_functions
        node = following[0][0] if following else None
    return None


def when_freed(node: Any, call: Callable[[], object]) -> None:
    """Have ``call()`` called when a backward runs ``node`` and keeps nothing for another one.

    By a hook before the node: one behind it would keep the incoming gradients until then.
    """
    hook: Any = partial(_unless_kept, call)
    hook.is_ours = True
    node.register_prehook(hook)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _unless_kept(call: Callable[[], object], _: object) -> None:
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        call()


def when_backward_ends(node: Any, call: Callable[[], object]) -> None:
    """Have ``call()`` called at the end of each backward that runs ``node``."""
    hook: Any = partial(_at_the_end, call)
    hook.is_ours = True
    node.register_prehook(hook)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _at_the_end(call: Callable[[], object], _: object) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that ``node`` has saved; raises RuntimeError where one was overwritten since."""
    return [*node.saved_tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())]
