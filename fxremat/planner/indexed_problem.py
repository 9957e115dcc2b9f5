"""The problem by index: what the solvers' inner loops read.

Resident values are left out of reads, since they are always there. Their bytes are the floor of
every profile. Outputs stay once written, so they have no gaps and no further copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add

from fxremat.core.problem import Problem

INPUT = -1


class IndexedProblem:
    """Ops and values as lists; a *stage* is the position of an op in base order.

    ``n`` is the number of ops. Times are in microseconds, sizes in bytes. ``writer`` is `INPUT`
    for values that no op writes. Resident values are not among the values.
    """

    def __init__(self, problem: Problem) -> None:
        resident, outputs = set(problem.resident), set(problem.outputs)
        names = [value.name for value in problem.values if value.name not in resident]
        index = {name: i for i, name in enumerate(names)}
        self.problem, self.n, self.value_names = problem, len(problem.ops), names
        self.time = [op.time_us for op in problem.ops]
        self.workspace = [op.workspace_bytes for op in problem.ops]
        self.repeatable = [op.repeatable for op in problem.ops]
        self.reads = [tuple({index[r]: None for r in op.reads if r in index}) for op in problem.ops]
        self.writes = [tuple({index[w]: None for w in op.writes}) for op in problem.ops]
        self.inplace = [
            tuple((index[r], index[w]) for r, w in op.inplace if r in index and r not in outputs)
            for op in problem.ops
        ]
        self.bytes = [problem.bytes_of[name] for name in names]
        self.writer = [INPUT] * len(names)
        for i, written in enumerate(self.writes):
            for value in written:
                self.writer[value] = i
        self.is_output = [name in outputs for name in names]
        self.inputs = tuple(index[name] for name in dict.fromkeys(problem.inputs) if name in index)

    @cached_property
    def last_reads(self) -> list[int]:
        """The last op that reads each value in base order; -1 where none does."""
        last = [-1] * len(self.bytes)
        for op, reads in enumerate(self.reads):
            for value in reads:
                last[value] = op
        return last

    @cached_property
    def last_needs(self) -> list[int]:
        """The last op that may read each value, some of them because they run again."""
        last = list(self.last_reads)
        for op in reversed(range(self.n)):
            if self.repeatable[op]:
                kept = (last[value] for value in self.writes[op] if not self.is_output[value])
                until = max(kept, default=-1)
                for value in self.reads[op]:
                    last[value] = max(last[value], until)
        return last

    @cached_property
    def written_bytes(self) -> list[int]:
        """What an op writes."""
        return [self.size_of(values) for values in self.writes]

    @cached_property
    def time_per_byte(self) -> list[float]:
        """An op's time per byte written."""
        return [t / max(1, size) for t, size in zip(self.time, self.written_bytes, strict=True)]

    @cached_property
    def own_bytes(self) -> list[int]:
        """What an op writes, and its workspace."""
        return list(map(add, self.workspace, self.written_bytes))

    def evictable(self, value: int) -> bool:
        """Whether the value may be freed and computed again."""
        op = self.writer[value]
        return op != INPUT and self.repeatable[op] and not self.is_output[value]

    def makers(
        self, ops: Sequence[int], wanted: Iterable[int], own: Container[int]
    ) -> tuple[int, ...]:
        """Those of the ops that make the wanted values again, and their ``own`` that they read."""
        missing, found = set(wanted), list[int]()
        for op in reversed(ops):
            if not missing.isdisjoint(self.writes[op]):
                found.append(op)
                missing.update(value for value in self.reads[op] if value in own)
        return tuple(reversed(found))

    def overtaken(self, op: int, ends: Iterable[int], begins: Iterable[int]) -> int:
        """Bytes that the op writes in place: of values that end there, over by those that begin."""
        ends, begins, saved = {*ends}, {*begins}, 0
        for read, write in self.inplace[op]:
            if read in ends and write in begins:
                ends.remove(read)
                begins.remove(write)
                saved += min(self.bytes[read], self.bytes[write])
        return saved

    def size_of(self, values: Iterable[int]) -> int:
        """Bytes of the values together."""
        return sum(self.bytes[value] for value in values)

    def time_of(self, steps: Iterable[int]) -> float:
        """Microseconds of the steps together."""
        return sum(self.time[op] for op in steps)

    def names(self, steps: Iterable[int]) -> tuple[str, ...]:
        """Steps by op name."""
        ops = self.problem.ops
        return tuple(ops[step].name for step in steps)


def live_bytes(spans: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """The sum of the sizes at each of so many places; spans are (first, stop, size)."""
    change = [0] * (count + 1)
    for first, stop, size in spans:
        change[first] += size
        change[stop] -= size
    return list(accumulate(change[:count]))


def peak_bound(model: IndexedProblem) -> int:
    """A lower bound on the peak of every schedule whose first runs come in base order.

    At the first run of op ``i`` these are live:

    * the resident values, and the outputs written by earlier ops;
    * what the op reads and writes, less what it may take over in place, and its workspace;
    * inputs, and values of earlier ops that are not repeatable, if op ``i`` or a later one reads
      them: that read is still to come, and nothing can bring the value back.

    The bound is the largest such sum. With another order of the first runs fewer outputs might be
    live at the worst op, so the bound is proven for base order only.
    """
    sizes, ops, evictable = model.bytes, range(model.n), model.evictable
    last = [max(read, op, 0) for read, op in zip(model.last_reads, model.writer, strict=True)]
    spans = [
        (max(op, 0), model.n if model.is_output[value] else last[value] + 1, sizes[value])
        for value, op in enumerate(model.writer)
        if not evictable(value)
    ]
    touched = ((op, v) for op in ops for v in (*model.reads[op], *model.writes[op]) if evictable(v))
    live = live_bytes((*spans, *((op, op + 1, sizes[value]) for op, value in touched)), model.n)
    highest = 0
    for op, pairs in enumerate(model.inplace):
        # A pair may be taken over in place only if its read can die here.
        over = (pair for pair in pairs if evictable(pair[0]) or last[pair[0]] <= op)
        shared = sum(min(sizes[read], sizes[write]) for read, write in over)
        highest = max(highest, live[op] + model.workspace[op] - shared)
    return model.problem.resident_bytes + highest
