"""The backward that autograd is running: its nodes, its leaves, their hooks, and what is saved.

The node of a compiled forward is told by its class: AOTAutograd makes one of the class
``CompiledFunctionBackward`` in each call of a compiled forward whose results need gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from threading import Lock, local
from typing import Any

import torch

_NODE_CLASS = "CompiledFunctionBackward"
_VIEWS_BETWEEN = 3
"""Nodes between a result and its compiled function: AOTAutograd of torch makes a result that is a
view anew, of its base."""


def running_backward() -> int | None:
    """The number of the backward that autograd runs in this thread, None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def running_node() -> Any:
    """The node that autograd runs now in this thread, None outside of a backward."""
    return torch._C._current_autograd_node()


def accumulators_of(node: Any) -> list[Any]:
    """What adds the gradients that ``node`` gives to the ``grad`` of each leaf in this backward.

    Each has the leaf as its ``variable``.
    """
    edges = [] if node is None else _following(node)
    return [edge for edge in edges if _is_leaf(edge) and _will_run(edge)]


@dataclass(frozen=True, eq=False)
class _Started:
    """A backward that runs: where it began, and whether it only adds to ``grad``."""

    outputs: tuple[Any, ...]
    only_adds: bool


_STARTED: list[_Started] = []
_STARTING = Lock()


def watch_backwards() -> None:
    """From now on `leaves_of_one_edge` knows where backwards begin."""
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    if hasattr(original, "watches"):
        return

    @wraps(original)
    def watched(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[2] if len(args) > 2 else True
        only_adds = kwargs.get("accumulate_grad") is True and create_graph is False
        started = _Started(tuple(t_outputs), only_adds)
        with _STARTING:
            _STARTED.append(started)
        try:
            with _RUNNING.inside(started.outputs):
                return original(t_outputs, *args, **kwargs)
        except Exception as error:
            for tell in _ON_FAILURE:
                tell(error)
            raise
        finally:
            _STARTED.remove(started)

    watched.watches = True  # type: ignore[attr-defined]
    compiler: Any = torch.compiler
    autograd._engine_run_backward = compiler.disable(watched, recursive=False)


class _Running(local):
    """How many backwards of a thread run inside each other; what to call before and after all."""

    depth = 0

    def __init__(self) -> None:
        self.before: list[Callable[[Sequence[Any]], object]] = []
        self.after: list[Callable[[], object]] = []

    @contextmanager
    def inside(self, outputs: Sequence[Any]) -> Iterator[None]:
        while self.before and not self.depth:
            self.before.pop(0)(outputs)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            while self.after and not self.depth:
                self.after.pop(0)()


_RUNNING = _Running()


def when_backward_starts(call: Callable[[Sequence[Any]], object]) -> None:
    """Have ``call(outputs)`` called, once, when the next backward of this thread starts at these.

    Nothing of the graph of autograd has run then, or was let go of.
    """
    watch_backwards()
    if call not in _RUNNING.before:
        _RUNNING.before.append(call)


def when_backward_returns(call: Callable[[], object]) -> None:
    """Have ``call()`` called when the backwards that run in this thread have returned, or failed.

    At once where none runs, or none that is watched.
    """
    watch_backwards()
    if _RUNNING.depth:
        _RUNNING.after.append(call)
    else:
        call()


_ON_FAILURE: list[Callable[[Exception], object]] = []


def when_backward_fails(tell: Callable[[Exception], object]) -> None:
    """Have ``tell`` called with the error of each backward that fails, before its caller is."""
    watch_backwards()
    if tell not in _ON_FAILURE:
        _ON_FAILURE.append(tell)


@contextmanager
def no_other_backward() -> Iterator[bool]:
    """Whether a single backward runs that is watched; inside, no other one begins."""
    with _STARTING:
        yield len(_STARTED) == 1


def leaves_of_one_edge() -> list[torch.Tensor]:
    """The leaves to which exactly one edge leads in the backward that is running.

    Those of all its nodes, also of those that will not run. It is known after `watch_backwards`,
    where one backward runs at a time, which ``torch.autograd.backward`` began without
    ``create_graph``; elsewhere the list is empty.
    """
    started = _STARTED[:]
    if len(started) != 1 or not started[0].only_adds:
        return []
    nodes = _reachable([getattr(t, "node", None) or t.grad_fn for t in started[0].outputs])
    if running_node() not in nodes:
        return []
    edges = [edge for node in nodes for edge in _following(node)]
    counts = Counter(map(id, edges))
    return [edge.variable for edge in edges if counts[id(edge)] == 1 and _is_leaf(edge)]


class GraphInBackward(local):
    """The graph that runs in the backward of a thread, as it was when somebody looked last."""

    def __init__(self) -> None:
        self.seen: tuple[object, ...] = ()
        self.backward: int | None = None
        self.of_one_edge: frozenset[int] = frozenset()
        """The ids of `leaves_of_one_edge`."""

    def is_another(self) -> bool:
        """Look: whether another graph runs than before, or the same one in another backward."""
        backward, node = running_backward(), running_node()
        seen = backward, id(node), None if node is None else node._sequence_nr()
        if seen == self.seen:
            return False
        if backward != self.backward:
            self.of_one_edge = frozenset(map(id, leaves_of_one_edge()))
        self.seen, self.backward = seen, backward
        return True


def runs_in_one_thread() -> bool:
    """Whether autograd runs all of a backward in the thread that began it."""
    return not torch.accelerator.is_available() or not torch.autograd.is_multithreading_enabled()


def _reachable(roots: Sequence[Any]) -> list[Any]:
    """All nodes of a backward; those that begin at a leaf are not looked into: none."""
    if any(root is None for root in roots):
        return []
    found: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack.extend(_following(node))
    return list(found.values())


def _following(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _will_run(node: Any) -> bool:
    """Whether the node runs in this backward; torch refuses to say it of a result of `grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def hooks_on(leaf: torch.Tensor) -> int:
    """How many hooks a leaf has that see its gradient, before or after it is accumulated."""
    kinds = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    return sum(len(hooks) for hooks in kinds if hooks)


def hooks_on_node(node: Any) -> int:
    """How many hooks a node has, but for ours, which only look: they are marked ``is_ours``."""
    handles = [register(_no_hook) for register in (node.register_prehook, node.register_hook)]
    hooks = [hook for handle in handles for hook in (handle.hooks_dict_ref() or {}).values()]
    count = sum(hook is not _no_hook and not getattr(hook, "is_ours", False) for hook in hooks)
    for handle in handles:
        handle.remove()
    return count


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Have ``call()`` called at the end of the backward that is running, unless it fails."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _no_hook(*_: Any) -> None:
    """Stands among the hooks of a node, to see them."""


def backward_drops_gradients() -> bool:
    """Whether a compiled backward drops a gradient when that was read, as from torch 2.13 on."""
    version: Any = torch.__version__
    return bool(version >= (2, 13))


def autograd_position() -> int:
    """A number that grows with each node which autograd makes in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def node_of_forward(results: object, since: int) -> Any:
    """The node of the compiled forward that gave ``results``; None if it saves nothing.

    ``since`` is the `autograd_position` before the call: older nodes are those of arguments that
    the forward returned as they were. A forward that runs with hooks on what is saved, as under
    `torch.utils.checkpoint`, saves what the hooks make of it; it counts as saving nothing.
    """
    return None if hooks_on_what_is_saved() else node_of_results(results, since)


def node_of_results(results: object, since: int) -> Any:
    """The same, whatever is made of what the forward saves; None if no result needs a gradient."""
    if not torch.is_grad_enabled():
        return None
    values: Iterable[object] = results if isinstance(results, (list, tuple)) else (results,)
    with torch._C.DisableTorchFunctionSubclass():
        for value in values:
            node = value.grad_fn if isinstance(value, torch.Tensor) else None
            found = _compiled_node(node)
            if found is not None and found._sequence_nr() >= since:
                return found
    return None


def hooks_on_what_is_saved() -> bool:
    """Whether a forward saves what hooks make of it now, as under `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _compiled_node(node: Any) -> Any:
    """The node itself, or the one that it is a view of, or that was written into its tensor."""
    for _ in range(_VIEWS_BETWEEN):
        if node is None or type(node).__name__ == _NODE_CLASS:
            return node
        made = [each for each in _following(node) if type(each).__name__ != "AccumulateGrad"]
        node = max(made, key=lambda each: each._sequence_nr(), default=None)
    return None


def when_freed(node: Any, call: Callable[[], object]) -> None:
    """Have ``call()`` called when a backward runs ``node`` and keeps nothing for another one.

    By a hook before the node: one behind it would keep the incoming gradients until then.
    """

    def unless_kept() -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            call()

    when_backward_begins(node, unless_kept)


def when_backward_begins(node: Any, call: Callable[[], object]) -> None:
    """Have ``call()`` called when a backward comes to ``node``."""
    when_gradients_come(node, lambda _: call())


def when_gradients_come(node: Any, call: Callable[[Sequence[Any]], object]) -> None:
    """Have ``call`` called with the gradients that a backward sends to ``node``, None: not sent."""
    hook: Any = partial(_before, call)
    hook.is_ours = True
    node.register_prehook(hook)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(call: Callable[[Sequence[Any]], object], gradients: Sequence[Any]) -> None:
    call(gradients)


def results_of_node(results: object, node: Any) -> dict[int, int]:
    """By the places of ``results`` of a compiled forward, where ``node`` gets their gradients.

    Those that autograd sees as views of others are left out.
    """
    values: Iterable[object] = results if isinstance(results, (list, tuple)) else (results,)
    with torch._C.DisableTorchFunctionSubclass():
        return {
            k: one.output_nr
            for k, one in enumerate(values)
            if isinstance(one, torch.Tensor) and one.grad_fn is node
        }


def when_backward_ends(node: Any, call: Callable[[], object]) -> None:
    """Have ``call()`` called at the end of each backward that runs ``node``."""
    when_backward_begins(node, partial(at_end_of_backward, call))


def saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that ``node`` has saved; raises RuntimeError where one was overwritten since."""
    return [*node.saved_tensors, *(getattr(node, "_tensors_no_vc_check", None) or ())]


def saved_before(tensors: Iterable[object], without: Iterable[Any] = ()) -> list[torch.Tensor]:
    """What nodes have saved that the gradients of these tensors come to later.

    Nodes ``without`` which it is asked for are passed over.
    """
    known = {id(node) for node in without}
    return [x for node in _before_these(tensors) if id(node) not in known for x in _saved(node)]


def given_before(tensors: Iterable[object]) -> list[torch.Tensor]:
    """The tensors that code has read which made these: weights, and data that a node has saved.

    Each is the object that the program has, as long as it has it.
    """
    nodes = _before_these(tensors)
    weights = [node.variable for node in nodes if _is_leaf(node)]
    return [*weights, *(one for node in nodes for one in _saved(node) if one.is_leaf)]


def _before_these(tensors: Iterable[object]) -> list[Any]:
    """The nodes that the gradients of these tensors come to."""
    nodes = [x.grad_fn for x in tensors if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    return list(_reachable(nodes))


def _saved(node: Any) -> list[torch.Tensor]:
    """What a node has saved; nothing if it is done.

    What hooks have made of a saved tensor is not looked at: to ask for it may run a checkpoint.
    """
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # the node is done, and has let go of it
                found += _without_hooks(getattr(node, name))
    return found


def _without_hooks(saved: Any) -> list[torch.Tensor]:
    """The tensor, or the tensors, that autograd keeps by itself."""
    each = saved if isinstance(saved, (list, tuple)) else (saved,)
    data = (one.data for one in each if one is not None and one.unpack_hook is None)
    return [x for x in data if isinstance(x, torch.Tensor)]
