"""Which results are written to memory, and which live only inside another op's loop.

Run node by node (``fused=False``), every result that is not a view is written. What Inductor writes
is listed in docs/design/problem.md. Two things more:

* where a reduction is only read to be converted, what is written is the result of the conversion;
* what ranks gather or sum is written once it has been waited for.

A *fusion group* is what lies between two extern kernels: elementwise ops and reductions that hang
together and have equally many extern kernels before them on the longest path.

**Kept between two loops.** A loop that needs the result of a reduction can only follow it. Where
both read an elementwise result, it is computed twice, or written by the first of them. Inductor
writes it if several nodes read it and it is dear: it takes more than a few reads, or, on the CPU, a
heavy function::

    sigmoid_grad   = f(x, grad, ...)                         6 reads
    sum_1          = sum(sigmoid_grad, [2, 3])               the first loop
    sum_2          = sum(sum_1.view(groups), -1)             sums of sums: nothing can follow it
    grad_x         = sigmoid_grad * a - sum_2 * b            the second loop

A reduction over the last dimensions can share its outer loop with what follows, as in a softmax
or a layer norm: there, nothing is written.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.sizes import size_bound
from fxremat.passes.joint_graph import (
    STORED,
    JointGraph,
    Role,
    is_multi_output,
    is_repeatable,
    is_tensor,
    is_view,
    reached,
    root,
    waits_for,
)
from fxremat.passes.nodes import packet_of

_ATEN = torch.ops.aten
_PRIMS = torch.ops.prims

# Overload packets that Inductor lowers into loops although torch gives them no tag.
FUSABLE = frozenset(
    {
        _ATEN.embedding, _ATEN.index, _ATEN._unsafe_index, _ATEN.gather, _ATEN.full,
        _ATEN.full_like, _ATEN.arange,
        _ATEN.scalar_tensor, _ATEN.slice_scatter, _ATEN.select_scatter, _ATEN.constant_pad_nd,
        _ATEN.where, _ATEN.avg_pool2d, _ATEN.avg_pool2d_backward, _ATEN.upsample_nearest2d,
        _ATEN.upsample_nearest2d_backward, _ATEN.upsample_bilinear2d, _ATEN.repeat, _ATEN.flip,
        _ATEN.max_pool2d_with_indices_backward, _ATEN.zeros, _ATEN.ones, _ATEN.empty,
        _ATEN.zeros_like, _ATEN.ones_like, _ATEN.index_select, _ATEN.reflection_pad2d,
        _ATEN.select_backward, _ATEN.slice_backward, _ATEN.tril, _ATEN.triu, _ATEN.roll,
        _PRIMS.iota, _PRIMS.inductor_random, _PRIMS.inductor_randint,
        _PRIMS.inductor_lookup_seed, _PRIMS._low_memory_max_pool_offsets_to_indices,
        _PRIMS._low_memory_max_pool_with_offsets, _PRIMS.convert_element_type,
    }
)  # fmt: skip
CONCATENATIONS = frozenset({_ATEN.cat, _ATEN.stack})
# Loops that read each input element many times: Inductor writes what they read first.
NEEDS_REALIZED_INPUTS = frozenset(
    {
        _ATEN.avg_pool2d, _ATEN.max_pool2d_with_indices, _ATEN.upsample_bilinear2d,
        _PRIMS._low_memory_max_pool_with_offsets, _ATEN.max_pool2d_with_indices_backward,
        _ATEN.avg_pool2d_backward,
    }
)  # fmt: skip
# Inductor copies their first operand, as a loop does, and writes into the copy.
SCATTERING = frozenset(
    {
        _ATEN.index_put, _ATEN._unsafe_index_put, _ATEN._unsafe_masked_index_put_accumulate,
        _ATEN.scatter, _ATEN.scatter_add, _ATEN.scatter_reduce,
    }
)  # fmt: skip
# Of these, loops that compute what they put: others are not always made into loops.
PUTTING = frozenset({_ATEN.index_put, _ATEN._unsafe_index_put})
MOST_INLINED_OPS = 30
"""If several loops read a result, Inductor writes it where it takes more ops than about so many."""
REDUCTIONS = frozenset({_PRIMS._low_memory_max_pool_with_offsets, _ATEN.avg_pool2d})


@cache
def _has_tag(target: Any, tag: str) -> bool:
    return isinstance(target, OpOverload) and any(str(t).endswith(tag) for t in target.tags)


_REDUCTION_NAMES = frozenset(
    {
        "sum", "mean", "amax", "amin", "var", "var_mean", "std", "prod", "any", "all", "argmax",
        "argmin", "max", "min", "logsumexp", "xor_sum", "norm", "linalg_vector_norm", "_softmax",
        "_log_softmax",
    }
)  # fmt: skip


def is_reduction(node: fx.Node) -> bool:
    """Whether the node is computed by a loop that reduces, so that its result is stored."""
    packet = packet_of(node)
    name = getattr(packet, "__name__", "")
    return packet in REDUCTIONS or name in _REDUCTION_NAMES or _has_tag(node.target, "reduction")


def is_fusable(node: fx.Node) -> bool:
    """Whether Inductor makes the node part of a generated loop."""
    packet = packet_of(node)
    known = packet in FUSABLE or packet in CONCATENATIONS
    return known or is_reduction(node) or _has_tag(node.target, "pointwise")


def is_scattering(node: fx.Node) -> bool:
    """Whether the node puts values into its first operand, as far as anybody can see a copy."""
    return packet_of(node) in SCATTERING


def _is_put_by(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` puts what is in ``node`` at indices, in a loop that computes it."""
    if packet_of(user) not in PUTTING or torch.are_deterministic_algorithms_enabled():
        return False
    args: tuple[Any, ...] = user.args
    place, indices = args[:2]
    kinds = {each.meta["val"].dtype for each in indices if each is not None}
    floats = user.meta["val"].dtype.is_floating_point
    return floats and not kinds & {torch.bool, torch.uint8} and root(place) is not node


def is_scalar(node: fx.Node) -> bool:
    """Whether the node is computed on the host (sizes, numbers) and has no device bytes."""
    return not is_tensor(node) and not is_multi_output(node)


@dataclass
class Materialisation:
    """The nodes whose storages are written to memory (inputs of the graph not among them)."""

    joint: JointGraph
    fused: bool
    written: set[fx.Node] = field(default_factory=set)
    inlined: set[fx.Node] = field(default_factory=set)
    """Nodes of the backward that several groups read; each computes them again from less."""

    def is_value(self, node: fx.Node) -> bool:
        """Whether ``node`` is a storage the planner sees (inputs of the graph included)."""
        return node in self.written or (node.op == "placeholder" and is_tensor(node))


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node) and not is_scalar(node)


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """Who reads the node's storage, directly or by way of views."""
    return [
        reader
        for user in node.users
        for reader in (users_through_views(user) if is_view(user) else (user,))
    ]


def _depths(joint: JointGraph) -> dict[fx.Node, int]:
    """Extern kernels on the longest path to a node, within its phase."""
    depth: dict[fx.Node, int] = {}
    for node in joint.module.graph.nodes:
        inputs = [depth[i] for i in node.all_input_nodes if joint.in_one_half(i, node)]
        is_extern = _is_call(node) and not is_fusable(node) and node.target is not operator.getitem
        depth[node] = max(inputs, default=0) + is_extern
    return depth


def _fusion_groups(
    nodes: Iterable[fx.Node], joint: JointGraph, depth: dict[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """One node of its fusion group for each node of a loop."""
    near: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        if node.op != "call_function" or not is_fusable(node):
            continue
        near.setdefault(node, set())
        for producer in map(root, node.all_input_nodes):
            fits = producer.op == "call_function" and is_fusable(producer)
            if fits and depth[producer] == depth[node] and joint.in_one_half(producer, node):
                near[node].add(producer)
                near.setdefault(producer, set()).add(node)
    group_of: dict[fx.Node, fx.Node] = {}
    for node in near:
        if node not in group_of:
            group_of.update(dict.fromkeys(reached([node], near.__getitem__), node))
    return group_of


def _bounds(tensor: torch.Tensor) -> list[int]:
    """The shape in numbers: comparing symbolic sizes would leave guards behind."""
    return [size_bound(size) for size in tensor.shape]


def _narrower_than_inputs(node: fx.Node) -> bool:
    val = node.meta["val"]
    read = [i.meta["val"] for i in node.all_input_nodes if is_tensor(i)]
    widths = [one.dtype.itemsize for one in read if _bounds(one) == _bounds(val)]
    return bool(widths) and val.dtype.itemsize < min(widths)


def _inlinable(node: fx.Node, written: Collection[fx.Node]) -> set[fx.Node]:
    """The node and what it is computed from within the loop, if that takes few ops.

    Empty if it takes many, or if they read no less than the node's bytes.
    """
    inside, sources, stack, ops = set[fx.Node](), set[fx.Node](), [node], 0
    while stack and ops <= MOST_INLINED_OPS:
        one = stack.pop()
        if one in inside:
            continue
        inside.add(one)
        ops += not is_view(one)
        for source in one.all_input_nodes:
            is_made = source.op == "call_function" and source not in written  # by the loop itself
            if is_tensor(source) and (is_view(source) or is_made):
                stack.append(source)
            elif is_tensor(source):
                sources.add(source)
    is_small = ops <= MOST_INLINED_OPS and sum(map(_nbytes, sources)) < _nbytes(node)
    return inside if is_small else set()


def _numel(node: fx.Node) -> int:
    """Elements of a tensor; 0 for a call with several results."""
    return prod(_bounds(node.meta["val"])) if is_tensor(node) else 0


def _nbytes(node: fx.Node) -> int:
    return _numel(node) * int(node.meta["val"].dtype.itemsize)


def _is_written(
    node: fx.Node,
    users: Iterable[fx.Node],
    group_of: Mapping[fx.Node, fx.Node],
    result: Materialisation,
) -> bool:
    joint = result.joint
    role, is_read_apart = joint.role[node], False
    if not is_fusable(node) or is_reduction(node) or packet_of(node) in CONCATENATIONS:
        return True
    if STORED in node.name or (
        role is not Role.BACKWARD and not is_repeatable(node, joint.mutated)
    ):
        return True
    for user in users:
        if user.op == "output":
            return True
        if role is Role.FORWARD and joint.role[user] is not Role.FORWARD:
            if _narrower_than_inputs(node):
                return True
            continue
        if _is_put_by(user, node):
            continue
        if not is_fusable(user) or packet_of(user) in NEEDS_REALIZED_INPUTS:
            return True
        if role is not Role.LAZY and node in group_of and group_of.get(user) is not group_of[node]:
            is_read_apart = True
    is_late = is_read_apart and role is Role.BACKWARD
    inlined_nodes = _inlinable(node, result.written) if is_late else set()
    result.inlined.update(one for one in inlined_nodes if joint.role[one] is Role.BACKWARD)
    return is_read_apart and not inlined_nodes


def _is_only_converted(
    node: fx.Node, users: Collection[fx.Node], written: set[fx.Node], joint: JointGraph
) -> bool:
    (user,) = users if len(users) == 1 else (None,)
    if user is None or not is_reduction(node) or user not in written:
        return False
    converts = user.target is _PRIMS.convert_element_type.default
    return converts and joint.role[user] is joint.role[node]


def _is_constant(node: fx.Node, joint: JointGraph) -> bool:
    """A tensor made from numbers alone: a loop that reads it computes it in place."""
    from_numbers = not any(map(is_tensor, node.all_input_nodes))
    return from_numbers and is_fusable(node) and is_repeatable(node, joint.mutated)


def materialise(
    joint: JointGraph, *, fused: bool, variant_nodes: Mapping[fx.Node, fx.Node | None] | None = None
) -> Materialisation:
    """Apply the rule above to every node of the joint graph.

    ``variant_nodes`` are nodes of inserted variants, each with the node that it stands in for, if
    any. What they read counts for themselves alone. A stand-in has the readers of its old node too.
    """
    result = Materialisation(joint, fused)
    nodes = list(joint.module.graph.nodes)
    variant_nodes = variant_nodes or {}
    base = [node for node in nodes if node not in variant_nodes]
    depth = _depths(joint) if fused else {}
    group_of = _fusion_groups(base, joint, depth) if fused else {}

    def users_of(node: fx.Node) -> Iterator[fx.Node]:
        for user in users_through_views(node):
            if node in variant_nodes or user not in variant_nodes:
                yield user
        old = variant_nodes.get(node)
        if old is not None:
            yield from (user for user in users_through_views(old) if user not in variant_nodes)

    for node in nodes:
        if not _is_call(node) or waits_for(node):
            continue
        if node.target is operator.getitem:
            is_written = is_tensor(node) and not waits_for(node.all_input_nodes[0])
        else:
            is_written = not is_multi_output(node) and (
                not fused or _is_written(node, users_of(node), group_of, result)
            )
        if is_written:
            result.written.add(node)
    if fused:
        grouped = [node for node in base if node in group_of]
        result.written |= _ReusedInLoops(grouped, result.written, group_of).find()
    for node in nodes if fused else ():
        users = list(users_of(node)) if node in result.written else []
        in_loops = all(is_fusable(u) and u.op != "output" for u in users)
        is_constant = in_loops and node in result.written and _is_constant(node, joint)
        if is_constant or _is_only_converted(node, users, result.written, joint):
            result.written.discard(node)
    return result


# --- kept between two loops -------------------------------------------------------------------


HEAVY = frozenset(
    {_ATEN.exp, _ATEN.log, _ATEN.log10, _ATEN.log1p, _ATEN.log2, _ATEN.sigmoid, _ATEN.tanh}
)
"""What Inductor does not compute twice on the CPU."""
MOST_READS = 4
"""What Inductor reads again rather than write a result (``realize_reads_threshold``)."""


@dataclass(frozen=True)
class _Inlined:
    """What a loop does that computes a result: what it reads, and whether it is heavy."""

    reads: frozenset[fx.Node] = frozenset()
    heavy: bool = False

    def is_dear(self, node: fx.Node) -> bool:
        """Whether Inductor writes such a result where several nodes read it."""
        on_cpu = node.meta["val"].device.type == "cpu"
        return len(node.users) > 1 and ((self.heavy and on_cpu) or len(self.reads) > MOST_READS)


@dataclass
class _ReusedInLoops:
    """The rule for what is kept of the nodes of loops; ``group_of`` is the fusion group of each.

    ``written`` is what is written anyhow.
    """

    nodes: Sequence[fx.Node]
    written: Collection[fx.Node]
    group_of: Mapping[fx.Node, fx.Node]
    inlined: dict[fx.Node, _Inlined] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    """How many reductions, that nothing can share a loop with, come before a node in its group."""
    widest: dict[fx.Node, int] = field(default_factory=dict)
    """The most elements of what a node is computed from in its group."""

    def find(self) -> set[fx.Node]:
        for node in self.nodes:
            self._read(node)
        kept = set[fx.Node]()
        stages: dict[fx.Node, set[int]] = {}
        for node in reversed(self.nodes):
            stages[node] = self._stages_of_users(node, stages, kept)
            dear = node in self.inlined and self.inlined[node].is_dear(node)
            if dear and len(stages[node]) > 1:
                kept.add(node)
        return kept

    def _read(self, node: fx.Node) -> None:
        reads, heavy = set[fx.Node](), packet_of(node) in HEAVY
        stage, widest = 0, _numel(node)
        for source in map(root, node.all_input_nodes):
            if not is_tensor(source):
                continue
            loop = source.all_input_nodes[0] if source.target is operator.getitem else source
            if self.group_of.get(loop) == self.group_of[node] and loop in self.stage:
                stage = max(stage, self.stage[loop] + self._parts(loop))
                widest = max(widest, self.widest[loop])
            known = self.inlined.get(source)
            if known is None or source in self.written:
                reads.add(source)
            else:
                reads |= known.reads
                heavy = heavy or known.heavy
        self.stage[node], self.widest[node] = stage, widest
        if not is_reduction(node):
            self.inlined[node] = _Inlined(frozenset(reads), heavy)

    def _parts(self, node: fx.Node) -> bool:
        """Whether what reads the node cannot be in the loop that computes it."""
        source = next(filter(is_tensor, node.all_input_nodes), None)
        if source is None or not is_reduction(node):
            return False
        shape = _bounds(source.meta["val"])
        of_sums = prod(shape) < self.widest[node]
        return of_sums or not _is_of_last_dimensions(node, shape)

    def _stages_of_users(
        self, node: fx.Node, stages: Mapping[fx.Node, set[int]], kept: Collection[fx.Node]
    ) -> set[int]:
        found = set[int]()
        for user in users_through_views(node):
            if self.group_of.get(user) != self.group_of[node]:
                continue
            if user in self.written or user in kept or is_reduction(user):
                found.add(self.stage[user])
            else:
                found |= stages.get(user, set())
        return found


def _is_of_last_dimensions(node: fx.Node, shape: list[int]) -> bool:
    """Whether a reduction leaves rows: what is reduced comes last, and there is more than one."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or given == []:
        return False
    dims = {d % len(shape) for d in (given if isinstance(given, (list, tuple)) else [given])}
    last = [d for d in range(len(shape)) if shape[d] > 1 or d in dims][-len(dims) :]
    rows = prod(size for d, size in enumerate(shape) if d not in dims)
    return set(last) == dims and rows > 1
