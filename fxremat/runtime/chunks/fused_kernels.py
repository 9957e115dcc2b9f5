"""What lies between two matmuls of a program over rows, as one kernel that Inductor writes.

    interpreted   max, sub, exp, sum, ... d_logits       an operator each, each through the cache
    fused         one kernel: logits -> d_logits         read once, written once

A stage of tiles becomes a graph of its own. Its inputs are memory that outlives it (row inputs,
values that all rows share, slots of the chunk, results, sums in the making); it writes into some
of them and returns nothing. What lives within the stage only has no memory, but for what Inductor
allocates: that must fit into what the layout sets aside for the interpreted stage, or the stage
stays interpreted. So what was planned for is enough either way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import cache_directory
from fxremat.compat.inductor.kernels import (
    Unbuilt,
    begin_kernel,
    compile_kernel,
    decomposed,
    for_a_kernel,
    kernel_key,
    unbuilt_kernel,
)
from fxremat.compat.tensors import is_fake
from fxremat.disk_cache import Answers
from fxremat.runtime.chunks.buffers import (
    MATMULS,
    Layout,
    Stage,
    accumulates_in,
    bases,
    extra_of_sum,
    is_view,
    layout,
    of_total,
)
from fxremat.runtime.chunks.program import Instruction, Program, Ref, overload, parse, with_values

log = logging.getLogger(__name__)

_ATEN = torch.ops.aten
CACHE_LINE_BYTES = 64
"""A kernel of Inductor may take a cache line for each row beyond what the layout sets aside."""
ALIGNMENT = 16
"""Bytes to which Inductor's GPU kernels expect the memory of their arguments to be aligned."""


@dataclass(frozen=True)
class Shape:
    """What a kernel has to know of an input of the call."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def dense(self) -> Shape:
        strides = tuple(prod(self.sizes[d + 1 :]) for d in range(len(self.sizes)))
        return Shape(self.sizes, strides, self.dtype, self.device)

    def empty(self) -> torch.Tensor:
        """A tensor like it, in the current (fake) mode."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Memory:
    """What a kernel reads or writes: a value that has memory of its own, or a slot of a chunk."""

    kind: str  # "value", "slot" or "sum"
    number: int
    row_shape: tuple[int, ...] = ()


def is_worth_fusing(stage: Stage) -> bool:
    """Whether a stage is more than one operator between two matmuls."""
    return not stage.of_chunk and len(stage.values) > 1


def written(program: Program, stage: Stage) -> tuple[int, ...]:
    """The values of a stage that somebody reads after it; sums are added to."""
    inside = set(stage.values)
    read = {
        base
        for number, one in enumerate(program.loop, program.start)
        if number not in inside and not is_view(program, number)
        for reads in one.reads
        for base in bases(program, reads)
    }
    return tuple(n for n in stage.values if n in program.results or n in read)


def read(program: Program, stage: Stage) -> tuple[int, ...]:
    inside = set(stage.values)
    found = {
        base: None
        for number in stage.values
        for reads in program[number].reads
        for base in bases(program, reads)
        if base not in inside
    }
    return tuple(found)


@dataclass
class _KernelWriter:
    """Writes the graph of one stage for ``tile`` rows."""

    program: Program
    plan: Layout
    stage: Stage
    inputs: tuple[Shape, ...]
    tile: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[int, fx.Node] = field(default_factory=dict)
    places: dict[tuple[str, int], tuple[Memory, fx.Node]] = field(default_factory=dict)
    device: torch.device = field(init=False)
    by_comparison: bool = field(init=False)
    """Whether one number a row is added where positions and index are equal."""

    def __post_init__(self) -> None:
        self.device = self.inputs[0].device
        self.by_comparison = self.device.type != "cpu"

    def write(self) -> fx.GraphModule:
        kept = set(written(self.program, self.stage))
        for number in self.stage.values:
            one = self.program[number]
            if one.kind == "sum":
                self.add_to_sum(number, one)
            else:
                node = self.call(one)
                self.made[number] = self.store(number, one, node) if number in kept else node
        self.graph.output(())
        return fx.GraphModule({}, self.graph)

    def call(self, one: Instruction) -> fx.Node:
        if self.by_comparison and self.adds_one_a_row(one):
            return self.added_by_comparison(one)
        args, named = one.arguments(self.value, self.tile)
        if one.op == "aten.clone.default":
            named["memory_format"] = torch.contiguous_format
        return self.graph.call_function(overload(one.op), tuple(args), named)

    def adds_one_a_row(self, one: Instruction) -> bool:
        """Whether an instruction adds one number to one element of each row of a matrix."""
        if one.op != "aten.scatter_add.default":
            return False
        into, dim, index = one.args[:3]
        assert isinstance(into, Ref)
        assert isinstance(index, Ref)
        return dim == 1 and len(one.row_shape) == 1 and self.row_shape(index.number) == (1,)

    def row_shape(self, number: int) -> tuple[int, ...]:
        made = self.program.instruction(number)
        return self.inputs[number].sizes[1:] if made is None else made.row_shape

    def added_by_comparison(self, one: Instruction) -> fx.Node:
        """One loop over all elements: adding at an index, a GPU would write, add, and read."""
        into, _, index, element = with_values(one.args, self.value, self.tile)
        call, positions = self.graph.call_function, (0, one.row_shape[0], 1)
        named: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
        hit = call(_ATEN.eq.Tensor, (index, call(_ATEN.arange.start_step, positions, named)))
        return call(_ATEN.where.self, (hit, call(_ATEN.add.Tensor, (into, element)), into))

    def value(self, number: int) -> fx.Node:
        if number not in self.made:
            looks = number >= self.program.start and is_view(self.program, number)
            self.made[number] = self.call(self.program[number]) if looks else self.load(number)
        return self.made[number]

    def load(self, number: int) -> fx.Node:
        program = self.program
        if number < program.num_rows:
            given = self.inputs[number]
            return self.rows("value", number, given.sizes[1:], given.dtype)[1]
        if number < program.start:  # the same for all rows; as torch makes it, if the setup does
            given = self.inputs[number] if number < program.first else self.made_before(number)
            return self.place(Memory("value", number), given.empty())[1]
        one = program[number]
        place = self.rows(*self.memory_of(number), one.row_shape, one.dtype)[1]
        return self.shaped(place, one.row_shape)

    def memory_of(self, number: int) -> tuple[str, int]:
        if number in self.program.results:
            return "value", number
        return "slot", self.plan.slot_of[number]

    def rows(
        self, kind: str, number: int, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Memory, fx.Node]:
        """These rows of something, as an input of the kernel."""
        empty = torch.empty((self.tile, *row_shape), dtype=dtype, device=self.device)
        return self.place(Memory(kind, number, row_shape), empty)

    def place(self, memory: Memory, like: torch.Tensor) -> tuple[Memory, fx.Node]:
        """An input of the kernel, once for each number."""
        key = memory.kind, memory.number
        if key not in self.places:
            node = self.graph.placeholder(f"given_{len(self.places)}")
            node.meta["val"] = like
            self.places[key] = memory, node
        return self.places[key]

    def made_before(self, number: int) -> Shape:
        one = self.program[number]

        def look(n: int) -> torch.Tensor:
            return (self.inputs[n] if n < self.program.first else self.made_before(n)).empty()

        return Shape.of(one.run(look, 0))

    def shaped(self, node: fx.Node, row_shape: tuple[int, ...]) -> fx.Node:
        """The same memory with other dimensions behind the rows."""
        return self.graph.call_function(_ATEN.view.default, (node, [self.tile, *row_shape]))

    def store(self, number: int, one: Instruction, node: fx.Node) -> fx.Node:
        """Write these rows where they belong; whoever reads on reads them there."""
        key = self.memory_of(number)
        memory, place = self.rows(*key, one.row_shape, one.dtype)
        if memory.row_shape != one.row_shape:
            node = self.shaped(node, memory.row_shape)
        stored = self.graph.call_function(_ATEN.copy_.default, (place, node))
        self.places[key] = memory, stored
        return stored if memory.row_shape == one.row_shape else self.shaped(stored, one.row_shape)

    def add_to_sum(self, number: int, one: Instruction) -> None:
        wide = accumulates_in(one.dtype)
        empty = torch.empty(one.row_shape, dtype=wide, device=self.device)
        total = self.place(Memory("sum", number), empty)[1]
        args = with_values(one.args, self.value, self.tile)
        named = {**one.kwargs, "dtype": wide}
        part = self.graph.call_function(overload(one.op), tuple(args), named)
        added = self.graph.call_function(_ATEN.add.Tensor, (total, part))
        self.graph.call_function(_ATEN.copy_.default, (total, added))


def set_aside(plan: Layout, tile: int) -> int:
    """Bytes of the layout that a fused stage has no use for."""
    slots = sum(slot.nbytes(tile, tile) for slot in plan.slots if not slot.of_chunk)
    return slots + plan.most_loose(tile)


def _room(program: Program, plan: Layout, tile: int, device: str) -> int:
    """Bytes that a fused stage may take.

    Beside what it has no use for, a few numbers for each row: maxima, sums and the like, each of
    which has memory of its own in Inductor's code. They are not planned for, but counted exactly
    in the dry run of the code.
    """
    sums = [one for one in program.loop if one.kind == "sum" and one.op not in MATMULS]
    partial = sum(extra_of_sum(one, device) - of_total(one) for one in sums)
    return set_aside(plan, tile) + partial + tile * CACHE_LINE_BYTES


def _is_aligned(program: Program, plan: Layout, inputs: Sequence[Shape], tile: int) -> bool:
    """Whether each tile begins where a GPU's kernels expect it."""
    rows = [shape.dtype.itemsize * prod(shape.sizes[1:]) for shape in inputs[: program.num_rows]]
    rows += [slot.numel * slot.dtype.itemsize for slot in plan.slots if slot.of_chunk]
    results = [program[number] for number in program.results]
    rows += [one.nbytes for one in results if one.kind != "sum"]
    return all(tile * size % ALIGNMENT == 0 for size in rows)


@dataclass(frozen=True)
class Kernel:
    """A fused stage for some number of rows.

    ``begin()`` has it compiled beside what Python does, ``compiled()`` waits for that. ``run`` is
    called with the memory that the kernel names, in that order, in a list that it empties; on
    tensors without memory it allocates only. ``scratch`` is what it allocates meanwhile.
    """

    memory: tuple[Memory, ...]
    scratch: int
    begin: Callable[[], None]
    compiled: Callable[[], Callable[[list[torch.Tensor]], object]]
    unbuilt: Callable[[list[torch.Tensor]], object]

    def run(self, memory: list[torch.Tensor]) -> None:
        (self.unbuilt if is_fake(memory[0]) else self.compiled())(memory)


@functools.lru_cache(maxsize=512)
def kernels_of(text: str, inputs: tuple[Shape, ...], tile: int) -> tuple[Kernel | None, ...]:
    """Of each stage of a program its kernel for ``tile`` rows; None where it is interpreted.

    ``inputs`` are the shapes of all inputs. Nothing is compiled yet.
    """
    program, plan = parse(text), layout(text)
    device = inputs[0].device.type
    if not tile or not (device == "cpu" or _is_aligned(program, plan, inputs, tile)):
        return (None,) * len(plan.stages)
    room = _room(program, plan, tile, device)
    return tuple(
        _kernel(_KernelWriter(program, plan, stage, inputs, tile), room)
        if is_worth_fusing(stage)
        else None
        for stage in plan.stages
    )


def _kernel(writer: _KernelWriter, room: int) -> Kernel | None:
    try:
        with for_a_kernel():
            module = decomposed(writer.write())
        unbuilt = functools.cache(functools.partial(unbuilt_kernel, module))
        taken = _allocates(module, unbuilt)
    except Exception as error:  # whatever Inductor cannot write: the operators can do it
        what = str(error).partition("\n")[0]
        log.info("a stage runs operator by operator: %s: %s", type(error).__name__, what)
        return None
    memory = tuple(memory for memory, _ in writer.places.values())
    begin = functools.cache(functools.partial(begin_kernel, module))
    compiled = functools.cache(functools.partial(compile_kernel, module))
    kernel = Kernel(memory, taken, begin, compiled, lambda given: unbuilt().run(given))
    return kernel if taken <= room else None


def _allocates(module: fx.GraphModule, unbuilt: Callable[[], Unbuilt]) -> int:
    """What a kernel allocates, in bytes; written once for all processes that share a cache."""
    key = kernel_key(module)
    if key is None:
        return unbuilt().allocates
    answers, question = Answers(Path(cache_directory()) / "fxremat" / "kernels"), {"kernel": key}
    known = answers.read(question)
    if not isinstance(known, int):
        known = unbuilt().allocates
        answers.keep(question, known)
    return known
