"""Say where the gradient of a parameter is complete: it may be added to its ``grad`` there.

    before:  ...  g = mm(...)                        ...  return g
    after:   ...  g = mm(...)  accumulated(g, w)     ...  return g

``w`` is an input of the graph, and ``g`` the gradient that the graph returns for it. In the planned
graph the call stands behind all that reads ``g`` or its memory. For the planner that memory ends
there: the gradient is no output that has to stay. The ``grad`` of ``w`` is there from the
beginning, and belongs to what the graph cannot see.

It is done for gradients that the backward computes, each in memory of its own. Whether a gradient
is then added is decided when the graph runs (`fxremat.runtime.gradients.accumulation`). The graph
cannot know whether an input that it reads later shares memory with a ``grad``. So, once the graph
has its final order, each call names the inputs that are read after it. Tensors of modules,
parameters above all, are not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat import runtime
from fxremat.compat.inductor.post_grad import is_noop_to_inductor
from fxremat.compat.joint_graph import input_index
from fxremat.compat.sizes import size_bound
from fxremat.core.problem import Op
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_put,
    is_tensor,
    read_joint_graph,
    root,
)

LASTING = "fxremat_lasting"
"""In the ``meta`` of inputs that belong to a module: none of them is a gradient."""


def accumulate(
    joint: JointGraph, parameters: Collection[int], lasting: Collection[int]
) -> JointGraph:
    """Insert a call ``accumulated`` for each gradient of ``parameters`` that may be added early.

    ``parameters`` are input positions, and ``lasting`` those of inputs that belong to modules.
    """
    results = joint.results[joint.num_forward_outputs :]
    if len(results) != len(joint.primals):
        return joint
    owners = Counter(root(one) for one in joint.results if isinstance(one, fx.Node))
    found = [
        (result, weight)
        for result, weight in zip(results, joint.primals, strict=True)
        if input_index(weight) in parameters
        and isinstance(result, fx.Node)
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
        _insert(joint.module.graph, result, weight)
    joint.module.recompile()
    return read_joint_graph(joint.module, joint.num_forward_outputs)


def _may_be_added(joint: JointGraph, result: fx.Node, weight: fx.Node) -> bool:
    owner, gradient, value = root(result), result.meta["val"], weight.meta["val"]
    return (
        joint.role[owner] is Role.BACKWARD
        and owner.op == "call_function"
        and is_tensor(owner)
        and not is_put(owner)
        and not _may_be_another(owner)
        and _count(owner) == _count(result)
        and gradient.dtype == value.dtype
        and gradient.device == value.device
        and list(map(size_bound, gradient.shape)) == list(value.shape)
    )


def _count(node: fx.Node) -> int:
    """Elements of the node's tensor; asks nothing about dynamic sizes."""
    return size_bound(node.meta["val"].numel())


def _may_be_another(owner: fx.Node) -> bool:
    """Whether Inductor may return what is copied in place of the copy."""
    alike = [
        source
        for source in owner.all_input_nodes
        if is_tensor(source)
        and source.meta["val"].dtype == owner.meta["val"].dtype
        and _count(source) == _count(owner)
    ]
    return bool(alike) and is_noop_to_inductor(owner)


def _insert(graph: fx.Graph, result: fx.Node, weight: fx.Node) -> None:
    with graph.inserting_after(result):
        node = graph.call_function(runtime.accumulated, (result, weight, []))
    node.meta["val"] = None
    node.meta["partitioner_tag"] = "must_be_in_backward"
    node._rename(f"accumulated_{result.name}")


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
        """No gradient is accumulated yet."""
        calls = [n.name for n in _accumulated_calls(module.graph)]
        self.demand(not calls, f"{calls} have been put in before")

    def call(self, module: fx.GraphModule) -> Changed:
        """Works in place."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        new = accumulate(joint, self.parameters, self.lasting)
        return Changed(new.module, new is not joint, new)

    def ensures(self, module: fx.GraphModule) -> None:
        """What is accumulated is a result of the backward, for one of the ``parameters``."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        for node in _accumulated_calls(module.graph):
            result, weight = node.all_input_nodes[:2]
            self.demand(result in joint.backward_outputs, f"{result.name} is no gradient")
            asked = input_index(weight) in self.parameters
            self.demand(asked, f"{weight.name} is no parameter that was asked for")


def _accumulated_calls(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=runtime.accumulated))
