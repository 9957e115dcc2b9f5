"""Apply a plan: rewrite the joint graph so that its nodes stand in the planned order.

The forward's ops come first, then the backward's. An op that runs for the first time keeps its
nodes. An op that runs again is copied with its whole recompute slice, and every later reader of its
values reads the copy.

    plan:  a b c | c' b'          plan:  a b c | a b c' b'
    fwd:   a b c                  fwd:   a b c
    bwd:   c' b', reads a, b      bwd:   a_recompute b_recompute c' b', reads inputs alone

Values that move to host memory and back: see `passes.offload`. Gradients that leave or are added
up: see `passes.accumulation`.

This is sound because only ops that give the same result every time are run again
(`is_repeatable`), and because a copy reads the latest copies of the values that the op reads. Views
and cheap loops of the forward are copied for each op of the backward that needs them, right before
it. Left where the forward had them, they would hold memory.

The end of a short computation is saved, not its beginning, where that takes no more memory: a norm
keeps what its reduction wrote, and Inductor would compute the few ops behind it again in each loop.

    forward   x -> var_mean -> var -> add -> rsqrt -> ...    saved: var,   then rsqrt
    backward  var -> add_inline -> rsqrt_inline -> ...       reads rsqrt
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxremat.compat.joint_graph import module_of
from fxremat.compat.ranks import is_wait
from fxremat.core.constants import NEGLIGIBLE_PART
from fxremat.core.schedule import Move, Step
from fxremat.passes.accumulation import host_gradients, insert_arrived, name_later_reads
from fxremat.passes.base import Changed, Pass
from fxremat.passes.halves import FREE, INLINED, RECOMPUTED, WRITTEN, Rewritten
from fxremat.passes.joint_graph import Role, is_repeatable, is_tensor, is_view
from fxremat.passes.materialisation import is_fusable, is_reduction
from fxremat.passes.memory_estimation import TANGENTS, Estimate, RecomputeSlice, nbytes
from fxremat.passes.nodes import Lookup, copy_named
from fxremat.passes.offload import Mover
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import dump, parse


@dataclass
class _PlanWriter:
    """Builds the new graph; ``env`` maps each old node to its latest copy.

    ``mark`` goes to the names of values of loops in the steps that come now, which belong to
    ``half``.
    """

    estimate: Estimate
    mark: str = ""
    half: str = "forward"
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    views: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joint = self.estimate.joint
        self.results = self.joint.result_roots()
        self.mover = Mover(self.graph)
        self.last_put: str | None = None  # the last value that was put to the host as a result

    def copy(self, node: fx.Node, lookup: Lookup, suffix: str = "") -> fx.Node:
        new = copy_named(self.graph, node, lookup, node.name + suffix)
        is_call = node.op == "call_function" and not is_view(node)
        if is_call and not is_repeatable(node, self.joint.mutated):
            # torch repeats impure calls in the other half if it can
            half = "forward" if self.joint.role[node] is Role.FORWARD else "backward"
            new.meta["partitioner_tag"] = f"must_be_in_{half}"
        elif is_wait(node):
            new.meta["partitioner_tag"] = f"must_be_in_{self.half}"
        if suffix:
            new.meta.pop("recompute", None)
        return new

    def resolve(self, node: fx.Node) -> fx.Node:
        """The latest copy of ``node``; what belongs to no op is copied when it is first needed."""
        if node not in self.env:
            for source in node.all_input_nodes:
                self.resolve(source)
            self.env[node] = self.copy(node, self.env.__getitem__)
        return self.env[node]

    def lookup_in(self, private: dict[fx.Node, fx.Node]) -> Lookup:
        return lambda n: private[n] if n in private else self.resolve(n)

    def inline(self, node: fx.Node, private: dict[fx.Node, fx.Node]) -> fx.Node:
        """A private copy; equal views of one node are one."""
        lookup = self.lookup_in(private)
        if not is_view(node):
            return self.copy(node, lookup, INLINED)
        key = (node, *map(lookup, node.all_input_nodes))
        if key not in self.views:
            self.views[key] = self.copy(node, lookup, INLINED)
        return self.views[key]

    def first_run(self, op: RecomputeSlice, in_backward: bool) -> None:
        """Copy the op's nodes; in the backward, nodes of the forward are copied for this op alone.

        So are nodes that each loop is to compute again: Inductor may well write what several read.
        """
        private: dict[fx.Node, fx.Node] = {}
        for node in op.nodes:
            shared = self.joint.role[node] is Role.BACKWARD and node not in self.estimate.inlined
            if in_backward and not shared and node not in op.sinks:
                private[node] = self.inline(node, private)
            elif node not in self.env:
                marked = in_backward and node in op.values and self.is_loop(node)
                mark = self.mark if marked else ""
                self.env[node] = self.copy(node, self.lookup_in(private), mark)

    def is_loop(self, node: fx.Node) -> bool:
        return is_fusable(node) and is_repeatable(node, self.joint.mutated)

    def run_again(self, op: RecomputeSlice) -> None:
        """Copy the whole slice; its values take the place of the former ones.

        Results of the graph are not replaced: their first copies are there to the end anyway.
        """
        private: dict[fx.Node, fx.Node] = {}
        for node in op.nodes:
            if node in op.sinks:
                suffix = RECOMPUTED + (self.mark if self.is_loop(node) else "")
                private[node] = self.copy(node, self.lookup_in(private), suffix)
            else:
                private[node] = self.inline(node, private)
        self.env.update((v, private[v]) for v in op.values if v not in self.results)

    def move(self, move: Move) -> None:
        """Start a transfer or wait for one; what has arrived takes the value's place."""
        name, half = move.value, self.half
        value = self.estimate.node_of[name]
        source, target = self.estimate.fetch_sources.get(name), self.estimate.put_nodes.get(name)
        if move.kind == "to host":
            left = self.resolve(value if target is None else target.all_input_nodes[0])
            host = self.mover.to_host(name, left, half)
            if target is not None:
                self.env[target] = host
                self.last_put = name
        elif move.kind == "to device":
            host = self.mover.host_tensors[name] if source is None else self.resolve(source)
            self.mover.to_device(name, host, value, half)
        elif (arrived := self.mover.wait(name, half)) is not None:
            self.env[value] = arrived

    def announce_gradients(self, start: int) -> None:
        """Insert the calls for complete gradients; the backward begins with node ``start``."""
        name_later_reads(self.graph, list(self.graph.nodes)[start:])
        backward = list(self.graph.nodes)[start:]
        found = [
            one._replace(result=self.env[one.result], weight=self.resolve(one.weight))
            for one in host_gradients(self.joint)
            if one.result in self.env
        ]
        insert_arrived(found, backward)


def _read_across(
    forward: Sequence[fx.Node], backward: Sequence[fx.Node], results: Sequence[Any]
) -> tuple[fx.Node, ...]:
    """Nodes of the forward that the backward reads or returns, in the forward's order."""
    read = {source for node in backward for source in node.all_input_nodes}
    read.update(node for node in results if isinstance(node, fx.Node))
    return tuple(n for n in forward if n in read and n.op != "get_attr")


def apply_plan(
    estimate: Estimate, steps: Sequence[Step], *, fixed: Collection[int] | None = None
) -> Rewritten:
    """The joint graph with its nodes in the order of ``steps``, and copies where ops repeat.

    ``fixed`` are the positions in ``steps`` at which `passes.fixed_order` is to keep the order
    through Inductor, in the backward; None stands for all.
    """
    joint = estimate.joint
    writer = _PlanWriter(estimate)
    fixes = estimate.fused and (fixed is None or bool(fixed))
    for node in (*joint.primals, *joint.tangents):
        writer.resolve(node)
    seen: set[str] = set()

    def run(start: int, part: Sequence[Step], in_backward: bool) -> None:
        writer.half = "backward" if in_backward else "forward"
        for position, step in enumerate(part, start):
            if fixes:
                writer.mark = WRITTEN if fixed is None or position in fixed else FREE
            if isinstance(step, Move):
                writer.move(step)
            elif step in seen:
                writer.run_again(estimate.slices[step])
            elif step != TANGENTS:
                writer.first_run(estimate.slices[step], in_backward)
            if isinstance(step, str):
                seen.add(step)

    def results(part: Sequence[Any]) -> list[Any]:
        return [writer.resolve(n) if isinstance(n, fx.Node) else n for n in part]

    split, count = steps.index(TANGENTS), joint.num_forward_outputs
    run(0, steps[:split], in_backward=False)
    late = {i for i, n in enumerate(joint.results[:count])
            if isinstance(n, fx.Node) and joint.role[n] is Role.BACKWARD}  # fmt: skip
    early = results([None if i in late else n for i, n in enumerate(joint.results[:count])])
    forward = [n for n in writer.graph.nodes if n not in map(writer.env.get, joint.tangents)]
    begin = len(forward) + len(joint.tangents)
    run(split, steps[split:], in_backward=True)
    writer.announce_gradients(begin)
    if writer.last_put is not None:
        writer.mover.settle(writer.last_put, estimate.node_of[writer.last_put].meta["val"].device)
    backward_results = results(joint.results[count:])
    for i in late:
        early[i] = writer.resolve(joint.results[i])
    kept = {node for node in (*early, *backward_results) if isinstance(node, fx.Node)}
    save_ends(forward, list(writer.graph.nodes)[begin:], kept)
    backward = list(writer.graph.nodes)[begin:]
    output = writer.graph.output(tuple(early + backward_results))
    output.meta = dict(joint.module.graph.output_node().meta)
    leave_out_unread(writer.graph)
    module = module_of(joint.module, writer.graph)
    module.meta = dict(joint.module.meta)
    saved = _read_across(forward, backward, backward_results)
    return Rewritten(module, saved)


@dataclass(frozen=True)
class ApplyPlan(Pass):
    """Makes the graph of a plan from the one that was estimated; ``fixed`` as in `apply_plan`.

    ``Changed.data`` is the `Rewritten`, which says what the forward saves.
    """

    name = "recompute and offload"
    estimate: Estimate
    steps: tuple[Step, ...]
    fixed: Collection[int] | None = None

    def requires(self, module: fx.GraphModule) -> None:
        """The graph is the estimated one, and the backward begins once."""
        same = module is self.estimate.joint.module
        self.demand(same, "the graph is not the one that was estimated")
        self.demand(self.steps.count(TANGENTS) == 1, "the backward does not begin once")

    def call(self, module: fx.GraphModule) -> Changed:
        planned = apply_plan(self.estimate, self.steps, fixed=self.fixed)
        return Changed(planned.module, True, planned)

    def ensures(self, module: fx.GraphModule) -> None:
        """The graph takes the same inputs, and returns as much as before."""
        module.graph.lint()
        joint = self.estimate.joint
        inputs = [n.target for n in module.graph.find_nodes(op="placeholder")]
        before = [n.target for n in (*joint.primals, *joint.tangents)]
        self.demand(inputs == before, f"the inputs are {inputs}, and were {before}")
        results: Any = module.graph.output_node().args[0]
        self.demand(len(results) == len(joint.results), f"the graph returns {len(results)} results")


# --- results of loops over rows ---------------------------------------------------------------


def leave_out_unread(graph: fx.Graph) -> None:
    """Have calls of ``rows`` compute the results that are read, and nothing else.

    A loop that runs again may have given results that still live, as large as logits.
    """
    for call in graph.find_nodes(op="call_function", target=ROWS):
        read = [one for one in call.users if one.users]
        places = sorted({int(one.args[1]) for one in read})
        if len(places) == len(call.meta["val"]):
            continue
        for one in [one for one in call.users if one not in read]:
            graph.erase_node(one)
        program = parse(call.args[2]).giving(places)
        call.args = (*call.args[:2], dump(program), *call.args[3:])
        call.meta["val"] = [call.meta["val"][place] for place in places]
        for one in read:
            one.args = (call, places.index(one.args[1]))


# --- ends of short computations ---------------------------------------------------------------


def save_ends(
    forward: Sequence[fx.Node], backward: Sequence[fx.Node], kept: Collection[fx.Node]
) -> None:
    """Have the ``backward`` of a graph read ends of what the ``forward`` computes.

    What is ``kept`` in memory anyway, as a result of the graph, is read as before.
    """
    before, behind = set(forward), set(backward)
    for node in forward:
        end: fx.Node | None = node if _is_statistic(node) else None
        while end is not None and end not in kept:
            end = _read_at_the_end(end, before, behind)


def _is_statistic(node: fx.Node) -> bool:
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or not is_tensor(node) or not is_reduction(call):
        return False
    read = [nbytes(one.meta["val"]) for one in call.all_input_nodes if is_tensor(one)]
    return nbytes(node.meta["val"]) <= NEGLIGIBLE_PART * max(read, default=0)


def _read_at_the_end(
    node: fx.Node, forward: Collection[fx.Node], backward: Collection[fx.Node]
) -> fx.Node | None:
    """The one elementwise result in the place of ``node``, if the backward can read that alone."""
    readers = [one for one in node.users if one in backward]
    ends = [one for one in node.users if one in forward and _is_step(one, node)]
    end = next((one for one in ends if all(_is_copy(reader, one) for reader in readers)), None)
    if not readers or end is None or nbytes(end.meta["val"]) > nbytes(node.meta["val"]):
        return None
    for reader in readers:
        reader.replace_all_uses_with(end)
        reader.graph.erase_node(reader)
    return end


def _is_step(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is an elementwise op of one tensor."""
    return is_fusable(node) and not is_reduction(node) and node.all_input_nodes == [source]


def _is_copy(node: fx.Node, of: fx.Node) -> bool:
    same = (node.target, node.args, node.kwargs) == (of.target, of.args, of.kwargs)
    return same and INLINED in node.name
