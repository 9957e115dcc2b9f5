"""What running a cluster takes: time, and bytes, with what crosses between clusters left open.

A `ClusterOption` says how the backward of a cluster runs: its ops, and between them forward ops
that run again. From that follows what must be saved from the forward.

The level above decides whether an interface value is there while a cluster runs. So the bytes of a
run are given without these values, for a few steps (`RunStep`). Each step says which interface
values it no longer needs, and which are not made yet. These are the correction terms of Gusak et
al., "HiRemate" (ICML 2025, PMLR 267): with them the peak one level up is that of the replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxremat.planner.published.hrockmate.decomposition import Cluster, Decomposition


@dataclass(frozen=True)
class ClusterOption:
    """The steps of a cluster's backward, forward ops that run again among them."""

    backward: tuple[int, ...]


@dataclass(frozen=True)
class RunStep:
    """Bytes of a run at one step, without interface values.

    ``done`` are those among them that the run touches before this step only, ``not_yet_made`` those
    that it makes after it.
    """

    bytes: int
    done: frozenset[int]
    not_yet_made: frozenset[int]

    def beats(self, other: RunStep) -> bool:
        """Whether this step is the worse one whatever the interface values do."""
        return (
            self.bytes >= other.bytes
            and self.done <= other.done
            and self.not_yet_made <= other.not_yet_made
        )


@dataclass(frozen=True)
class ClusterRun:
    """A sequence of ops of one cluster.

    ``needs`` are the interface values that must be there, ``makes`` those that are there after it,
    ``worst_steps`` those that may have the most bytes. Bytes exclude the fixed values where the run
    is a repeat, and include them where it is a first one.
    """

    steps: tuple[int, ...]
    time: float
    needs: frozenset[int]
    makes: frozenset[int]
    worst_steps: tuple[RunStep, ...]

    @property
    def worst(self) -> int:
        """Bytes at the worst step, without interface values."""
        return max((step.bytes for step in self.worst_steps), default=0)


@dataclass(frozen=True)
class OptionRuns:
    """One option of a cluster: what is saved for it, and the runs that it is made of.

    ``first`` is the forward that saves; ``rerun`` a repeat that saves and makes the interface
    values, ``only`` one that only saves.
    """

    saved: frozenset[int]
    saved_bytes: int
    first: ClusterRun
    rerun: ClusterRun
    only: ClusterRun
    backward: ClusterRun


@dataclass(frozen=True)
class ClusterRuns:
    """The runs of a cluster: ``first_unsaved`` and ``rerun_unsaved`` save nothing."""

    first_unsaved: ClusterRun
    rerun_unsaved: ClusterRun
    options: tuple[OptionRuns, ...]


@dataclass(frozen=True)
class ClusterCosts:
    """Works out the runs of one cluster."""

    decomposition: Decomposition
    cluster: Cluster

    def runs(self, options: Iterable[ClusterOption]) -> ClusterRuns:
        """The runs for these options."""
        return ClusterRuns(
            self._first(frozenset()),
            self._again(frozenset(), self.cluster.makes),
            tuple(self.option(option) for option in options),
        )

    def option(self, option: ClusterOption) -> OptionRuns:
        """The runs of one option."""
        saved = self._read_before_written(option.backward) & self.cluster.local
        return OptionRuns(
            saved,
            self._bytes(saved),
            self._first(saved),
            self._again(saved, self.cluster.makes),
            self._again(saved, frozenset()),
            self._run(option.backward, frozenset(), self.cluster.backward),
        )

    def _first(self, saved: frozenset[int]) -> ClusterRun:
        return self._run(self.cluster.forward, saved, self.cluster.forward)

    def _again(self, saved: frozenset[int], makes: frozenset[int]) -> ClusterRun:
        """Only the ops that it takes: their other results go at once."""
        model, missing, found = self.decomposition.model, set(saved | makes), []
        for op in reversed(self.cluster.forward):
            if not missing.isdisjoint(model.writes[op]):
                found.append(op)
                missing.update(v for v in model.reads[op] if self._own(v))
        return self._run(found[::-1], saved, (), makes)

    def _own(self, value: int) -> bool:
        return value in self.cluster.local or value in self.cluster.makes

    def _read_before_written(self, steps: Sequence[int]) -> frozenset[int]:
        model, live = self.decomposition.model, set[int]()
        for op in reversed(steps):
            live.difference_update(model.writes[op])
            live.update(model.reads[op])
        return frozenset(live)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.decomposition.model.bytes[value] for value in values)

    # -- worst steps ---------------------------------------------------------------------------

    def _run(
        self,
        steps: Sequence[int],
        keep: frozenset[int],
        first: Collection[int],
        makes: frozenset[int] | None = None,
    ) -> ClusterRun:
        """The run that leaves ``keep`` behind; the ops in ``first`` run there for the first time.

        Without ``makes`` it makes what its ops write, but for repeats within a backward: what
        these write of the interface is for the backward alone, like a local value.
        """
        model, home = self.decomposition.model, self.decomposition.home
        needs = self._read_before_written(steps) & home.keys()
        written = {v for op in steps for v in model.writes[op] if v in home and v not in needs}
        if makes is None:
            makes = frozenset(v for v in written if model.writer[v] in first)
        inside = self.cluster.local | (written - makes)
        spans = self._spans(steps, needs | makes)
        inner = self._inside(steps, inside, keep, first)
        worst_steps = [
            RunStep(
                size,
                frozenset(
                    v for v, (_, last) in spans.items() if last < k or (last == k and v in gone)
                ),
                frozenset(v for v, (born, _) in spans.items() if born > k),
            )
            for k, (size, gone) in enumerate(inner)
        ]
        time = sum(model.time[op] for op in steps)
        return ClusterRun(tuple(steps), time, needs, makes, _worst(worst_steps))

    def _spans(self, steps: Sequence[int], values: Collection[int]) -> dict[int, tuple[int, int]]:
        """First and last step that touch each interface value; first 0 where it was there."""
        model, spans = self.decomposition.model, dict[int, tuple[int, int]]()
        for k, op in enumerate(steps):
            for value in model.writes[op]:
                if value in values:
                    spans.setdefault(value, (k, k))
            for value in (*model.reads[op], *model.writes[op]):
                if value in values:
                    spans[value] = (spans.get(value, (0, 0))[0], k)
        return spans

    def _inside(
        self,
        steps: Sequence[int],
        inside: frozenset[int],
        keep: frozenset[int],
        first: Collection[int],
    ) -> list[tuple[int, frozenset[int]]]:
        """Bytes at each step, and the interface values that its op writes over, if they go.

        Backwards: a copy is held while the next that happens to it is a read, as a replay does.
        """
        model = self.decomposition.model
        live, out = set(keep), list[tuple[int, frozenset[int]]]()
        total = self._bytes(live)
        ahead = None
        for op in reversed(steps):
            writes = inside.intersection(model.writes[op])
            reads = inside.intersection(model.reads[op])
            gone = (writes | reads) - live
            size = model.workspace[op] + total + self._bytes(gone)
            if op in first:
                size += self.decomposition.fixed[0][op]
                ahead = self.decomposition.fixed[1][op]
            elif ahead is not None:
                size += ahead  # a repeat in front of the backward's next op
            less, over = self._overtaken(op, writes, gone, op in first)
            out.append((size - less, over))
            total += self._bytes(reads - live) - self._bytes(writes & live)
            live = (live - writes) | reads
        return out[::-1]

    def _overtaken(
        self, op: int, new: Iterable[int], gone: Iterable[int], first: bool
    ) -> tuple[int, frozenset[int]]:
        """Bytes that the op writes over what ends there, and interface values that it may."""
        decomposition, sizes = self.decomposition, self.decomposition.model.bytes
        begins, ends = set(new), set(gone)
        over: set[int] = set()
        for value in decomposition.model.writes[op]:
            if (first and self._fixed(value)) or value in self.cluster.makes:
                begins.add(value)
        if first:
            fixed = [v for v in decomposition.model.reads[op] if self._fixed(v)]
            ends.update(
                v
                for v in fixed
                if decomposition.last_reads[v] == op and not decomposition.model.is_output[v]
            )
        less = 0
        for read, write in decomposition.model.inplace[op]:
            if write not in begins:
                continue
            if read in ends:
                ends.remove(read)
                begins.remove(write)
                less += min(sizes[read], sizes[write])
            elif read in decomposition.home and read not in over and sizes[read] <= sizes[write]:
                over.add(read)
                begins.remove(write)
        return less, frozenset(over)

    def _fixed(self, value: int) -> bool:
        return value not in self.decomposition.home and value not in self.cluster.local


def _worst(worst_steps: Iterable[RunStep]) -> tuple[RunStep, ...]:
    """The worst steps that no other beats."""
    kept: list[RunStep] = []
    for step in sorted(worst_steps, key=lambda m: (-m.bytes, len(m.done) + len(m.not_yet_made))):
        if not any(other.beats(step) for other in kept):
            kept.append(step)
    return tuple(kept)


@dataclass(frozen=True)
class Figures:
    """What a level above chooses an option by: time, bytes saved, peaks of both parts."""

    time: float
    saved: int
    forward: int
    backward: int

    @staticmethod
    def of(runs: OptionRuns, sizes: Sequence[int]) -> Figures:
        """Saved bytes count the interface values that the backward needs."""
        held = runs.saved_bytes + sum(sizes[value] for value in runs.backward.needs)
        return Figures(runs.backward.time, held, runs.first.worst, runs.backward.worst)

    @cached_property
    def row(self) -> tuple[float, int, int, int]:
        """The figures in one row."""
        return self.time, self.saved, self.forward, self.backward

    def beats(self, other: Figures) -> bool:
        """Whether no figure is worse."""
        return all(mine <= its for mine, its in zip(self.row, other.row, strict=True))


def pareto(
    decomposition: Decomposition, cluster: Cluster, options: Iterable[ClusterOption], most: int
) -> list[ClusterOption]:
    """Options that no other beats; thinned evenly by the bytes saved where there are many."""
    costs, sizes = ClusterCosts(decomposition, cluster), decomposition.model.bytes
    weighed = [
        (Figures.of(costs.option(option), sizes), option) for option in dict.fromkeys(options)
    ]
    weighed.sort(key=lambda pair: (pair[0].saved, pair[0].row))
    kept: list[tuple[Figures, ClusterOption]] = []
    for figures, option in weighed:
        if not any(other.beats(figures) for other, _ in kept):
            kept.append((figures, option))
    if len(kept) <= most:
        return [option for _, option in kept]
    picks = {round(k * (len(kept) - 1) / (most - 1)) for k in range(most)}
    return [kept[k][1] for k in sorted(picks)]
