"""From a region to loops: one call of `fxremat_kernels::rows` for each level.

A loop computes what is read outside of the region, what later loops read of it, and nothing else.
It begins at the border and at narrow values of earlier loops, which it gets as rows. Big values of
earlier loops it computes again, a chunk at a time. So big values never exist as a whole, unless
they are read outside.

    level 0   x, w, labels -> losses [N], max [N, 1], log [N, 1]
    level 1   x, w, labels, max, log, gradient -> dx, dw        logits of a chunk again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat.passes.nodes import dtype_of, shape_of
from fxremat.passes.variants.chunks.calls import (
    Calls,
    Operand,
    Result,
    operands,
    row_shape_of,
)
from fxremat.passes.variants.chunks.one_hot_rows import with_one_hot_rows, without_unused
from fxremat.passes.variants.chunks.regions import Region
from fxremat.runtime.chunks.buffers import MATMULS
from fxremat.runtime.chunks.program import Instruction, Kind, Program, Ref, RowCount

BLOCK = 1 << 40
"""While a program is being written, whole inputs and so on are numbered from multiples of this."""


class Refused(Exception):
    """A region that cannot be written as loops."""


@dataclass(frozen=True)
class Loop:
    """A call to be: its inputs, and the nodes that its results stand for.

    ``dense`` are row inputs that must be dense behind their rows, because they are reshaped.
    """

    level: int
    rows: tuple[fx.Node, ...]
    whole: tuple[fx.Node, ...]
    dense: frozenset[fx.Node]
    program: Program
    results: tuple[fx.Node, ...]


class _ProgramWriter:
    """Writes the program of one loop."""

    def __init__(self, region: Region, stops: Callable[[fx.Node, Kind], bool]) -> None:
        self.region, self.stops = region, stops
        self.rows: list[fx.Node] = []
        self.whole: list[fx.Node] = []
        self.dense: set[fx.Node] = set()
        self.setup: list[Instruction] = []
        self.loop: list[Instruction] = []
        self.made: dict[tuple[fx.Node, Kind], int] = {}
        self.reshaped_values: dict[tuple[int, tuple[int, ...]], int] = {}

    # What a value is computed from.

    def is_computed(self, node: fx.Node, kind: Kind) -> bool:
        if self.region.kinds.get(node) == kind:
            return not self.stops(node, kind)
        return kind == "row" and not node.all_input_nodes and self.calls(node, kind) is not None

    def calls(self, node: fx.Node, kind: Kind) -> Calls | None:
        return self.region.calls(node, kind)

    def slice_of(self, results: list[fx.Node]) -> list[tuple[fx.Node, Kind]]:
        """Everything to compute for the results, in graph order."""
        found: set[tuple[fx.Node, Kind]] = set()
        stack = [(node, self.region.kinds[node]) for node in results]
        while stack:
            one = stack.pop()
            if one in found:
                continue
            found.add(one)
            calls = self.calls(*one)
            assert calls is not None
            stack += [(o.node, o.kind) for o in operands(calls) if self.is_computed(o.node, o.kind)]
        return sorted(found, key=lambda one: (self.region.position[one[0]], one[1]))

    # Writing it down.

    def write(self, results: list[fx.Node]) -> None:
        for node, kind in self.slice_of(results):
            calls = self.calls(node, kind)
            assert calls is not None
            parts: list[int] = []
            for call in calls:
                args = self.translated(call.args, parts, call.op in MATMULS)
                named = {k: self.translated(v, parts, False) for k, v in call.kwargs.items()}
                one = Instruction(call.op, args, named, call.kind, call.row_shape, call.dtype)
                parts.append(self.add(one))
            self.made[node, kind] = parts[-1]

    def add(self, one: Instruction) -> int:
        self.loop.append(one)
        return 3 * BLOCK + len(self.loop) - 1

    def translated(self, thing: Any, parts: list[int], for_matmul: bool) -> Any:
        if isinstance(thing, Operand):
            return Ref(self.value(thing))
        if isinstance(thing, Result):
            return Ref(parts[thing.position])
        if isinstance(thing, (list, tuple)):
            return tuple(self.translated(part, parts, for_matmul) for part in thing)
        return thing

    def value(self, wanted: Operand) -> int:
        node, kind = wanted.node, wanted.kind
        if (node, kind) not in self.made:
            self.made[node, kind] = self.input(node, kind)
        number = self.made[node, kind]
        own = shape_of(node) if kind == "whole" else row_shape_of(node, self.region.rows)
        if kind == "last" or own == wanted.row_shape:
            return number
        return self.reshaped(number, wanted)

    def reshaped(self, number: int, wanted: Operand) -> int:
        """A look at a value in another shape; it has to be dense."""
        key = number, wanted.row_shape
        if key not in self.reshaped_values:
            dtype = dtype_of(wanted.node)
            if wanted.kind == "whole":
                self.setup.append(
                    Instruction("aten.view.default", (Ref(number), wanted.row_shape), {}, "whole",
                                wanted.row_shape, dtype)
                )  # fmt: skip
                self.reshaped_values[key] = 2 * BLOCK + len(self.setup) - 1
            else:
                number = self.as_dense(number, wanted.node)
                shape = (RowCount(), *wanted.row_shape)
                self.reshaped_values[key] = self.add(
                    Instruction("aten.view.default", (Ref(number), shape), {}, "row",
                                wanted.row_shape, dtype)
                )  # fmt: skip
        return self.reshaped_values[key]

    def as_dense(self, number: int, node: fx.Node) -> int:
        """The value itself if its memory is dense, else a copy."""
        if number < BLOCK:
            self.dense.add(node)
            return number
        one = self.loop[number - 3 * BLOCK]
        if one.op not in ("aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
                          "aten.select.int"):  # fmt: skip
            return number
        copy = Instruction(
            "aten.clone.default", (Ref(number),), {}, "row", one.row_shape, one.dtype
        )
        return self.add(copy)

    def input(self, node: fx.Node, kind: Kind) -> int:
        if kind not in ("row", "whole") or (
            self.region.is_view(node) and node in self.region.kinds
        ):
            raise Refused(f"{node} is no input of a loop")
        where = self.rows if kind == "row" else self.whole
        where.append(node)
        return (0 if kind == "row" else BLOCK) + len(where) - 1

    def program(self, results: list[fx.Node]) -> Program:
        starts = [0, len(self.rows), len(self.rows) + len(self.whole)]
        starts.append(starts[-1] + len(self.setup))
        made = tuple(self.made[node, self.region.kinds[node]] for node in results)
        written = Program(0, 0, tuple(self.setup), tuple(self.loop), made)
        return written.renumbered(
            lambda n: starts[n // BLOCK] + n % BLOCK, len(self.rows), len(self.whole)
        )


def plan_loops(region: Region, level: Mapping[fx.Node, int]) -> list[Loop]:
    wanted: dict[int, set[fx.Node]] = {}
    for node in region.read_outside():
        wanted.setdefault(level[node], set()).add(node)
    depending_on_big, loops = region.depending_on_big(), []
    for now in range(max(level.values()), -1, -1):
        results = sorted(wanted.get(now, ()), key=region.position.__getitem__)
        if not results:
            continue

        def stops(node: fx.Node, kind: Kind, now: int = now) -> bool:
            narrow = not region.is_big(node) and not region.is_view(node)
            return level[node] < now and (kind == "sum" or (narrow and node in depending_on_big))

        writer = _ProgramWriter(region, stops)
        writer.write(results)
        if not writer.rows:
            raise Refused("a loop without rows")
        loops.append(_loop(writer, now, results))
        for node in (*loops[-1].rows, *loops[-1].whole):
            if node in region.kinds:
                wanted.setdefault(level[node], set()).add(node)
    return loops[::-1]


def _loop(writer: _ProgramWriter, level: int, results: list[fx.Node]) -> Loop:
    row_shapes = [row_shape_of(node, writer.region.rows) or () for node in writer.rows]
    program = with_one_hot_rows(writer.program(results), row_shapes, writer.whole)
    program, rows, whole = without_unused(program)
    return Loop(
        level, tuple(writer.rows[n] for n in rows), tuple(writer.whole[n] for n in whole),
        frozenset(writer.dense), program, tuple(results),
    )  # fmt: skip
