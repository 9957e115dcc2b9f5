"""Operator variants: rules, put beside the ops of a joint graph to choose from, and taken.

    h ── gelu ── y ── mm            h ── gelu ── y ── mm            h ── other ── y' ── mm
                                    h ── other ── y'
    the graph                       inserted                        taken

A `Site` of a `Rule` names nodes of the graph and can put other nodes beside them that compute the
same. Nothing that is there changes: who reads what is decided later, by the plan. A *stand-in* is a
new node that may be read in place of an old one: y' of y. Sites that name the same old node exclude
one another: at most one of them is taken.

A reader reads the stand-in in place of the old node, unless the stand-in is computed from that
reader. A stand-in of the backward is read in the backward alone. Nodes that nobody needs once
variants are taken are removed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.joint_graph import copy_module
from fxremat.compat.sizes import size_bound
from fxremat.core.constants import NEGLIGIBLE_PART
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import (
    IN_FORWARD,
    STORED,
    JointGraph,
    Role,
    is_view,
    read_joint_graph,
)
from fxremat.passes.nodes import Add, Ancestry, adder

StandIns = dict[fx.Node, fx.Node]


@dataclass(frozen=True)
class Target:
    """The graph that sites are put into: a copy of the one that they were found in.

    Called with a node of the latter it gives the copy.
    """

    graph: fx.Graph
    copies: Mapping[fx.Node, fx.Node]

    def __call__(self, node: fx.Node) -> fx.Node:
        return self.copies[node]

    def before(self, node: fx.Node, like: fx.Node | None = None) -> Add:
        """It adds calls right before a node of the copy, described like it or like another."""
        return adder(self.graph, like or node, node)

    def behind(self, node: fx.Node, like: fx.Node | None = None) -> Add:
        """The same right behind a node, one call behind the other."""
        return adder(self.graph, like or node, node.next)


@dataclass(frozen=True)
class Site:
    """One occurrence of a rule, as one variant.

    ``name`` is unique in the graph, and the same in every run. ``insert`` puts the new nodes in,
    with ``meta["val"]``, where everything they read has been computed, and returns the stand-ins
    of nodes that `find` was given: sizes, strides and dtypes of old and new are the same.
    """

    rule: str
    name: str
    insert: Callable[[Target], StandIns]
    backward_only: bool = False
    """Whether the stand-ins are for readers in the backward alone, and computed for these."""
    spares: fx.Node | None = None
    """The call whose workspace is all that the variant saves, if it is that."""


@dataclass(frozen=True)
class Rule:
    """A row of the table of variants. ``line`` says in one line what it is, for the user."""

    name: str
    line: str
    find: Callable[[JointGraph], Iterable[Site]]
    lossy: bool = False
    by_default: bool = True
    """Whether it is tried where no rules are named."""


@dataclass(frozen=True)
class InsertedVariant:
    """A site whose nodes stand in a graph."""

    name: str
    rule: str
    nodes: tuple[fx.Node, ...]
    stand_ins: Mapping[fx.Node, fx.Node]
    ancestry: Ancestry
    """What the nodes of the graph are computed from, those of variants included."""
    backward_only: frozenset[fx.Node]
    """Stand-ins that only the backward reads."""
    forward_readers: frozenset[fx.Node]
    """Old readers that run in the forward."""

    def read_by(self, reader: fx.Node, source: fx.Node) -> fx.Node:
        """What ``reader`` reads in place of ``source``."""
        new = self.stand_ins.get(source)
        if (
            new is None
            or self.ancestry.depends(new, reader)
            or (new in self.backward_only and reader in self.forward_readers)
        ):
            return source
        return new

    def redirected(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(old node, reader) for all readers that read a stand-in; results of the graph apart."""
        for old in self.stand_ins:
            for reader in old.users:
                if reader.op != "output" and self.read_by(reader, old) is not old:
                    yield old, reader

    def result(self, old: fx.Node, of_forward: bool) -> fx.Node:
        """What the graph returns in place of ``old``; the forward's has to be there by its end."""
        new = self.stand_ins.get(old, old)
        return old if of_forward and new in self.backward_only else new

    def root_of_result(self, old: fx.Node, of_forward: bool) -> fx.Node:
        """The node that owns the storage which the graph returns in place of that of ``old``."""
        node = self.result(old, of_forward)
        while is_view(node):
            node = self.read_by(node, node.all_input_nodes[0])
        return node


@dataclass(frozen=True)
class GraphWithVariants:
    """A copy of the joint graph with all variants beside the ops."""

    joint: JointGraph
    inserted: tuple[InsertedVariant, ...]


def find_sites(
    joint: JointGraph, rules: Sequence[Rule], workspace: Callable[[fx.Node], int] = lambda call: 0
) -> tuple[Site, ...]:
    """The sites where the rules fit and may matter for the peak; their names are unique.

    Some sites spare nothing but the ``workspace`` of a call, in bytes. They count only if that is a
    good part of what the call holds, and if no other call holds much more.
    """
    sites = [site for rule in rules for site in rule.find(joint)]
    if all(site.spares is None for site in sites):
        return tuple(sites)
    spared = {site.spares: workspace(site.spares) for site in sites if site.spares is not None}
    held = {node: _held_bytes(node) + spared.get(node, 0) for node in joint.module.graph.nodes}
    least = NEGLIGIBLE_PART * max(held.values())
    worth = {
        call
        for call, nbytes in spared.items()
        if nbytes >= NEGLIGIBLE_PART * held[call] and held[call] >= least
    }
    return tuple(site for site in sites if site.spares is None or site.spares in worth)


def _held_bytes(node: fx.Node) -> int:
    """The bytes that a call reads, and those that it gives."""
    if node.op != "call_function" or is_view(node):
        return 0
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    tensors = [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
    return sum(size_bound(one.numel()) * one.dtype.itemsize for one in tensors)


def insert_all(joint: JointGraph, sites: Iterable[Site]) -> GraphWithVariants:
    """All sites put into a copy of the graph; nothing that was there reads what is new."""
    copies: dict[fx.Node, fx.Node] = {}
    copied = read_joint_graph(copy_module(joint.module, copies), joint.num_forward_outputs)
    inserting = _Inserting(copied, copies)
    inserted = tuple(map(inserting.insert, sites))
    copied.module.graph.lint()
    return GraphWithVariants(copied, inserted)


def take(joint: JointGraph, sites: Sequence[Site]) -> JointGraph:
    """A copy of the graph in these variants, without what nobody needs any more."""
    return take_with_inserted(joint, sites)[0]


def take_with_inserted(
    joint: JointGraph, sites: Sequence[Site]
) -> tuple[JointGraph, tuple[InsertedVariant, ...]]:
    offered = insert_all(joint, sites)
    module, role, results = offered.joint.module, offered.joint.role, list(offered.joint.results)
    for variant in offered.inserted:
        for node in variant.nodes:
            if role[node] is Role.FORWARD:
                node.meta[IN_FORWARD] = True
        for old, reader in list(variant.redirected()):
            reader.replace_input_with(old, variant.read_by(reader, old))
        for index, one in enumerate(results):
            if isinstance(one, fx.Node):
                results[index] = variant.result(one, index < joint.num_forward_outputs)
    new = [node for variant in offered.inserted for node in variant.nodes]
    _move_to_readers([node for node in new if role[node] is not Role.FORWARD])
    _sort(module.graph)
    module.graph.output_node().args = (tuple(results),)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return read_joint_graph(module, joint.num_forward_outputs), offered.inserted


class _Inserting:
    """Sites put into a graph, one after the other.

    What is asked of the whole graph is kept up, and not looked for again at each of many sites.
    """

    def __init__(self, joint: JointGraph, copies: Mapping[fx.Node, fx.Node]) -> None:
        self.graph, self.role = joint.module.graph, joint.role
        self.target = Target(self.graph, copies)
        self.forward_results = joint.forward_outputs
        self.known = set(self.graph.nodes)
        self.ancestry = Ancestry(self.graph.nodes)
        self.last: fx.Node | None = None
        """The last node of the forward."""
        self.first: fx.Node | None = None
        """The first node that depends on a tangent."""
        self._see(self.graph.nodes)

    def _see(self, nodes: Iterable[fx.Node]) -> None:
        """Where the forward ends and the backward begins, with these as well."""
        for node in nodes:
            if node.op == "call_function" and self.role[node] is Role.FORWARD:
                self.last = node if self.last is None else max(self.last, node)
            elif node.op == "call_function" and self.role[node] is Role.BACKWARD:
                self.first = node if self.first is None else min(self.first, node)

    def insert(self, site: Site) -> InsertedVariant:
        role = self.role
        stand_ins = {self.target(old): new for old, new in site.insert(self.target).items()}
        nodes = tuple(node for node in self.graph.nodes if node not in self.known)
        self.known.update(nodes)
        self.ancestry.add(nodes)
        depends = self.ancestry.depends
        returned = {stand_ins[old] for old in self.forward_results if old in stand_ins}
        rebuilt = {
            new for old, new in stand_ins.items() if site.backward_only or depends(new, old)
        } - returned
        early = {new for old, new in stand_ins.items() if role[old] is Role.FORWARD} - rebuilt
        needed = {node for node in nodes if any(depends(new, node) for new in early)}
        self._give_roles(nodes, needed, rebuilt)
        for index, node in enumerate(nodes):
            stored = STORED if STORED in node.meta else ""
            node._rename(f"{re.sub('[^0-9a-zA-Z]+', '_', site.name)}_{index}{stored}")
        return InsertedVariant(
            name=site.name,
            rule=site.rule,
            nodes=nodes,
            stand_ins=stand_ins,
            ancestry=self.ancestry,
            backward_only=frozenset(
                new
                for new in stand_ins.values()
                if role[new] is not Role.FORWARD or (site.backward_only and new in rebuilt)
            ),
            forward_readers=frozenset(
                reader for old in stand_ins for reader in old.users if role[reader] is Role.FORWARD
            ),
        )

    def _give_roles(
        self, nodes: Sequence[fx.Node], needed: Container[fx.Node], rebuilt: Container[fx.Node]
    ) -> None:
        """The roles of new nodes: those that stand in the forward belong to it.

        So does, wherever it stands, what stand-ins for values of the forward are computed from
        (``needed``), but for those that are ``rebuilt`` from the very values that they stand in
        for. Between the last node of the forward and the first of the backward, what reads only new
        nodes belongs to the backward.
        """
        new, role = set(nodes), self.role
        for node in nodes:
            inputs = {role[i] for i in node.all_input_nodes}
            is_late = self.first is not None and node > self.first
            between = not is_late and (self.last is None or node > self.last)
            kept = node not in rebuilt and any(i not in new for i in node.all_input_nodes)
            if Role.BACKWARD in inputs:
                role[node] = Role.BACKWARD
            elif node.target is operator.getitem:  # an item is there as soon as its call has run
                (role[node],) = inputs
            elif node in needed:
                role[node] = Role.FORWARD
            elif is_late or Role.LAZY in inputs or (between and not kept):
                role[node] = Role.LAZY
            else:
                role[node] = Role.FORWARD
        self._see(nodes)


def _move_to_readers(nodes: Sequence[fx.Node]) -> None:
    """Put each right before what first reads it, but for the graph's results; in their order.

    There the planner has them as long as it chooses (`fxremat.core.variants.take`).
    """
    first_moved: dict[fx.Node, fx.Node] = {}
    for node in reversed(nodes):
        readers = [user for user in node.users if user.op != "output"]
        if readers:
            reader = min(readers)
            first_moved.get(reader, reader).prepend(node)
            first_moved[reader] = node


def _sort(graph: fx.Graph) -> None:
    """Put what is read before what reads it; everything else stays in order."""
    placed: set[fx.Node] = set()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            waiting = [i for i in stack[-1].all_input_nodes if i not in placed]
            if waiting:
                stack.extend(waiting)
                continue
            ready = stack.pop()
            if ready not in placed:
                placed.add(ready)
                if ready is not node:
                    node.prepend(ready)


@dataclass(frozen=True)
class TakeVariants(Pass):
    """Takes sites that were found in a joint graph, of which it makes another.

    ``Changed.data`` are the new `JointGraph` and the variants that were inserted.
    """

    name = "variants"
    joint: JointGraph
    sites: tuple[Site, ...]

    def requires(self, module: fx.GraphModule) -> None:
        self.demand(module is self.joint.module, "the graph is not the one that was read")

    def call(self, module: fx.GraphModule) -> Changed:
        """Leaves the graph as it is where there is nothing to take."""
        if not self.sites:
            return Changed(module, False, (self.joint, ()))
        joint, taken = take_with_inserted(self.joint, self.sites)
        return Changed(joint.module, True, (joint, taken))
