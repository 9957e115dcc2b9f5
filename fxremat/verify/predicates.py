"""What a node is, read off the schema of its operator: the verifier's own answers.

Nothing here comes from the passes that rewrite graphs, so that no mistake of theirs is taken over.
What is shared with them is below all of them: operators of the runtime and `fxremat.compat`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.configuration import OpOverload
from fxremat.compat.joint_graph import REPEATABLE, must_be_in_forward, user_tag
from fxremat.compat.ranks import is_wait, moves_between_ranks, sums_over_ranks
from fxremat.compat.sizes import size_bound
from fxremat.runtime import kernels

_ATEN = torch.ops.aten
UNDECLARED_VIEWS = (
    _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.lift_fresh_copy.default,
    _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default,
)  # fmt: skip
"""They may return their argument's memory, and their schemas do not say so."""
_NAMESPACES = ("aten", "prims", kernels.NAMESPACE)


def schema_of(node: fx.Node) -> Any:
    """The schema of the operator that the node calls; None where it calls none."""
    is_operator = node.op == "call_function" and isinstance(node.target, OpOverload)
    return node.target._schema if is_operator else None  # type: ignore[union-attr]


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that is the node's result; None where the result is none, or several."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's result is one tensor."""
    return tensor_of(node) is not None


def is_mutating(node: fx.Node) -> bool:
    """Whether the call writes into one of its arguments."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


def viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory a call shows; None where its result has memory of its own."""
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return None
    if node.target is operator.getitem:
        return sources[0] if viewed(sources[0]) is not None else None
    if node.target in UNDECLARED_VIEWS or is_wait(node):
        return sources[0]
    schema = schema_of(node)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return None
    return sources[0] if schema.returns[0].alias_info is not None else None


def is_view(node: fx.Node) -> bool:
    """Whether a call only shows its first input's memory."""
    return viewed(node) is not None


def root(node: fx.Node) -> fx.Node:
    """The node that owns the memory which a node shows."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def regroups(node: fx.Node, owner: fx.Node) -> bool:
    """Whether a node shows all elements of its owner, in the same order.

    So it is where both are dense and the strides are those of true views.
    """
    one, other = tensor_of(node), tensor_of(owner)
    if one is None or other is None or not (is_dense(one) and is_dense(other)):
        return False
    return one.numel() == other.numel() and not _may_be_copied(node)


def _may_be_copied(node: fx.Node) -> bool:
    """Whether a reshape on the way may have put the elements into another order."""
    while (base := viewed(node)) is not None:
        shown = tensor_of(base)
        if shown is None or (node.target in UNDECLARED_VIEWS and not is_dense(shown)):
            return True
        node = base
    return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it lies row by row, without gaps; false where its sizes are not known."""
    known = all(type(n) is int for n in (*tensor.shape, *tensor.stride()))
    return known and tensor.is_contiguous()


def is_fetch(node: fx.Node) -> bool:
    """Whether the call brings a graph input from host memory to the device."""
    return _is_called(node, "fxremat::fetch") and node.all_input_nodes[0].op == "placeholder"


def is_put(node: fx.Node) -> bool:
    """Whether the call takes a result of the graph to host memory."""
    return _is_called(node, "fxremat::put")


def _is_called(node: fx.Node, name: str) -> bool:
    schema = schema_of(node)
    return schema is not None and schema.name == name


def is_random(node: fx.Node) -> bool:
    """Whether the call draws random numbers; fused attention does for its dropout alone."""
    schema = schema_of(node)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    if "scaled_dot_product" not in schema.name:
        return True
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    return bool((given | node.kwargs).get("dropout_p"))


def has_effect(node: fx.Node) -> bool:
    """Whether the call gives no tensor and is there for what it does (an assertion)."""
    gives = isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
    return node.op == "call_function" and not gives and bool(node.is_impure())


def counts(node: fx.Node) -> bool:
    """Whether the call computes a number from numbers, as sizes that are symbols are computed."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    if node.op != "call_function" or not isinstance(node.meta.get("val"), numbers):
        return False
    module, name = (getattr(node.target, key, "") for key in ("__module__", "__name__"))
    return module in ("_operator", "math") or name.startswith("sym_")


def is_function(node: fx.Node) -> bool:
    """Whether the call's result follows from its arguments, and nothing else happens."""
    if node.target is operator.getitem or counts(node):
        return True
    schema = schema_of(node)
    if schema is None:
        return bool(node.meta.get(REPEATABLE, False))
    known = schema.name.partition("::")[0] in _NAMESPACES or node.meta.get(REPEATABLE, False)
    happens = schema.is_mutable or is_random(node) or has_effect(node)
    return (known or _is_function_of_ranks(node)) and not happens


def _is_function_of_ranks(node: fx.Node) -> bool:
    """Whether the call gives what all ranks have, moved; or a sum that a checkpoint repeats."""
    if is_wait(node) or moves_between_ranks(node):
        return True
    checkpointed = user_tag(node) in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
    return sums_over_ranks(node) and checkpointed


def is_repeatable(node: fx.Node, mutated: frozenset[fx.Node]) -> bool:
    """Whether the call may run a second time, later: it gives the same, and nobody forbade it.

    ``mutated`` are the graph inputs that the step writes into; what reads them is not run again.
    """
    if node.target is operator.getitem or counts(node):
        return True
    if not is_function(node) or node.meta.get("unbacked_bindings"):
        return False
    told = user_tag(node) == "MUST_SAVE" or node.meta.get("has_backward_hook")
    if must_be_in_forward(node) or (told and not is_view(node)):
        return False
    return not mutated or mutated.isdisjoint(map(root, node.all_input_nodes))


def with_nodes_as(argument: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """An argument of a call, hashable, with something else in the place of its nodes."""
    if isinstance(argument, fx.Node):
        return of_node(argument)
    if isinstance(argument, (tuple, list)):
        kind = "list" if isinstance(argument, list) else "tuple"
        return kind, *(with_nodes_as(one, of_node) for one in argument)
    if isinstance(argument, dict):
        return "dict", *((key, with_nodes_as(one, of_node)) for key, one in argument.items())
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return "slice", *(with_nodes_as(one, of_node) for one in parts)
    return type(argument).__name__, repr(argument)


def results_of(graph: fx.Graph) -> list[Any]:
    (results,) = graph.output_node().args
    assert isinstance(results, (tuple, list))
    return list(results)


def computed_from(nodes: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and all that they are computed from; nothing behind those in ``stop``."""
    found, ends, stack = set[fx.Node](), set(stop), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node in ends else node.all_input_nodes)
    return found


def forms_of(value: Any) -> list[dict[str, Any]]:
    """How each tensor of a value lies in memory; strides only where they matter."""
    return [_form(leaf) for leaf in pytree.tree_leaves(value)]


def _form(leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, torch.Tensor):
        return {"type": type(leaf).__name__}
    sizes = [size_bound(n) for n in leaf.shape]
    strides = [size_bound(s) for s, n in zip(leaf.stride(), sizes, strict=True) if n > 1]
    strides = [] if 0 in sizes else strides
    return {"sizes": sizes, "strides": strides, "dtype": leaf.dtype, "device": leaf.device}
