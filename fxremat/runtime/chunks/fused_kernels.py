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
from dataclasses import dataclass
from math import prod

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
    is_view,
    layout,
    while_adding,
)
from fxremat.runtime.chunks.program import Instruction, Program, overload, parse

log = logging.getLogger(__name__)

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


def is_worth_fusing(stage: Stage) -> bool:
    """Whether a stage is more than one operator between two matmuls."""
    return not stage.of_chunk and len(stage.values) > 1


def written(program: Program, stage: Stage) -> tuple[int, ...]:
    """The values of a stage that somebody reads after it; sums are added to."""
    inside = set(stage.values)
    read = {
        base
        for number, one in enumerate(program.loop, program.first)
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


@dataclass(frozen=True)
class _KernelWriter:
    """What one stage does to ``tile`` rows; a kernel is written of a trace of it."""

    program: Program
    plan: Layout
    stage: Stage
    inputs: tuple[Shape, ...]
    tile: int

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def by_comparison(self) -> bool:
        """Whether one number a row is added where positions and index are equal."""
        return self.device.type != "cpu"

    @functools.cached_property
    def memory(self) -> tuple[Memory, ...]:
        """What the kernel is given, each once."""
        used = *read(self.program, self.stage), *written(self.program, self.stage)
        return tuple(dict.fromkeys(map(self.memory_of, used)))

    def memory_of(self, number: int) -> Memory:
        one = self.program.instruction(number)
        if one is not None and one.kind == "sum":
            return Memory("sum", number)
        if one is None or number in self.program.results:
            return Memory("value", number)
        return Memory("slot", self.plan.slot_of[number])

    def like(self, memory: Memory) -> torch.Tensor:
        """A tensor like it, in the current (fake) mode."""
        one = None if memory.kind == "slot" else self.program.instruction(memory.number)
        sizes: tuple[int, ...]
        if memory.kind == "slot":
            slot = self.plan.slots[memory.number]
            sizes, dtype = (self.tile, slot.numel), slot.dtype
        elif one is None:
            given = self.inputs[memory.number]
            if memory.number >= self.program.num_rows:
                return given.empty()
            sizes, dtype = (self.tile, *given.sizes[1:]), given.dtype
        elif one.kind == "sum":
            sizes, dtype = one.row_shape, accumulates_in(one.dtype)
        else:
            sizes, dtype = (self.tile, *one.row_shape), one.dtype
        return torch.empty(sizes, dtype=dtype, device=self.device)

    def run(self, *given: torch.Tensor) -> tuple[()]:
        """Compute the stage in this memory."""
        held = dict(zip(self.memory, given, strict=True))
        kept = set(written(self.program, self.stage))
        known: dict[int, torch.Tensor] = {}

        def value(number: int) -> torch.Tensor:
            if number not in known:
                if is_view(self.program, number):
                    known[number] = self.program[number].run(value, self.tile)
                else:
                    known[number] = self.shaped(held[self.memory_of(number)], number)
            return known[number]

        for number in self.stage.values:
            one = self.program[number]
            if one.kind == "sum":
                total = held[self.memory_of(number)]
                args, named = one.arguments(value, self.tile)
                total.copy_(total + overload(one.op)(*args, **named, dtype=total.dtype))
                continue
            made = self.computed(one, value)
            if number in kept:  # whoever reads on reads it there
                place = held[self.memory_of(number)]
                made = self.shaped(place.copy_(made.reshape(place.shape)), number)
            known[number] = made
        return ()

    def shaped(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        """A slot holds values of any shape with as many elements."""
        one = self.program.instruction(number)
        shape = memory.shape if one is None else (self.tile, *one.row_shape)
        return memory if memory.shape == shape else memory.view(shape)

    def computed(self, one: Instruction, value: Callable[[int], torch.Tensor]) -> torch.Tensor:
        args, named = one.arguments(value, self.tile)
        if self.by_comparison and one.op == "aten.scatter_add.default":
            into, dim, index, element = args
            if dim == 1 and into.dim() == 2 and index.shape[1:] == (1,):
                # in one loop over all elements; at an index, a GPU would write, add, and read
                positions = torch.arange(into.shape[1], device=self.device)
                return torch.where(index == positions, into + element, into)
        if one.op == "aten.clone.default":
            named["memory_format"] = torch.contiguous_format
        made: torch.Tensor = overload(one.op)(*args, **named)
        return made


def _room(program: Program, plan: Layout, tile: int, device: str) -> int:
    """Bytes that a fused stage may take.

    Beside what it has no use for, a few numbers for each row: maxima, sums and the like, each of
    which has memory of its own in Inductor's code. They are not planned for, but counted exactly
    in the dry run of the code.
    """
    sums = [one for one in program.loop if one.kind == "sum" and one.op not in MATMULS]
    partial = sum(while_adding(one, device) for one in sums)
    return plan.set_aside(tile) + partial + tile * CACHE_LINE_BYTES


def _is_aligned(program: Program, plan: Layout, inputs: Sequence[Shape], tile: int) -> bool:
    """Whether each tile begins where a GPU's kernels expect it."""
    rows = [shape.dtype.itemsize * prod(shape.sizes[1:]) for shape in inputs[: program.num_rows]]
    rows += [slot.nbytes for slot in plan.slots if slot.of_chunk]
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
            module = decomposed(writer.run, list(map(writer.like, writer.memory)))
        unbuilt = functools.cache(functools.partial(unbuilt_kernel, module))
        taken = _allocates(module, unbuilt)
    except Exception as error:  # whatever Inductor cannot write: the operators can do it
        what = str(error).partition("\n")[0]
        log.info("a stage runs operator by operator: %s: %s", type(error).__name__, what)
        return None
    begin = functools.cache(functools.partial(begin_kernel, module))
    compiled = functools.cache(functools.partial(compile_kernel, module))
    kernel = Kernel(writer.memory, taken, begin, compiled, lambda given: unbuilt().run(given))
    return kernel if taken <= room else None


def _allocates(module: fx.GraphModule, unbuilt: Callable[[], Unbuilt]) -> int:
    """What a kernel allocates, in bytes; written once for all processes that share a cache."""
    key = kernel_key(module)
    if key is None:
        return unbuilt().allocates
    answers, question = Answers(cache_directory() / "kernels"), {"kernel": key}
    known = answers.read(question)
    if not isinstance(known, int):
        known = unbuilt().allocates
        answers.keep(question, known)
    return known
