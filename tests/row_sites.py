"""Sites of a rule, applied to the joint graph of a small step, which is then run node by node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxremat import compat
from fxremat.compiling.pipeline import prepare
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.chunks.rules import RULES
from fxremat.passes.variants.rule import Rule, Site
from tests.graphs import train

Function = Callable[..., Any]


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all it is computed from."""
    found, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def in_order(graph: fx.Graph) -> fx.Graph:
    """The graph with every node behind what it reads, the old order kept where that is possible."""
    sorted_graph, done = fx.Graph(), dict[fx.Node, fx.Node]()

    def add(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in done:
                add(source)
        if node not in done:
            done[node] = sorted_graph.node_copy(node, done.__getitem__)

    for node in graph.nodes:
        add(node)
    return sorted_graph


def applied(module: fx.GraphModule, site: Site) -> fx.GraphModule:
    """A copy of the joint graph in which all readers read the stand-ins."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node, twin in copies.items():
        twin.meta = dict(node.meta)
    graph.output_node().meta = dict(module.graph.output_node().meta)
    found = site.insert(graph, copies)
    before = {new: ancestors(new) for new in found.values()}
    assert found
    for old, new in found.items():
        one, other = old.meta["val"], new.meta["val"]
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        for user in list(old.users):
            if user not in before[new]:
                user.replace_input_with(old, new)
    graph = in_order(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)


@dataclass
class Chunked:
    """A partition function that applies one site, the ``form``th of a rule; None applies none."""

    rule: Rule
    form: int | None = 0
    names: list[str] = field(default_factory=list)
    joint: JointGraph = field(init=False)
    module: fx.GraphModule = field(init=False)

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> Any:
        """Called with the joint graph."""
        self.joint = prepare(module, num_fwd_outputs)
        sites = list(self.rule.find(self.joint))
        self.names = [site.name for site in sites]
        assert len(set(self.names)) == len(sites)
        self.module = self.joint.module
        if self.form is not None and self.form < len(sites):
            self.module = applied(self.joint.module, sites[self.form])
        kwargs["num_fwd_outputs"] = num_fwd_outputs
        return compat.default_partition(copy.copy(self.module), joint_inputs, **kwargs)

    def compiled(self, function: Function) -> Function:
        """``function``, run as the joint graph with the site."""

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            return compat.trace_as_inductor(gm, inputs, {}, self)

        torch._dynamo.reset()
        return torch.compile(function, backend=backend)


def in_double(thing: Any) -> Any:
    """Modules and tensors of floats in float64."""
    thing = copy.deepcopy(thing)
    if isinstance(thing, nn.Module):
        return thing.double()
    is_float = isinstance(thing, torch.Tensor) and thing.is_floating_point()
    return thing.detach().double().requires_grad_(thing.requires_grad) if is_float else thing


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    """Close, relative to the largest entry; infinities and NaN in the same places."""
    assert (one is None) == (other is None)
    if not isinstance(one, torch.Tensor):
        assert one == other
        return
    one, other = one.double(), other.double()
    assert torch.equal(one.isfinite(), other.isfinite())
    scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0
    error = (one - other)[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0
    assert error <= tolerance * max(scale, 1e-6), (error, scale)


def names_of(function: Function, inputs: Sequence[Any], rule: Rule) -> list[str]:
    """The sites of a rule in the step of a function."""
    seen = Chunked(rule, None)
    train(function, inputs, seen.compiled)
    return seen.names


def all_names(function: Function, inputs: Sequence[Any]) -> list[str]:
    """The sites of all rules."""
    return [name for rule in RULES for name in names_of(function, inputs, rule)]


def check(
    function: Function, inputs: Sequence[Any], rule: Rule, tolerance: float = 2e-5
) -> list[Chunked]:
    """Every site of the rule gives the values and gradients of the step; at least one is there.

    Compared with float64 and with the graph as it was.
    """
    exact = train(in_double(function), [in_double(x) for x in inputs])
    plain = Chunked(rule, None)
    before = train(function, inputs, plain.compiled)
    assert plain.names
    done = []
    for form in range(len(plain.names)):
        seen = Chunked(rule, form)
        after = train(function, inputs, seen.compiled)
        for one, other, best in zip(
            (*after.results, *after.gradients),
            (*before.results, *before.gradients),
            (*exact.results, *exact.gradients),
            strict=True,
        ):
            assert_close(one, other, tolerance)
            assert_close(one, best, tolerance)
        done.append(seen)
    return done
