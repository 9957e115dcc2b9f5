"""Kernels in Inductor's scheduler: what they are, and orders that no data asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch._inductor import config
from torch._inductor.virtualized import V

_NONE = frozenset[str]()


@dataclass(frozen=True)
class Scheduled:
    """A kernel before fusion: a library call, a loop, or (neither) something without work.

    ``is_copy`` of a loop that changes no value, only the layout. ``read``: bytes of the largest
    operand, ``written``: of all results; ``reads`` and ``writes`` name the buffers, ``names``
    the nodes of the graph that it computes.
    """

    is_call: bool
    is_loop: bool
    read: int
    written: int
    is_copy: bool = False
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Footprint:
    """Bytes that a loop allocates as it begins, and bytes that are freed behind it."""

    allocated: int
    freed: int


def scheduled(node: Any) -> Scheduled:
    from torch._inductor import ir

    size = V.graph.get_dep_size_hint
    is_loop = _is_loop(node)
    reads, writes = node.read_writes.reads, node.read_writes.writes
    return Scheduled(
        is_call=bool(node.is_extern() or node.is_template())
        and not isinstance(node.node, ir.MultiOutput),
        is_loop=is_loop,
        read=max((size(dep) for dep in reads), default=0),
        written=sum(size(dep) for dep in writes),
        is_copy=is_loop
        and set(node._body.op_counts) == {"load", "store", "output"}
        and not node.has_aliasing_or_mutation(),
        reads=frozenset(dep.name for dep in reads),
        writes=frozenset(dep.name for dep in writes),
        names=frozenset(origin.name for origin in node.node.get_origins()) if is_loop else _NONE,
    )


def far_loops_apart() -> AbstractContextManager[object]:
    """Inside, Inductor does not compare loops that something between them keeps apart.

    It never fuses two of them, but finds that out last. What all layers read, as a table of
    positions, makes it compare each loop with up to 64 others, several times.
    """
    from torch._inductor.scheduler import Scheduler

    can_fuse: Any = Scheduler.can_fuse

    def can_fuse_near(scheduler: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        apart = _are_apart(scheduler, first, second)
        return not apart and can_fuse(scheduler, first, second, *args, **kwargs)

    return mock.patch.object(Scheduler, "can_fuse", can_fuse_near)


def _are_apart(scheduler: Any, first: Any, second: Any) -> bool:
    """Whether the second loop needs what others can make only after the first has run."""
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode

    for one in (first, second):
        if type(one) not in (SchedulerNode, FusedSchedulerNode) or one.is_template():
            return False
    made = first.get_operation_names()
    if second.ancestors.isdisjoint(made):
        return False
    renames = scheduler.mutation_renames
    written = {renames.get(dep.name, dep.name) for dep in first.read_writes.writes}
    written |= set(first.get_buffer_names())
    for dep in second.unmet_dependencies:
        if dep.name in written or renames.get(dep.name, dep.name) in written:
            continue
        maker = scheduler.name_to_buf[dep.name].defining_op_name()
        if not scheduler.name_to_fused_node[maker].ancestors.isdisjoint(made):
            return True
    return False


def names_being_scheduled() -> list[str]:
    """The nodes of the graph that Inductor is scheduling."""
    module: Any = V.graph.module
    return [node.name for node in module.graph.nodes]


def allocate_at_places() -> str | None:
    """Have the code that is written for a forward or a backward get its buffers from `PLACED`.

    It stands in the code, so that caches keep it. Returns why it cannot, where that is so.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    graph: Any = V.graph
    wrapper = graph.wrapper_code
    if graph.cpp_wrapper:
        return "its code is written in C++"
    if config.triton.cudagraphs:
        return "what is recorded as a CUDA graph has addresses of its own"
    if graph.is_inference or type(wrapper) is not PythonWrapperCodegen:
        return None  # nothing waits for a backward, or it is a part of another graph's code
    half = "backward" if graph.is_backward else "forward"
    entered = f"{half}_at_places"
    wrapper.header.writeline(
        f"from {PLACED} import empty_strided_cpu, empty_strided_cuda, {entered}"
    )
    call = "Runner.call" if config.graph_partition else "call"
    wrapper.suffix.writeline(f"{call} = {entered}({call})")
    return None


PLACED = "fxremat.runtime.placed"
"""The module that generated code allocates with."""


def run_after(nodes: Sequence[Any], after: Mapping[int, Sequence[int]]) -> list[Any]:
    """Make Inductor run each key after its values, all of them positions in ``nodes``.

    To the scheduler these are no uses: what is waited for may be freed and overwritten before.
    Returns the nodes in an order that agrees with it.
    """
    from torch._inductor.dependencies import WeakDep

    for later, earlier in after.items():
        own = nodes[later].get_name()  # of no buffer: nothing is mutated
        there = {dep.name for dep in nodes[later].unmet_dependencies}
        for position in earlier:
            names = [buffer.get_name() for buffer in nodes[position].get_outputs()]
            if not there.isdisjoint(names):
                continue  # a read that Inductor may turn into an overwrite, if it stands alone
            name = names[0]
            nodes[later].add_fake_dep(WeakDep(name, mutating_buf=own, is_fake=True))
        nodes[later].prune_weak_deps()  # those on dead code, which adding one brings back
    ordered = [nodes[position] for position in in_waiting_order(len(nodes), after)]
    if after:
        scheduler = nodes[0].scheduler
        scheduler.nodes = list(ordered)
        scheduler.compute_ancestors()
    return ordered


def run_in_functions(nodes: Sequence[Any], last_of: Callable[[list[Footprint]], set[int]]) -> None:
    """Have ``last_of`` say where functions end among loops of which some are in ``nodes``.

    On the CPU Inductor puts all loops between two library calls in one function. What the function
    writes is allocated before it, and what it reads freed behind it. ``last_of`` is given the
    loops between two calls, after fusion, and returns the places of those that end a function.
    """
    if not nodes:
        return
    chosen, scheduler = set(map(id, nodes)), nodes[0].scheduler
    ends: set[int] | None = None

    def is_last() -> bool:
        nonlocal ends
        if ends is None:
            runs = _runs_of_loops(scheduler.nodes)
            ends = {
                id(run[place].node)
                for run in runs
                if any(id(node) in chosen for loop in run for node in loop.node.get_nodes())
                for place in last_of([loop.footprint for loop in run])
            }
        return id(scheduler.current_node) in ends

    for device in {node.get_device() for node in nodes} - {None}:
        if device.type == "cpu":
            scheduler.get_backend(device).ready_to_flush = is_last


def _runs_of_loops(nodes: Sequence[Any]) -> list[list[_Loop]]:
    """The loops between two library calls, after fusion."""
    runs: list[list[_Loop]] = [[]]
    begun = set[str]()
    for node in nodes:
        parts = map(_whole_of, node.get_outputs())
        wholes = {whole for whole in parts if whole is not None} - begun
        begun |= wholes
        if node.is_extern() or node.is_template():
            runs.append([])
        elif _is_loop(node.get_nodes()[0]):
            runs[-1].append(_Loop(node, wholes))
    return runs


@dataclass(frozen=True)
class _Loop:
    """Fused loops, and the concatenations of whose parts they write the first."""

    node: Any
    wholes: set[str]

    @property
    def footprint(self) -> Footprint:
        """What it allocates and frees; a result takes the place of an equal buffer that dies."""
        made = {buffer.get_name() for buffer in self.node.get_outputs()}
        dying = {name: size for name in self.node.last_usage - made if (size := _own_bytes(name))}
        allocated = sum(map(_nbytes, self.wholes))
        for one in self.node.get_nodes():
            for buffer in filter(self._is_allocated, one.get_outputs()):
                size = _nbytes(buffer.get_name())
                places = (name for name in dying if dying[name] == size)
                place = next((name for name in places if self._overwrites(one, name)), None)
                if place is None:
                    allocated += size
                else:
                    del dying[place]
        return Footprint(allocated, sum(dying.values()))

    def _is_allocated(self, buffer: Any) -> bool:
        inside = {one.get_name() for one in self.node.get_nodes()}
        return (
            buffer.node.should_allocate()
            and not buffer.get_mutations()
            and not buffer.get_aliases()
            and any(user.node.get_name() not in inside for user in buffer.users)
        )

    def _overwrites(self, one: Any, name: str) -> bool:
        """Whether a loop is the last to read a buffer, element by element, where it lies alone."""
        from torch._inductor.scheduler import NopKernelSchedulerNode

        buffer = _buffer(one.scheduler, name)
        if isinstance(buffer.defining_op, NopKernelSchedulerNode):
            return False  # parts of it were written as buffers of their own
        readers = {user.node.get_name(): user for user in buffer.users if not user.is_weak}
        own = readers.get(one.get_name())
        inside = {each.get_name() for each in self.node.get_nodes()} - {one.get_name()}
        return own is not None and own.can_inplace and one.ancestors >= inside & readers.keys()


def _buffer(scheduler: Any, name: str) -> Any:
    return scheduler.name_to_donated_buffer.get(name) or scheduler.name_to_buf.get(name)


def _whole_of(buffer: Any) -> str | None:
    """The concatenation that a buffer is a part of."""
    from torch._inductor import ir

    layout = buffer.node.get_output_spec()
    return layout.view.get_name() if isinstance(layout, ir.NonOwningLayout) else None


def _own_bytes(name: str) -> int:
    """What is freed with a buffer; 0 for inputs that others hold, and for parts of a whole."""
    buffer = _buffer(V.graph.scheduler, name)
    return 0 if buffer is None or _whole_of(buffer) is not None else _nbytes(name)


def _nbytes(name: str) -> int:
    from torch._inductor.dependencies import StarDep

    return int(V.graph.get_dep_size_hint(StarDep(name)))


def _is_loop(node: Any) -> bool:
    from torch._inductor.scheduler import SchedulerNode

    return isinstance(node, SchedulerNode) and not node.is_template()


def in_waiting_order(count: int, after: Mapping[int, Sequence[int]]) -> list[int]:
    """Positions in their order, but each one behind those that it waits for."""
    ordered: dict[int, None] = {}
    waiting: list[int] = []
    for position in range(count):
        waiting.append(position)
        while ready := [one for one in waiting if ordered.keys() >= set(after.get(one, ()))]:
            ordered.update(dict.fromkeys(ready))
            waiting = [one for one in waiting if one not in ordered]
    assert not waiting, "kernels wait for one another"
    return list(ordered)
