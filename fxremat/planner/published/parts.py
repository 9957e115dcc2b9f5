"""A part of a problem alone: a stretch of the forward, a pause that needs memory, its backward.

In the pause the rest of the problem runs, so the part may hold only what is left of the budget. The
plans for several pauses and budgets are the ways to run the part (Zhao et al., "Rockmate", ICML
2023, section 3, solves each block for several bytes saved and several peaks). Equal parts are
planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

from fxremat.core.problem import Op, Phase, Problem, Value
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.editable_schedule import descend_from_store_all
from fxremat.planner.local.stage_schedule import ExtraRun, ParetoFront, steps_of
from fxremat.planner.plans import not_beaten

PAUSE = "pause"
Steps = tuple[int, ...]
"""The ops of a part's backward, with forward ops between them that run again."""
MayRerun = Callable[[int], bool]
"""Whether an op of the forward may run again."""


@dataclass(frozen=True)
class Part:
    """Two stretches of the ops of a model.

    ``local`` are the values that may be freed and that only these ops touch.
    """

    model: IndexedProblem
    forward: range
    backward: range
    local: frozenset[int]

    @property
    def marks(self) -> tuple[Set[int], ...]:
        """Sets of values that differ in what they are to the part."""
        return (self.local,)

    def stays(self, value: int) -> bool:
        """Whether the value is there after the part, too."""
        model, end = self.model, max(self.forward.stop, self.backward.stop)
        kept = model.is_output[value] or model.last_reads[value] >= end
        return kept and not model.evictable(value)

    @property
    def ops(self) -> Steps:
        """All ops of the part."""
        return (*self.forward, *self.backward)

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All that matters for planning the part alone, its values numbered as they come.

        Two parts of one shape have the same plans, op for op.
        """
        model, number = self.model, dict[int, int]()
        rows: list[object] = [len(self.forward)]
        for op in self.ops:
            for value in (*model.reads[op], *model.writes[op]):
                if value not in number:
                    number[value] = len(number)
                    marks = (value in its for its in self.marks)
                    rows.append((model.bytes[value], *marks, self.stays(value)))
            pairs = tuple((number[read], number[write]) for read, write in model.inplace[op])
            reads = tuple(number[value] for value in model.reads[op])
            writes = tuple(number[value] for value in model.writes[op])
            own = model.time[op], model.workspace[op], model.repeatable[op]
            rows.append((*own, reads, writes, pairs))
        return tuple(rows)

    def problem(self, pause_bytes: int, may_rerun: MayRerun) -> Problem:
        """The problem of these ops alone, with so many bytes needed between the two halves.

        What stays is an output, or resident. ``may_rerun`` says which forward ops may run again.
        """
        ops = [_op(self.model, op, "forward", may_rerun(op)) for op in self.forward]
        ops.append(Op(PAUSE, (), (), 0.0, pause_bytes, "any", False))
        ops.extend(_op(self.model, op, "backward", False) for op in self.backward)
        written = {name for op in ops for name in op.writes}
        names = dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes))
        staying = {name for name in names if self.stays(int(name))}
        outside = [name for name in names if name not in written]
        return Problem(
            name="part",
            values=tuple(Value(name, self.model.bytes[int(name)]) for name in names),
            ops=tuple(ops),
            inputs=tuple(name for name in outside if name not in staying),
            resident=tuple(name for name in outside if name in staying),
            outputs=tuple(name for name in names if name in staying and name in written),
        )

    def schedules(
        self,
        values: Iterable[int],
        may_rerun: MayRerun,
        deadline: Deadline,
        improve: Callable[[ParetoFront], None] = lambda front: None,
    ) -> Iterator[Steps]:
        """What evictions find for the part alone, with pauses that need up to all the values."""
        own = max(self.model.own_bytes[op] for op in self.ops)
        whole = self.model.size_of(values) + own
        for pause in constants.HALVES:
            if not deadline.running():
                return
            model = IndexedProblem(self.problem(int(pause * whole), may_rerun))
            front = ParetoFront(model)
            work = min(2 * constants.WORK // 5, constants.WORK_PER_OP * model.n)
            descend_from_store_all(front, 0, repeat(work), deadline)
            improve(front)
            for entry in reversed(front.entries):
                yield self.backward_with(entry.runs())

    def backward_with(self, runs: Iterable[ExtraRun]) -> Steps:
        """What follows the pause in a schedule of the part alone that has these extra runs."""
        ops = (*self.forward, -1, *self.backward)
        steps = steps_of(len(ops), runs)
        return tuple(ops[k] for k in steps[steps.index(len(self.forward)) + 1 :])


def _op(model: IndexedProblem, op: int, phase: Phase, repeatable: bool) -> Op:
    return Op(
        name=str(op),
        reads=tuple(map(str, model.reads[op])),
        writes=tuple(map(str, model.writes[op])),
        time_us=model.time[op],
        workspace_bytes=model.workspace[op],
        phase=phase,
        repeatable=repeatable,
        inplace=tuple((str(read), str(write)) for read, write in model.inplace[op]),
    )


@dataclass
class PartPlans:
    """The backwards of parts: store-all first, then what was found, once for equal parts."""

    deadline: Deadline
    found: dict[tuple[object, ...], list[Steps]] = field(default_factory=dict)

    def of(self, part: Part, search: Callable[[], Iterable[Steps]]) -> list[Steps]:
        """Those of a part; only store-all once the clock has stopped."""
        ops = part.ops
        if part.shape not in self.found and self.deadline.running():
            place = {op: k for k, op in enumerate(ops)}
            self.found[part.shape] = [tuple(place[op] for op in steps) for steps in search()]
        moved = [tuple(ops[k] for k in steps) for steps in self.found.get(part.shape, ())]
        return list(dict.fromkeys([tuple(part.backward), *moved]))


def worth_a_choice(
    options: Iterable[Steps], figures: Callable[[Steps], Sequence[float]], most: int
) -> list[Steps]:
    """The options that no other beats in all figures, and only so many of them."""
    distinct = list(dict.fromkeys(options))
    return [distinct[k] for k in not_beaten([figures(option) for option in distinct], most)]


def read_later(model: IndexedProblem, steps: Sequence[int]) -> frozenset[int]:
    """The values that must be there before the steps: read before they are written."""
    live: set[int] = set()
    for op in reversed(steps):
        live.difference_update(model.writes[op])
        live.update(model.reads[op])
    return frozenset(live)


def most_alive(model: IndexedProblem, steps: Sequence[int], keep: frozenset[int]) -> int:
    """Bytes at the worst step, of what the steps touch; values in ``keep`` stay to the end."""
    touched = frozenset(v for op in steps for v in (*model.reads[op], *model.writes[op]))
    back = backwards(model, steps, touched, keep)
    used = (alive - model.overtaken(op, gone, model.writes[op]) for op, alive, gone in back)
    return max(used, default=0)


def backwards(
    model: IndexedProblem, steps: Sequence[int], values: frozenset[int], keep: frozenset[int]
) -> Iterator[tuple[int, int, set[int]]]:
    """The steps, the last first: the op, the bytes alive while it runs, what is gone after it.

    Bytes are those of the given values and of its workspace; values in ``keep`` stay to the end. A
    copy is held while the next that happens to it is a read, as a replay counts it.
    """
    live = set(keep & values)
    total = model.size_of(live)
    for op in reversed(steps):
        writes, reads = values.intersection(model.writes[op]), values.intersection(model.reads[op])
        gone = set(writes | reads) - live
        yield op, model.workspace[op] + total + model.size_of(gone), gone
        total += model.size_of(reads - live) - model.size_of(writes & live)
        live = (live - writes) | reads
