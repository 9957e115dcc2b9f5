"""Apply the moves of a plan: calls that start a copy to host memory or back, and that wait for it.

    plan:   a  to host: a  b  wait: a  ...  to device: a  b'  wait: a  a'
    graph:  a;  h = to_host(a);  b;  wait_host(h, a);  ...
            a_2 = to_device(h);  b' ;  wait_device(a_2, h);  a' reads a_2

The forward saves the host tensor ``h`` in place of ``a``. A wait has what its copy reads as an
argument, so that this lives until then. It changes what its copy writes, so that no reader comes
before it. From the wait on, ``a_2`` stands for ``a``: later readers, views and moves read it.

Where the graph itself fetches a parameter from host memory, the host tensor is that graph input.
Where it puts a gradient there, the host tensor becomes that result of the graph. Such a graph ends
with a call that lets the host wait: optimizers read gradients, and write parameters, right after
the backward.

Two gradients of one parameter are added on the device, before they leave:

    add(put(a), put(b))   becomes   put(add(a, b))
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat import runtime
from fxremat.passes.base import Changed, Pass, in_place
from fxremat.passes.joint_graph import is_put
from fxremat.passes.nodes import add_call, packet_name

MOVED = "_moved"
"""Names of the calls have this, for `passes.fixed_order` to hold them where they are."""


def arrived_value(name: str) -> str | None:
    """The value that a node of this name brings back from the host; None where it brings none."""
    call = re.fullmatch(f"to_device_(.+){MOVED}(_\\d+)?", name)
    return None if call is None else call[1]


def _adds_what_left(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(n, fx.Node) and is_put(n) and len(n.users) == 1 for n in node.args)


@dataclass
class Mover:
    """Appends moves to a graph; all fields are by the name of the moved value.

    ``leaving`` are the tensors being copied to the host, ``arriving`` those being copied to.
    """

    graph: fx.Graph
    host_tensors: dict[str, fx.Node] = field(default_factory=dict)
    leaving: dict[str, fx.Node] = field(default_factory=dict)
    arriving: dict[str, fx.Node] = field(default_factory=dict)

    def to_host(self, name: str, current: fx.Node, half: str) -> fx.Node:
        """Start copying the tensor ``current`` to a new host tensor, which is returned."""
        self.leaving[name] = current
        self.host_tensors[name] = self._call(runtime.to_host, (current,), name, current, half)
        return self.host_tensors[name]

    def to_device(self, name: str, host: fx.Node, like: fx.Node, half: str) -> None:
        """Start copying a host tensor to a new tensor like that of a node."""
        device = like.meta["val"].device
        self.arriving[name] = self._call(runtime.to_device, (host, device), name, like, half)
        self.host_tensors[name] = host

    def wait(self, name: str, half: str) -> fx.Node | None:
        """Wait for the copy under way; the new device tensor if the value comes from the host."""
        host = self.host_tensors[name]
        if name in self.leaving:
            left = self.leaving.pop(name)
            self._call(runtime.wait_host, (host, left), name, left, half)
            return None
        arrived = self.arriving.pop(name)
        self._call(runtime.wait_device, (arrived, host), name, arrived, half)
        return arrived

    def settle(self, name: str, device: torch.device) -> None:
        """End the backward: the host waits for the device, which has waited for all copies."""
        host = self.host_tensors[name]
        self._call(runtime.settle, (host, device), name, host, "backward")

    def _call(
        self, op: object, arguments: tuple[object, ...], name: str, like: fx.Node, half: str
    ) -> fx.Node:
        node = add_call(self.graph, op, arguments, like)
        node.meta["fwd_nn_module_stack"] = like.meta.get("fwd_nn_module_stack", {})
        node.meta["partitioner_tag"] = f"must_be_in_{half}"  # torch repeats it in both if it can
        node._rename(f"{packet_name(node)}_{name}{MOVED}")
        return node


@dataclass(frozen=True)
class AddBeforePutting(Pass):
    """Adds two gradients of one parameter on the device, before they leave it."""

    name = "sums before leaving"

    def call(self, module: fx.GraphModule) -> Changed:
        graph, found = module.graph, False
        for node in list(graph.nodes):
            if not _adds_what_left(node):
                continue
            found, summands = True, node.args
            parts = tuple(summand.args[0] for summand in summands)
            with graph.inserting_before(node):
                total = add_call(graph, node.target, parts, parts[0])
                gathered = add_call(graph, summands[0].target, (total,), summands[0])
            node.replace_all_uses_with(gathered)
            for old in dict.fromkeys((node, *summands)):
                graph.erase_node(old)
        return in_place(module, found)

    def ensures(self, module: fx.GraphModule) -> None:
        """No sum is left whose summands leave only for it."""
        for node in module.graph.nodes:
            self.demand(not _adds_what_left(node), f"{node.name} adds what has left the device")
