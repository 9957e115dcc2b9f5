"""Say where the gradient of a parameter is complete.

    before:  ...  g = mm(...)                        ...  return g
    after:   ...  g = mm(...)  accumulated(g, w)     ...  return g

``w`` is an input of the graph, and ``g`` the gradient that the graph returns for it. There it may
be added to ``w.grad``. The call stands behind all that reads ``g`` or its memory, and for the
planner that memory ends there. It is done for gradients that the backward computes, each in memory
of its own.

    before:  ...  wait_host(g, x)  ...  wait_device(w_2, w)  ...  settle;  return g
    after:   ...  wait_host(g, x)  ...  wait_device(w_2, w)  arrived(g, w)  ...  settle;  return g

Here ``g`` is in host memory and ``w`` is read no more, so that its optimizer may step. It is done
for weights that the graph only fetches, and for gradients that it only returns.

What happens is decided when the graph runs (`fxremat.runtime`). The graph cannot know
which of its inputs share memory, so the calls name inputs that are read after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fxremat import runtime
from fxremat.compat.configuration import OpOverload
from fxremat.compat.inductor.post_grad import is_noop_to_inductor
from fxremat.compat.joint_graph import input_index
from fxremat.compat.sizes import size_bound
from fxremat.core.problem import Op
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_fetch,
    is_put,
    is_tensor,
    read_joint_graph,
    root,
)
from fxremat.passes.offload import MOVED

LASTING = "fxremat_lasting"
"""In the ``meta`` of inputs that belong to a module: none of them is a gradient."""


def accumulate(
    joint: JointGraph, parameters: Collection[int], lasting: Collection[int]
) -> JointGraph:
    """Insert a call ``accumulated`` for each gradient of ``parameters`` that may be added early.

    ``parameters`` are input positions, and ``lasting`` those of inputs that belong to modules.
    """
    owners = Counter(root(one) for one in joint.results if isinstance(one, fx.Node))
    found = [
        (result, weight)
        for result, weight in _gradients(joint)
        if input_index(weight) in parameters
        and owners[root(result)] == 1
        and weight not in joint.mutated
        and _may_be_added(joint, result, weight)
    ]
    if not found:
        return joint
    for index, node in enumerate(joint.primals):
        if index in lasting:
            node.meta[LASTING] = True
    for result, weight in found:
        node = _insert_behind(result, runtime.accumulated, (result, weight, []))
        node._rename(f"accumulated_{result.name}")
    joint.module.recompile()
    return read_joint_graph(joint.module, joint.num_forward_outputs)


def _gradients(joint: JointGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each gradient that the graph returns, and the input that it is for."""
    results = joint.results[joint.num_forward_outputs :]
    if len(results) == len(joint.primals):
        for result, weight in zip(results, joint.primals, strict=True):
            if isinstance(result, fx.Node):
                yield result, weight


def _may_be_added(joint: JointGraph, result: fx.Node, weight: fx.Node) -> bool:
    owner, gradient, value = root(result), result.meta["val"], weight.meta["val"]
    alike = (gradient.dtype, gradient.device) == (value.dtype, value.device)
    return (
        alike
        and list(map(size_bound, gradient.shape)) == list(value.shape)
        and joint.role[owner] is Role.BACKWARD
        and owner.op == "call_function"
        and is_tensor(owner)
        and not is_put(owner)
        and _count(owner) == _count(result)
        and not _may_be_another(owner)
    )


def _count(node: fx.Node) -> int:
    """Elements of the node's tensor; asks nothing about dynamic sizes."""
    return size_bound(node.meta["val"].numel())


def _may_be_another(owner: fx.Node) -> bool:
    """Whether Inductor may return what is copied in place of the copy."""
    alike = any(
        source.meta["val"].dtype == owner.meta["val"].dtype and _count(source) == _count(owner)
        for source in filter(is_tensor, owner.all_input_nodes)
    )
    return alike and is_noop_to_inductor(owner)


def _insert_behind(anchor: fx.Node, target: OpOverload, arguments: tuple[Any, ...]) -> fx.Node:
    with anchor.graph.inserting_after(anchor):
        node = anchor.graph.call_function(target, arguments)
    node.meta["val"] = None
    node.meta["partitioner_tag"] = "must_be_in_backward"
    return node


def is_accumulated(joint: JointGraph, result: fx.Node) -> bool:
    """Whether the memory of a gradient ends before the end of the graph, in an ``accumulated``."""
    calls = (user.target is runtime.accumulated for user in result.users)
    return joint.role[root(result)] is Role.BACKWARD and any(calls)


def after_last_use(ops: Sequence[Op], gradient_of: Mapping[str, str]) -> list[Op]:
    """The ops, each ``accumulated`` right behind the last op that touches its gradient.

    ``gradient_of`` maps the names of these ops to the gradients' values.
    """
    rest = [op for op in ops if op.name not in gradient_of]
    last = {name: i for i, op in enumerate(rest) for name in (*op.reads, *op.writes)}
    place = {op.name: float(i) for i, op in enumerate(rest)}
    place |= {name: last[value] + 0.5 for name, value in gradient_of.items()}
    return sorted(ops, key=lambda op: place[op.name])


def name_later_reads(graph: fx.Graph, backward: Sequence[fx.Node]) -> None:
    """Give each ``accumulated`` the inputs that are read after it.

    ``backward`` are the nodes of that half of the planned graph. Where a variant computes the
    gradient in the forward, the call is erased: what the forward saves belongs to autograd.
    """
    inside = set(backward)
    later: dict[fx.Node, None] = {}
    for node in reversed(backward):
        if node.target is not runtime.accumulated:
            read = (_from_outside(n, inside) for n in node.all_input_nodes)
            later.update(dict.fromkeys(n for n in read if n is not None))
        elif root(node.args[0]) in inside:  # type: ignore[arg-type]
            node.args = (*node.args[:2], list(later))
        else:
            graph.erase_node(node)


def _from_outside(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node | None:
    """What reaches the backward from outside when it reads ``node``.

    None where that is no input of the graph, or one that belongs to a module.
    """
    owner = root(node)
    if owner.op != "placeholder" or not is_tensor(node) or LASTING in owner.meta:
        return None
    while node in inside:
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class Accumulation(Pass):
    """Marks where gradients of ``parameters`` are complete. ``Changed.data`` is the `JointGraph`.

    ``parameters`` and ``lasting``, the inputs that belong to modules, are input positions.
    """

    name = "accumulation"
    num_forward_outputs: int
    parameters: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()

    def requires(self, module: fx.GraphModule) -> None:
        calls = module.graph.find_nodes(op="call_function", target=runtime.accumulated)
        self.demand(not calls, f"{list(calls)} have been put in before")

    def call(self, module: fx.GraphModule) -> Changed:
        joint = read_joint_graph(module, self.num_forward_outputs)
        new = accumulate(joint, self.parameters, self.lasting)
        return Changed(new.module, new is not joint, new)

    def ensures(self, module: fx.GraphModule) -> None:
        """What is accumulated is a result of the backward, for one of the ``parameters``."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        for node in module.graph.find_nodes(op="call_function", target=runtime.accumulated):
            result, weight = node.all_input_nodes[:2]
            self.demand(result in joint.backward_outputs, f"{result.name} is no gradient")
            asked = input_index(weight) in self.parameters
            self.demand(asked, f"{weight.name} is no parameter that was asked for")


# --- optimizer steps --------------------------------------------------------------------------


HOST = torch.device("cpu")


class Gradient(NamedTuple):
    """What a graph returns for an input, both in host memory; ``device`` is where it was made."""

    result: fx.Node
    weight: fx.Node
    device: torch.device


def host_gradients(joint: JointGraph) -> list[Gradient]:
    """The gradients that a joint graph puts to host memory and only returns."""
    return [
        Gradient(result, weight, result.all_input_nodes[0].meta["val"].device)
        for result, weight in _gradients(joint)
        if is_put(result)
        and len(result.users) == 1
        and joint.backward_outputs.count(result) == 1
        and weight not in joint.mutated
        and all(map(is_fetch, weight.users))
    ]


def insert_arrived(gradients: Sequence[Gradient], backward: Sequence[fx.Node]) -> None:
    """Insert a call ``arrived`` for each gradient; ``backward`` are the nodes of that half."""
    position = {node: index for index, node in enumerate(backward)}
    last = {
        one: max(position.get(n, -1) for n in (one.result, *one.result.users, *one.weight.users))
        for one in gradients
        if one.result in position
    }
    in_order = sorted(last, key=last.__getitem__)
    if not in_order:
        return
    behind = backward[last[in_order[0]] + 1 :]
    read = (*(gradient.weight for gradient in in_order[1:]), *_inputs_read(behind, position))
    for gradient in reversed(in_order):  # the first of two at the same place comes first
        result, weight, device = gradient
        others = [one for one in dict.fromkeys(read) if one is not weight]
        arguments = (result, weight, others if gradient is in_order[0] else [], device)
        node = _insert_behind(backward[last[gradient]], runtime.arrived, arguments)
        node._rename(f"arrived_{result.name.removesuffix(MOVED)}{MOVED}")


def _inputs_read(nodes: Sequence[fx.Node], own: Container[fx.Node]) -> list[fx.Node]:
    """What ``nodes`` read of the graph's inputs on the host, themselves or as views."""
    outside = (n for node in nodes for n in node.all_input_nodes if n not in own)
    return [
        node
        for node in dict.fromkeys(outside)
        if root(node).op == "placeholder" and is_tensor(node) and node.meta["val"].device == HOST
    ]
