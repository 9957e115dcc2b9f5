"""Hold the planned order through Inductor (docs/design/fixed_order.md).

Inductor keeps the order of a graph's nodes, but computes a loop again in each of its readers, and
fuses loops. Where that could break the budget, nodes of the backward get marks in their names, for
two passes of ours inside of Inductor, `WriteResults` and `Fence`. The latter also has the code get
its buffers from us, so that they may lie at planned addresses.

Both find what to hold by name and position alone, so that equal graph text gives equal results,
as Inductor's caches expect.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxremat.compat.configuration import CustomGraphPass, SchedulerPass
from fxremat.compat.inductor.post_grad import (
    copy_images,
    is_read_as_an_image,
    return_inputs_as_they_are,
    write_results,
)
from fxremat.compat.inductor.scheduling import (
    Footprint,
    Scheduled,
    allocate_at_places,
    names_being_scheduled,
    run_after,
    run_in_functions,
    scheduled,
)
from fxremat.core.constants import NEGLIGIBLE_PART
from fxremat.core.schedule import Step
from fxremat.core.timeline import Timeline
from fxremat.passes.halves import FREE, WRITTEN
from fxremat.passes.joint_graph import STORED, is_tensor, is_view
from fxremat.passes.materialisation import is_fusable, is_scalar
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.offload import MOVED

log = logging.getLogger(__name__)


def results_to_write(graph: fx.Graph) -> list[fx.Node]:
    """Results of loops that a plan or a variant wants in memory; each item of several results.

    What convolutions read as an image is written in any case, and here as they want it.
    """
    found = []
    for node in graph.nodes:
        call = node.args[0] if node.target is operator.getitem else node
        is_call = isinstance(call, fx.Node) and call.op == "call_function"
        if not is_call or not is_tensor(node) or not is_fusable(call) or is_view(call):
            continue
        planned = any(mark in call.name for mark in (WRITTEN, STORED))
        if planned or (FREE in call.name and is_read_as_an_image(node)):
            found.append(node)
    return found


def fences(kernels: Sequence[Scheduled]) -> dict[int, list[int]]:
    """Kernel -> the kernels it must run after, as positions in ``kernels``.

    Every library call waits for the one before it. One that begins or ends a fixed stretch waits
    for all loops before it as well; a loop waits for the last such call, unless its results are
    small. In a fixed stretch copies into another layout wait for the other loops before the call.
    """
    after: dict[int, list[int]] = {}
    fixed = fixed_stretches(kernels)
    stretch, call, fence, loops, since = 0, list[int](), list[int](), list[int](), list[int]()
    for position, kernel in enumerate(kernels):
        if kernel.is_call:
            since += loops
            after[position] = list(call)
            if fixed[stretch]:
                late = late_copies(kernels, range(call[0] if call else 0, position), loops)
                for copy in late:
                    after[copy] = after[copy] + [loop for loop in loops if loop not in late]
            if fixed[stretch] or fixed[stretch + 1]:
                after[position] += since
                fence, since = [position], []
            stretch, call, loops = stretch + 1, [position], []
        elif kernel.is_loop:
            small = kernel.written <= NEGLIGIBLE_PART * kernel.read
            after[position] = [] if small else list(fence)
            loops.append(position)
    return {position: earlier for position, earlier in after.items() if earlier}


def fixed_stretches(kernels: Sequence[Scheduled]) -> list[bool]:
    """Whether the order is fixed before the first library call, between the next two, and so on.

    Marks in a stretch's loops say so. One without marks is like the one before it.
    """
    marks: list[list[str]] = [[]]
    for kernel in kernels:
        if kernel.is_call:
            marks.append([])
        marks[-1] += [mark for mark in (WRITTEN, FREE) for name in kernel.names if mark in name]
    fixed = accumulate(
        marks, lambda last, found: WRITTEN in found or (last and FREE not in found), initial=True
    )
    return list(fixed)[1:]


def live_where_free(found: Estimate, line: Timeline) -> list[int]:
    """Bytes at each step of a plan whose order is not held.

    On the CPU all loops between two library calls are then in one function.
    """
    live = [*line.live_bytes]
    begun, ended = Counter[int](), Counter[int]()
    for one in line.copies:
        begun[one.start] += one.nbytes
        ended[one.stop] += one.nbytes
    loops = _loops_on_the_cpu(found)
    there, first, together = line.problem.resident_bytes, 0, 0
    for k, step in enumerate((*line.steps, None)):
        if step not in loops:
            live[first:k] = [max(each, together) for each in live[first:k]]
            first, together = k + 1, 0
        if step is not None:
            there += begun[k] - ended[k]
            overtaken = there - line.live_bytes[k]
            together += line.live_bytes[k] if k == first else begun[k] - overtaken
    return live


def _loops_on_the_cpu(found: Estimate) -> set[Step | None]:
    """The ops that are loops of generated code there."""

    def is_loop(node: fx.Node) -> bool:
        values = tree_leaves(node.meta.get("val"))
        on_cpu = all(each.device.type == "cpu" for each in values if isinstance(each, Tensor))
        is_part = is_view(node) or is_scalar(node) or node.target is operator.getitem
        return on_cpu and (is_part or is_fusable(node))

    return {name for name, one in found.slices.items() if all(map(is_loop, one.nodes))}


def fixed_loops(kernels: Sequence[Scheduled]) -> list[int]:
    """The loops of fixed stretches, as positions in ``kernels``."""
    fixed = fixed_stretches(kernels)
    stretches = accumulate(kernel.is_call for kernel in kernels)
    pairs = enumerate(zip(kernels, stretches, strict=True))
    return [position for position, (kernel, n) in pairs if kernel.is_loop and fixed[n]]


def last_of_functions(loops: Sequence[Footprint]) -> set[int]:
    """The loops behind which a function ends, of those between two library calls.

    A function allocates what all its loops write before it, and frees behind it. Several loops
    share one where it then takes no more than the largest of them alone.
    """
    live, peaks = 0, list[int]()
    for loop in loops:
        peaks.append(live + loop.allocated)
        live += loop.allocated - loop.freed
    most = max(peaks, default=0)
    ends, live, inside, dead = set[int](), 0, 0, 0
    for place, loop in enumerate(loops):
        if place and live + inside + loop.allocated > most:
            ends.add(place - 1)
            live, inside, dead = live + inside - dead, 0, 0
        inside += loop.allocated
        dead += loop.freed
    return ends


def late_copies(
    kernels: Sequence[Scheduled], between: Sequence[int], loops: Sequence[int]
) -> list[int]:
    """The loops that only copy what no other loop makes, for a reader that comes after ``between``.

    ``loops`` are those of the kernels ``between`` two library calls.
    """
    made = frozenset[str]().union(*(kernels[loop].writes for loop in loops))
    read = frozenset[str]().union(*(kernels[position].reads for position in between))
    return [
        loop
        for loop in loops
        if kernels[loop].is_copy
        and kernels[loop].reads.isdisjoint(made)
        and kernels[loop].writes.isdisjoint(read)
    ]


def _uuid(name: str, version: str, user_passes: tuple[Any, ...]) -> Any:
    """A pass's name in Inductor's cache.

    None keeps the graph out of the cache; it is given where a pass of the user asks for that.
    """
    theirs = [getattr(one, "uuid", lambda: None)() for one in user_passes]
    return (f"fxremat.{name} {version}", *theirs) if all(theirs) else None


@dataclass(frozen=True)
class WriteResults(CustomGraphPass):
    """Inductor's post-grad pass; ``user_passes`` are what the user had configured there."""

    version: str
    user_passes: tuple[Callable[[fx.Graph], None], ...] = ()

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the results in place, and what is handed on to the backward as it is."""
        for one in self.user_passes:
            one(graph)
        write_results(graph, results_to_write(graph))
        return_inputs_as_they_are(graph)
        copy_images(graph)

    def uuid(self) -> Any:
        return _uuid("write_results", self.version, self.user_passes)


@dataclass(frozen=True)
class Fence(SchedulerPass):
    """Inductor's pre-fusion pass; ``user_passes`` are what the user had configured there."""

    version: str
    user_passes: tuple[Callable[[list[Any]], list[Any]], ...] = ()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        for one in self.user_passes:
            nodes = one(nodes)
        why = allocate_at_places()
        if why is not None:
            log.info("the buffers of a graph are not placed: %s", why)
        return self.hold(nodes)

    def hold(self, nodes: list[Any]) -> list[Any]:
        names = names_being_scheduled()
        if not any(mark in name for name in names for mark in (WRITTEN, MOVED)):
            return nodes
        kernels = [scheduled(node) for node in nodes]
        fixed = [nodes[position] for position in fixed_loops(kernels)]
        run_in_functions(fixed, last_of_functions)
        return run_after(nodes, fences(kernels))

    def uuid(self) -> Any:
        return _uuid("fence", self.version, self.user_passes)
