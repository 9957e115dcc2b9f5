"""Joint graph to `Problem`: what would be materialised, how many bytes, how long it takes.

Every written storage is a value, and one op is what it takes to write it: its *recompute slice*
(docs/design/problem.md). Nothing is changed in the graph.

The base order is that of the joint graph. Only ops that the backward alone needs, and that depend
on no tangent, are moved: right before the first op that reads them. A pseudo-op writes the
tangents, which appear when the forward has ended.

Each inserted variant (`fxremat.passes.variants.insertion`) is a variant of the problem: its own
ops, and the changes to ops that read a stand-in then. A parameter that lives in host memory has no
bytes here; what the graph fetches of it and puts there are moves, and no ops. Gradients that the
backward adds to a ``grad`` end there (`fxremat.passes.accumulation`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat.compat.sizes import size_bound
from fxremat.core.layout import extent
from fxremat.core.problem import Change, Copies, Op, Phase, Problem, Value, Variant, validate
from fxremat.passes import inplace
from fxremat.passes.accumulation import after_last_use, is_accumulated
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_fetch,
    is_multi_output,
    is_mutating,
    is_put,
    is_repeatable,
    is_run_for_effect,
    is_tensor,
    is_view,
    reached,
    root,
    waits_for,
)
from fxremat.passes.materialisation import (
    Materialisation,
    is_fusable,
    is_scalar,
    is_scattering,
    materialise,
)
from fxremat.passes.nodes import fake
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.runtime import accumulated

TANGENTS = "tangents"


OpTimer = Callable[[tuple[fx.Node, ...], int], float]
"""Microseconds of running nodes as one kernel, which reads and writes so many bytes."""


@dataclass(frozen=True)
class RecomputeSlice:
    """The nodes of one op in graph order; its *sinks* are what it is run for.

    They are the nodes of the values that it writes, the call that returns these as a tuple, or a
    call that is run for its effect. All other nodes live only inside of the op.
    """

    nodes: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    sinks: frozenset[fx.Node]


@dataclass(frozen=True)
class Estimate:
    """A problem, and what its ops and values are in the joint graph."""

    problem: Problem
    joint: JointGraph
    slices: dict[str, RecomputeSlice]
    node_of: dict[str, fx.Node]
    fused: bool
    fetch_sources: dict[str, fx.Node] = field(default_factory=dict)
    """The graph inputs that values which come from the host are fetched from."""
    put_nodes: dict[str, fx.Node] = field(default_factory=dict)
    """The nodes that put values to the host."""
    inlined: frozenset[fx.Node] = frozenset()
    """Nodes of the backward that have no memory: each loop that reads one computes it again."""


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage; dynamic sizes at their declared bound or as seen."""
    if tensor.layout is not torch.strided:
        return size_bound(tensor.numel()) * tensor.dtype.itemsize
    sizes, strides = ([size_bound(n) for n in of] for of in (tensor.shape, tensor.stride()))
    return extent(sizes, strides) * tensor.dtype.itemsize


@dataclass
class _Builder:
    """Walks the joint graph once and collects values and ops."""

    joint: JointGraph
    materialisation: Materialisation
    timer: OpTimer
    workspace: Callable[[fx.Node], int]
    device: str
    inserted: Sequence[InsertedVariant]
    overwritable: Mapping[fx.Node, fx.Node]
    bytes: dict[str, int] = field(default_factory=dict)
    slices: dict[str, RecomputeSlice] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    fetch_sources: dict[str, fx.Node] = field(default_factory=dict)
    put_nodes: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.joint.module.graph.nodes
        self.accumulated_values: dict[str, str] = {}
        self.awaited = {wait for node in nodes for wait in waits_for(node)}

    def size(self, node: fx.Node) -> int:
        """Bytes of a value on the budget's device; elsewhere it costs nothing here."""
        tensor = node.meta["val"]
        is_elsewhere = tensor.device.type != self.device or is_put(node) or lives_on_host(node)
        return 0 if is_elsewhere or is_mutating(node) else nbytes(tensor)  # written into an input

    def slice_of(
        self, sinks: Sequence[fx.Node], variant: InsertedVariant | None = None
    ) -> tuple[set[fx.Node], set[fx.Node]]:
        """Nodes from the nearest values to ``sinks``, and those values.

        With ``variant``, its stand-ins are read in place of the old nodes.
        """
        reads = set[fx.Node]()

        def made_of(node: fx.Node) -> Iterator[fx.Node]:
            for source in node.all_input_nodes:
                if variant is not None:
                    source = variant.read_by(node, source)
                # numbers computed on the host run once, in the forward; they take no device bytes
                on_host = is_scalar(source) and not is_mutating(source)
                if self.materialisation.is_value(source) and source not in sinks:
                    reads.add(source)
                elif source.op == "call_function" and not on_host:
                    yield source

        return reached(sinks, made_of), reads

    def add_op(
        self, sinks: list[fx.Node], values: list[fx.Node], variant: InsertedVariant | None = None
    ) -> Op:
        inside, reads = self.slice_of(sinks, variant)
        nodes, read = tuple(sorted(inside)), sorted(reads)
        sizes = {n.name: self.size(n) for n in (*read, *values)}
        self.bytes.update(sizes)
        name = sinks[0].name
        self.slices[name] = RecomputeSlice(nodes, tuple(values), frozenset(sinks))
        role = self.joint.role[sinks[0]]
        phase: Phase = "forward" if role is Role.FORWARD else "backward"
        self.ops[name] = Op(
            name=name,
            reads=tuple(n.name for n in read),
            writes=tuple(v.name for v in values),
            time_us=self.timer(nodes, sum(sizes.values())),
            workspace_bytes=self.size_unread(sinks) + self.scratch(sinks[0]),
            phase=phase,
            repeatable=role is not Role.BACKWARD
            and all(is_repeatable(n, self.joint.mutated) for n in nodes),
            inplace=self.inplace(sinks, nodes, reads, values),
        )
        return self.ops[name]

    def scratch(self, sink: fx.Node) -> int:
        """What the library allocates inside the call; a generated loop allocates nothing."""
        return 0 if self.materialisation.fused and is_fusable(sink) else self.workspace(sink)

    def size_unread(self, sinks: list[fx.Node]) -> int:
        """Bytes of a call's results that nobody asks for: they are there while it runs."""
        if not is_multi_output(sinks[0]):
            return 0
        read = {sink.args[1] for sink in sinks[1:]}
        return sum(
            nbytes(result)
            for index, result in enumerate(sinks[0].meta["val"])
            if index not in read
            and isinstance(result, torch.Tensor)
            and result.device.type == self.device
        )

    def inplace(
        self, sinks: list[fx.Node], nodes: tuple[fx.Node, ...], reads: set[fx.Node],
        values: list[fx.Node],
    ) -> tuple[tuple[str, str], ...]:  # fmt: skip
        """(read, write) pairs of values: the op may write the second over the first.

        A loop may do so at its last read of the same index. So may an op that adds or puts values
        into a copy of its first operand, and a call with a form for it (`fxremat.passes.inplace`).
        """
        operand = self.overwritable.get(sinks[0])
        if operand is not None:
            own = operand in reads and sinks[0] in values
            return ((operand.name, sinks[0].name),) if own else ()
        scatters = is_scattering(sinks[0])
        is_loop = self.materialisation.fused and len(values) == 1
        if not is_loop or not (scatters or is_fusable(sinks[0])):
            return ()
        read = sinks[0].all_input_nodes[:1] if scatters else [
            source for node in nodes for source in node.all_input_nodes
        ]  # fmt: skip
        return self.pairs({source for source in map(root, read) if source in reads}, values[0])

    def pairs(self, sources: Iterable[fx.Node], value: fx.Node) -> tuple[tuple[str, str], ...]:
        """(source, value) for each source that the loop which makes the value may write over."""
        return tuple(
            (source.name, value.name)
            for source in sorted(sources)
            if source.op == "call_function"
            and not is_scattering(source)  # Inductor has no loop write over what it mutated
            # What the forward saved comes in as an input, which is never written over.
            and self.joint.in_one_half(source, value)
            and fake(source).itemsize == fake(value).itemsize
            and self.size(source) == self.size(value)
        )

    def leaves(self, node: fx.Node) -> bool:
        """Whether the node puts a value to the host, as a move and not as an op.

        It is an op where another op reads the result on the host, since it must have arrived then,
        and where the value is a result of the graph on the device too.
        """
        if not is_put(node) or any(user.op != "output" for user in node.users):
            return False
        value = root(node.all_input_nodes[0])
        known = value.name in self.put_nodes or value in self.joint.result_roots()
        return value in self.materialisation.written and not is_fetch(value) and not known

    def move(self, node: fx.Node) -> None:
        """Note a value that comes from the host, or leaves for it."""
        if is_fetch(node):
            self.fetch_sources[node.name] = node.all_input_nodes[0]
            self.bytes[node.name] = self.size(node)
        else:
            value = root(node.all_input_nodes[0])
            self.put_nodes[value.name] = node

    def collect(self) -> None:
        """Every op of the graph without variants, in joint order."""
        variant_nodes = {node for variant in self.inserted for node in variant.nodes}
        for node in self.joint.module.graph.nodes:
            if node in variant_nodes or not _makes_op(node):
                continue
            if is_fetch(node) or self.leaves(node):
                self.move(node)
            elif is_mutating(node) or is_run_for_effect(node):
                self.add_op([node], [])
                if node.target is accumulated:
                    self.accumulated_values[node.name] = root(node.all_input_nodes[0]).name
            else:
                self.op_of(node)

    def op_of(self, node: fx.Node, variant: InsertedVariant | None = None) -> Op | None:
        """The op that a call (of a variant) makes; None if it is part of another op.

        A collective and what waits for it are one: until then its operands must stay, too.
        """
        if waits := waits_for(node):
            items = [u for u in node.users if u.target is operator.getitem]
            return self.add_op([node, *items, *waits], list(waits), variant)
        if node in self.awaited:
            return None
        if is_multi_output(node):  # numbers among its results are read off at once
            results = [u for u in node.users if u.target is operator.getitem]
            values = [u for u in results if u in self.materialisation.written]
            return self.add_op([node, *results], values, variant)
        written = node in self.materialisation.written
        return self.add_op([node], [node], variant) if written else None

    # -- variants ----------------------------------------------------------------------------

    def variants(self, outputs: Sequence[str]) -> tuple[Variant, ...]:
        """What each variant is to the planner; those that change nothing it sees are left out."""
        base = dict(self.ops)
        ops_of: dict[fx.Node, list[str]] = {}
        for name in base:
            for node in self.slices[name].nodes:
                ops_of.setdefault(node, []).append(name)
        found = []
        for variant in self.inserted:
            if any(root(old).name in self.put_nodes for old in variant.stand_ins):
                continue  # it leaves for the host, and no variant says so
            made = [self.op_of(n, variant) for n in variant.nodes if _makes_op(n)]
            readers = (reader for _, reader in variant.redirected())
            touched = {name for reader in readers for name in ops_of.get(reader, ())}
            changed = (self.change(op, variant) for name, op in base.items() if name in touched)
            changes = tuple(filter(None, changed))
            replaced = self.replaced_outputs(variant, outputs)
            if changes or replaced:
                ops = tuple(op for op in made if op is not None)
                found.append(Variant(variant.name, ops, changes, replaced))
        return tuple(found)

    def replaced_outputs(
        self, variant: InsertedVariant, outputs: Sequence[str]
    ) -> tuple[tuple[str, str], ...]:
        """(old, new) names of the outputs in whose place the variant returns another value."""
        joint, found = self.joint, dict[str, str]()
        for results, early in ((joint.forward_outputs, True), (joint.backward_outputs, False)):
            for result in results:
                old, new = root(result), variant.root_of_result(result, early)
                if old is not new and old.name in outputs and self.materialisation.is_value(new):
                    found[old.name] = new.name
        return tuple(found.items())

    def change(self, op: Op, variant: InsertedVariant) -> Change | None:
        """What the op reads and takes in the variant; None where that is the same."""
        old = self.slices[op.name]
        inside, reads = self.slice_of(tuple(old.sinks), variant)
        names, before = {node.name for node in reads}, set(op.reads)
        if names == before and inside == {*old.nodes}:
            return None
        traffic = sum(self.size(node) for node in (*reads, *old.values))
        is_loop = self.materialisation.fused and len(old.values) == 1
        is_loop = is_loop and all(map(is_fusable, old.sinks))
        new = [node for node in reads if node.name not in before] if is_loop else []
        return Change(
            op.name,
            inplace=self.pairs(new, old.values[0]) if new else (),
            drops=tuple(name for name in op.reads if name not in names),
            adds=tuple(sorted(names - before)),
            time_us=self.timer(tuple(sorted(inside)), traffic) - op.time_us,
        )


def _makes_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and not is_view(node)


def lives_on_host(node: fx.Node) -> bool:
    """Whether a graph input is there only to be fetched."""
    users = list(node.users)
    return node.op == "placeholder" and bool(users) and all(map(is_fetch, users))


def _base_order(ops: dict[str, Op]) -> list[Op]:
    """Joint order, with lazy ops right before the first op that reads what they write."""
    writer = {value: op for op in ops.values() for value in op.writes}
    lazy = {op.name for op in ops.values() if op.phase == "backward" and op.repeatable}
    order: dict[str, Op] = {}
    early = [op for op in ops.values() if op.phase == "forward"]
    late = [op for op in ops.values() if op.phase == "backward" and op.name not in lazy]
    for op in (*early, *late):
        stack = [(op, iter(op.reads))]
        while stack:
            current, reads = stack[-1]
            sources = (writer[value] for value in reads if value in writer)
            waiting = (s for s in sources if s.name in lazy and s.name not in order)
            source = next(waiting, None)
            if source is not None:
                stack.append((source, iter(source.reads)))
            else:
                order[stack.pop()[0].name] = current
    return list((order | ops).values())


def estimate(
    joint: JointGraph,
    timer: OpTimer,
    workspace: Callable[[fx.Node], int],
    *,
    fused: bool,
    device: str,
    name: str,
    inserted: Sequence[InsertedVariant] = (),
    in_place: bool = True,
) -> Estimate:
    """The problem of a joint graph, with the inserted variants to choose from.

    ``fused`` says that the graph goes through Inductor; else it runs node by node. Bytes are those
    on ``device``, times are in microseconds, and ``workspace`` gives the scratch bytes of a library
    call. ``in_place`` says that calls may be rewritten to write over operands that die in them.
    """
    stand_ins = {new: old for variant in inserted for old, new in variant.stand_ins.items()}
    variant_nodes = {node: stand_ins.get(node) for variant in inserted for node in variant.nodes}
    materialisation = materialise(joint, fused=fused, variant_nodes=variant_nodes)
    overwritable = inplace.overwritable(joint) if in_place else {}
    builder = _Builder(joint, materialisation, timer, workspace, device, inserted, overwritable)
    builder.collect()
    primals = [n for n in joint.primals if is_tensor(n)]
    tangents = [n for n in joint.tangents if is_tensor(n)]
    for node in (*primals, *tangents):
        builder.bytes[node.name] = builder.size(node)
    order = after_last_use(_base_order(dict(builder.ops)), builder.accumulated_values)
    first_backward = next((i for i, op in enumerate(order) if op.phase == "backward"), len(order))
    arrival = Op(TANGENTS, (), tuple(n.name for n in tangents), 0.0, 0, "backward", False)
    order.insert(first_backward, arrival)
    added = (n for n in joint.backward_outputs if is_accumulated(joint, n))
    leaving = {*builder.put_nodes.values(), *added}
    kept = [root(n) for n in (*joint.forward_outputs, *joint.backward_outputs) if n not in leaving]
    outputs = list(dict.fromkeys(n.name for n in kept if materialisation.is_value(n)))
    host = (*builder.fetch_sources, *builder.put_nodes)
    variants = builder.variants(outputs)
    problem = Problem(
        name=name,
        values=tuple(Value(key, size) for key, size in builder.bytes.items()),
        ops=tuple(order),
        resident=tuple(n.name for n in primals),
        outputs=tuple(dict.fromkeys([*outputs, *(n.name for n in tangents)])),
        host=host,
        copies=Copies(0.0, 0.0, only_host=True) if host else None,
        variants=variants,
    )
    node_of = {n.name: n for n in joint.module.graph.nodes if n.name in builder.bytes}
    return Estimate(
        validate(problem), joint, builder.slices, node_of, fused, builder.fetch_sources,
        builder.put_nodes, frozenset(materialisation.inlined),
    )  # fmt: skip
