"""Where a change of the schedule could be made again: at ops that look the same.

Deep networks repeat their blocks. Two ops are *alike* when time, workspace, phase and the sizes
of what they read and write agree. A change is moved to another place by moving its ops and its
stages by constant offsets, each to the nearest alike op. The offsets come from a pair: an op of
the change and a stage that reads its values directly. Every alike pair of writer and reader gives
one place. This is only a guess at what to try: the search judges it by the bytes of the profile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import tuning
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule, Undo


@dataclass(frozen=True)
class RunChange:
    """Extra runs that a change added and removed."""

    add: tuple[ExtraRun, ...]
    remove: tuple[ExtraRun, ...]

    @staticmethod
    def of(journal: Iterable[Undo]) -> RunChange:
        """The net change of a journal."""
        net: dict[ExtraRun, int] = {}
        for undo in journal:
            for run in undo.added:
                net[run] = net.get(run, 0) + 1
            for run in undo.removed:
                net[run] = net.get(run, 0) - 1
        add = tuple(run for run, count in net.items() if count > 0)
        return RunChange(add, tuple(run for run, count in net.items() if count < 0))

    def on(self, state: StageSchedule) -> tuple[tuple[ExtraRun, ...], tuple[ExtraRun, ...]]:
        """The part of the change that the state does not have yet."""
        add = tuple(run for run in self.add if run[0] not in state.extra[run[1]])
        return add, tuple(run for run in self.remove if run[0] in state.extra[run[1]])


class RepeatedChanges:
    """Classes of alike ops."""

    def __init__(self, model: IndexedProblem) -> None:
        self.model = model
        signatures: dict[object, list[int]] = {}
        for op in range(model.n):
            signatures.setdefault(_signature(model, op), []).append(op)
        self.alike: list[list[int]] = [[] for _ in range(model.n)]
        for ops in signatures.values():
            for op in ops:
                self.alike[op] = ops
        self.readers: list[list[int]] = [[] for _ in range(model.n)]
        for op, reads in enumerate(model.reads):
            for value in reads:
                if model.writer[value] >= 0:
                    self.readers[model.writer[value]].append(op)

    def of(self, change: RunChange) -> Iterator[RunChange]:
        """The change, moved to every other place where alike ops stand."""
        anchor = self._anchor(change)
        if anchor is None:
            return
        op, stage = anchor
        for other in self.alike[op]:
            if other == op:
                continue
            for reader in self.readers[other]:
                if self.alike[reader] is self.alike[stage]:
                    moved = self._move(change, other - op, reader - stage)
                    if moved.add or moved.remove:
                        yield moved
                    break

    def _anchor(self, change: RunChange) -> ExtraRun | None:
        for op, stage in (*change.add, *change.remove):
            if stage in self.readers[op] and len(self.alike[op]) > 1:
                return op, stage
        return None

    def _move(self, change: RunChange, ops: int, stages: int) -> RunChange:
        return RunChange(
            self._move_runs(change.add, ops, stages), self._move_runs(change.remove, ops, stages)
        )

    def _move_runs(self, runs: tuple[ExtraRun, ...], ops: int, stages: int) -> tuple[ExtraRun, ...]:
        out = []
        for op, stage in runs:
            to, at = self._nearest(op, op + ops), self._nearest(stage, stage + stages)
            if to is not None and at is not None and to < at:
                out.append((to, at))
        return tuple(dict.fromkeys(out))

    def _nearest(self, op: int, position: int) -> int | None:
        alike = self.alike[op]
        k = bisect_left(alike, position)
        near = min(alike[max(0, k - 1) : k + 1], key=lambda other: abs(other - position))
        return near if abs(near - position) <= tuning.REPEAT_REACH else None


def _signature(model: IndexedProblem, op: int) -> object:
    reads = tuple(sorted(model.bytes[value] for value in model.reads[op]))
    writes = tuple(model.bytes[value] for value in model.writes[op])
    phase = model.problem.ops[op].phase
    return model.time[op], model.workspace[op], model.repeatable[op], phase, reads, writes
