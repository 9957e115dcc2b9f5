"""One level of the hierarchy: which option each cluster takes, and which clusters run again when.

The integer programme of Gusak et al., "HiRemate" (ICML 2025, PMLR 267), written for our graphs:
stages are the clusters' forward and backward parts in base order; in front of each, clusters may
run again, in order. After Checkmate (arXiv 1910.02653, section 4), with clusters for ops:

    R    ``rerun[t][c, k]``, cluster c runs again in stage t, in way k
    S    ``stay[t][v]``, interface value v is there at the start of stage t
    P    ``saved[t][c, o]``, what option o of cluster c needs is there at the start of stage t
    use  ``use[c, o]``, the backward of cluster c runs as option o says
    FREE ``free[t][v, c]``, value v goes right after cluster c ran again: continuous

Bytes are in units of a thousandth of the budget. Each run has a row for each of its worst steps
(see `fxremat.planner.published.hrockmate.cluster_costs`), so that the peak is the one of the
replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxremat.planner.milp.highs import FREE, SCALE, Milp, Solution, Term
from fxremat.planner.published.hrockmate.cluster_costs import (
    ClusterRun,
    ClusterRuns,
    OptionRuns,
    RunStep,
)
from fxremat.planner.published.hrockmate.decomposition import OUTSIDE, Decomposition

NOTHING = -1
"""The option of a run that saves nothing."""


@dataclass(frozen=True)
class ClusterPart:
    """The forward or the backward part of a cluster, and its ops."""

    cluster: int
    backward: bool
    ops: range


@dataclass(frozen=True)
class ClusterRerun:
    """A way for a cluster to run again: for which option it saves values, and what it runs."""

    option: int
    run: ClusterRun


@dataclass
class LevelMilp:
    """The programme of one decomposition, the options of its clusters, and one budget."""

    decomposition: Decomposition
    runs: Sequence[ClusterRuns]
    budget: int
    allow_reruns: bool = True
    milp: Milp = field(default_factory=Milp)
    rerun: list[dict[tuple[int, int], int]] = field(default_factory=list)
    stay: list[dict[int, int]] = field(default_factory=list)
    saved: list[dict[tuple[int, int], int]] = field(default_factory=list)
    use: dict[tuple[int, int], int] = field(default_factory=dict)
    free: list[dict[tuple[int, int], int]] = field(default_factory=list)
    sums: list[tuple[int, list[Term]]] = field(default_factory=list)
    """Columns of bytes, each with the terms that it is the sum of; earlier sums come first."""

    def __post_init__(self) -> None:
        model = self.decomposition.model
        self.byte_unit = max(1, self.budget) / SCALE
        self.time_unit = max(1e-9, model.problem.base_time_us) / SCALE
        self.zero = self.milp.real(high=0.0)
        self.one = self.milp.real(low=1.0)
        self.stages = [*stages_of(self.decomposition)]
        self.last = {s.cluster: t for t, s in enumerate(self.stages) if s.backward}
        self.cluster_reruns = [[*_cluster_reruns(runs)] for runs in self.runs]
        self._find_untils()
        self._add_again()
        self._add_stays()
        self._add_saved()
        for t in range(len(self.stages)):
            self._add_frees(t)
            self._track(t)
        self._use_what_is_saved()
        self.bytes_at_start = [self._bytes_at_start(t) for t in range(len(self.stages) + 1)]
        for t, stage in enumerate(self.stages):
            self._fit_reruns(t)
            if stage.backward:
                self._fit_backward(t, stage.cluster)
            else:
                self._fit_forward(t, stage.cluster)

    # -- columns ---------------------------------------------------------------------------

    def _find_untils(self) -> None:
        """The last stage that may read each interface value, or want each cluster again."""
        home = self.decomposition.home
        self.first_need = dict.fromkeys(home, -1)
        for t, stage in enumerate(self.stages):
            for run in self._segment_runs(stage):
                self.first_need.update((value, t) for value in run.needs)
        self.until = dict(self.first_need)
        self.wanted = [-1] * len(self.runs)
        for c in reversed(range(len(self.runs))):
            saves = any(option.saved for option in self.runs[c].options)
            ends = [self.until[value] for value in self.decomposition.clusters[c].makes]
            self.wanted[c] = max([self.last.get(c, -1) if saves else -1, *ends])
            for way in self.cluster_reruns[c]:
                for value in way.run.needs:
                    self.until[value] = max(self.until[value], self.wanted[c])

    def _segment_runs(self, stage: ClusterPart) -> Iterator[ClusterRun]:
        runs = self.runs[stage.cluster]
        if stage.backward:
            yield from (option.backward for option in runs.options)
        else:
            yield runs.first_unsaved

    def _allowed(self, t: int) -> Iterator[tuple[int, int]]:
        """(cluster, way) for each way in which a cluster may run again in the stage.

        What a backward needs is not saved anew before the backward part begins.
        """
        backward = self.stages[t].backward
        if not self.allow_reruns:
            return
        for c in range(len(self.runs) if backward else self.stages[t].cluster):
            if self.wanted[c] < t:
                continue
            makes = any(self.until[value] >= t for value in self.decomposition.clusters[c].makes)
            for k, way in enumerate(self.cluster_reruns[c]):
                saves = way.option != NOTHING
                if saves and not (backward and t <= self.last[c]):
                    continue
                if way.run.makes and not makes:
                    continue
                yield c, k

    def _add_again(self) -> None:
        for t in range(len(self.stages)):
            row = {
                (c, k): self.milp.binary(self.cluster_reruns[c][k].run.time / self.time_unit)
                for c, k in self._allowed(t)
            }
            self.rerun.append(row)
            for c in {c for c, _ in row}:
                self.milp.row([(column, 1.0) for (d, _), column in row.items() if d == c], high=1.0)

    def _add_stays(self) -> None:
        model = self.decomposition.model
        self.touched = [self._touched(t) for t in range(len(self.stages))]
        self.stay = [{} for _ in range(len(self.stages) + 1)]
        for value, home in self.decomposition.home.items():
            begin = 0 if home == OUTSIDE else home + 1
            pinned = -1 if model.evictable(value) else max(self.first_need[value], 0)
            for t in range(begin, max(pinned, self.until[value]) + 1):
                if t <= pinned:
                    column = self.one
                elif t == begin or value in self.touched[t - 1]:
                    column = self.milp.binary()
                else:
                    column = self.stay[t - 1][value]
                self.stay[t][value] = column

    def _touched(self, t: int) -> set[int]:
        runs = [self.cluster_reruns[c][k].run for c, k in self.rerun[t]]
        runs.extend(self._segment_runs(self.stages[t]))
        return {value for run in runs for value in (*run.needs, *run.makes)}

    def _add_saved(self) -> None:
        """What a first forward saves stays as it is until the cluster may run again."""
        self.saved = [{} for _ in range(len(self.stages) + 1)]
        for c, runs in enumerate(self.runs):
            for o, option in enumerate(runs.options):
                if not option.saved:
                    continue
                changes = {k for k, v in enumerate(self.cluster_reruns[c]) if v.option == o}
                for t in range(c + 1, self.last[c] + 1):
                    before = {(c, k) for k in changes} & self.rerun[t - 1].keys()
                    self.saved[t][c, o] = (
                        self.milp.binary() if t == c + 1 or before else self.saved[t - 1][c, o]
                    )
            self._one_at_a_time(c)
            for o, option in enumerate(runs.options):
                extra = option.backward.time - runs.options[0].backward.time
                self.use[c, o] = self.milp.binary(extra / self.time_unit)
            if runs.options:
                self.milp.row([(self.use[c, o], 1.0) for o in range(len(runs.options))], 1.0, 1.0)

    def _one_at_a_time(self, c: int) -> None:
        done: set[int] = set()
        for t in range(len(self.stages) + 1):
            columns = [column for (d, _), column in self.saved[t].items() if d == c]
            if columns and not done.issuperset(columns):
                self.milp.row([(column, 1.0) for column in columns], high=1.0)
            done.update(columns)

    def stays(self, t: int, value: int) -> int:
        """S[t,v], also where it can only be 0."""
        return self.stay[t].get(value, self.zero)

    def size(self, value: int) -> float:
        """Bytes of the value in units of the programme."""
        return self.decomposition.model.bytes[value] / self.byte_unit

    def _at_most(self, left: Iterable[Term], right: Iterable[Term], slack: float = 0.0) -> None:
        self.milp.row([*left, *((column, -factor) for column, factor in right)], -FREE, slack)

    # -- rows ------------------------------------------------------------------------------

    def _runs_with(self, t: int, c: int, value: int, makes: bool) -> list[Term]:
        """The reruns of the cluster in the stage that need the value, or make it."""
        runs = [way.run for way in self.cluster_reruns[c]]
        return [
            (column, 1.0)
            for (d, k), column in self.rerun[t].items()
            if d == c and value in (runs[k].makes if makes else runs[k].needs)
        ]

    def _available(self, t: int, value: int) -> list[Term]:
        home = self.decomposition.home[value]
        return [(self.stays(t, value), 1.0), *self._runs_with(t, home, value, True)]

    def _add_frees(self, t: int) -> None:
        """FREE[t,v,c] <= what runs of the cluster touches the value."""
        row: dict[tuple[int, int], int] = {}
        needed = (
            set()
            if self.stages[t].backward
            else self.runs[self.stages[t].cluster].first_unsaved.needs
        )
        for value in self.touched[t] - needed:
            for c in sorted({c for c, _ in self.rerun[t]}):
                terms = self._runs_with(t, c, value, True) + self._runs_with(t, c, value, False)
                if terms:
                    row[value, c] = self.milp.real()
                    self._at_most([(row[value, c], 1.0)], terms)
        self.free.append(row)

    def _track(self, t: int) -> None:
        """need + what went before <= S[t,v] + R[t,home], for every need of v in turn."""
        stage = self.stages[t]
        for value in sorted(self.touched[t]):
            if not stage.backward and self.decomposition.home[value] == stage.cluster:
                continue
            there = self._available(t, value)
            self._at_most(there, [], 1.0)
            gone: list[Term] = []
            for c in sorted({c for c, _ in self.rerun[t]}):
                needs = self._runs_with(t, c, value, False)
                if needs:
                    self._at_most([*needs, *gone], there)
                if (value, c) in self.free[t]:
                    gone.append((self.free[t][value, c], 1.0))
            self._at_most([*self._segment_needs(stage, value), *gone], there)
            self._at_most([(self.stays(t + 1, value), 1.0), *gone], there)

    def _segment_needs(self, stage: ClusterPart, value: int) -> list[Term]:
        runs = self.runs[stage.cluster]
        if not stage.backward:
            return [(self.one, 1.0)] if value in runs.first_unsaved.needs else []
        return [
            (self.use[stage.cluster, o], 1.0)
            for o, option in enumerate(runs.options)
            if value in option.backward.needs
        ]

    def _use_what_is_saved(self) -> None:
        """P[t+1,c,o] <= P[t,c,o] + R[t,c,o], and the same for the use of the option."""
        for c, runs in enumerate(self.runs):
            for o, option in enumerate(runs.options):
                if not option.saved:
                    continue
                for t in range(c + 1, self.last[c] + 1):
                    now = self.saved[t][c, o]
                    there: list[Term] = [(now, 1.0), *self._saving(t, c, o)]
                    if t == self.last[c]:
                        self._at_most([(self.use[c, o], 1.0)], there)
                    elif self.saved[t + 1][c, o] != now:
                        self._at_most([(self.saved[t + 1][c, o], 1.0)], there)

    def _saving(self, t: int, c: int, o: int) -> list[Term]:
        return [
            (column, 1.0)
            for (d, k), column in self.rerun[t].items()
            if d == c and self.cluster_reruns[c][k].option == o
        ]

    # -- bytes -----------------------------------------------------------------------------

    def _bytes_at_start(self, t: int) -> list[Term]:
        """Bytes between stages, without the fixed values."""
        terms: dict[int, float] = {}
        for value, column in self.stay[t].items():
            terms[column] = terms.get(column, 0.0) + self.size(value)
        for (c, o), column in self.saved[t].items():
            size = self.runs[c].options[o].saved_bytes / self.byte_unit
            terms[column] = terms.get(column, 0.0) + size
        return [(self._sum_of([*terms.items()]), 1.0)]

    def _sum_of(self, terms: list[Term]) -> int:
        total = self.milp.real(high=SCALE)
        self.sums.append((total, terms))
        self.milp.row([*terms, (total, -1.0)], 0.0, 0.0)
        return total

    def _fit_reruns(self, t: int) -> None:
        """Bytes before the run + what of it is there at the step <= budget."""
        room = SCALE - self.decomposition.fixed[1][self.stages[t].ops.start] / self.byte_unit
        before = self.bytes_at_start[t]
        for c in sorted({c for c, _ in self.rerun[t]}):
            gone = {v: column for (v, d), column in self.free[t].items() if d == c}
            after = [*before, *((column, -self.size(v)) for v, column in gone.items())]
            for (d, k), column in self.rerun[t].items():
                if d != c:
                    continue
                way = self.cluster_reruns[c][k]
                for step in way.run.worst_steps:
                    born = sum(self.size(v) for v in way.run.makes - step.not_yet_made)
                    done = [(gone[v], -self.size(v)) for v in step.done if v in gone]
                    own = step.bytes / self.byte_unit + born
                    self._at_most([*before, (column, own), *done], [], room)
                added = sum(self.size(v) for v in way.run.makes)
                if way.option != NOTHING:
                    added += self.runs[c].options[way.option].saved_bytes / self.byte_unit
                after.append((column, added))
            before = [(self._sum_of(after), 1.0)]

    def _fit_forward(self, t: int, c: int) -> None:
        """What is held after the run, what it saves apart, and what the step has of it."""
        options = self.runs[c].options
        saves = {o: self.saved[t + 1][c, o] for o in range(len(options)) if options[o].saved}
        others = [
            *self.bytes_at_start[t + 1],
            *((column, -options[o].saved_bytes / self.byte_unit) for o, column in saves.items()),
        ]
        for run, column in (
            (self.runs[c].first_unsaved, self.one),
            *((options[o].first, column) for o, column in saves.items()),
        ):
            for step in run.worst_steps:
                self._fit_segment(t, run, step, others, column, self.one)

    def _fit_backward(self, t: int, c: int) -> None:
        for o, option in enumerate(self.runs[c].options):
            column = self.use[c, o]
            for step in option.backward.worst_steps:
                self._fit_segment(
                    t, option.backward, step, self.bytes_at_start[t + 1], column, column
                )

    def _fit_segment(
        self, t: int, run: ClusterRun, step: RunStep, others: list[Term], chosen: int, runs: int
    ) -> None:
        """Values that the run touches: there from their birth until it is done with them."""
        terms = [*others, (chosen, step.bytes / self.byte_unit)]
        for value in run.needs | run.makes:
            stays = (self.stays(t + 1, value), -self.size(value))
            if value in step.not_yet_made:
                terms.append(stays)
            elif value not in step.done:
                terms += [stays, (runs, self.size(value))]
        self._at_most(terms, [], SCALE)

    # -- solving ---------------------------------------------------------------------------

    def start(self, other: LevelMilp, solution: Solution) -> list[float]:
        """The columns for the solution of a programme of the same clusters without repeats."""
        values = [0.0] * len(self.milp.cost)
        values[self.one] = 1.0
        for mine, its in zip(self.stay, other.stay, strict=True):
            for value, column in mine.items():
                values[column] = float(solution.chosen(its.get(value, other.zero)))
        for (c, o), column in self.use.items():
            option = self.runs[c].options[o]
            values[column] = float(other.uses(c, option, solution))
        for row in self.saved:
            for (c, o), column in row.items():
                values[column] = values[self.use[c, o]]
        for column, terms in self.sums:
            values[column] = sum(values[k] * factor for k, factor in terms)
        return values

    def uses(self, c: int, option: OptionRuns, solution: Solution) -> bool:
        """Whether the cluster takes the option in a solution."""
        return any(
            its.backward.steps == option.backward.steps and solution.chosen(self.use[c, o])
            for o, its in enumerate(self.runs[c].options)
        )

    # -- reading ---------------------------------------------------------------------------

    def steps(self, solution: Solution) -> list[int]:
        """The ops of a solution, in order."""
        out: list[int] = []
        for t, stage in enumerate(self.stages):
            for (c, k), column in self.rerun[t].items():
                if solution.chosen(column):
                    out.extend(self.cluster_reruns[c][k].run.steps)
            out.extend(self._segment_steps(stage, solution))
        return out

    def _segment_steps(self, stage: ClusterPart, solution: Solution) -> Sequence[int]:
        if not stage.backward:
            return stage.ops
        options: Sequence[OptionRuns] = self.runs[stage.cluster].options
        for o, option in enumerate(options):
            if solution.chosen(self.use[stage.cluster, o]):
                return option.backward.steps
        return stage.ops


def stages_of(decomposition: Decomposition) -> Iterator[ClusterPart]:
    """Forward parts in order, then backward parts as they come."""
    for c, cluster in enumerate(decomposition.clusters):
        yield ClusterPart(c, False, cluster.forward)
    for c, cluster in reversed([*enumerate(decomposition.clusters)]):
        if cluster.backward:
            yield ClusterPart(c, True, cluster.backward)


def _cluster_reruns(runs: ClusterRuns) -> Iterator[ClusterRerun]:
    if runs.rerun_unsaved.steps:
        yield ClusterRerun(NOTHING, runs.rerun_unsaved)
    for o, option in enumerate(runs.options):
        if option.saved:
            yield ClusterRerun(o, option.only)
            if option.rerun.makes:
                yield ClusterRerun(o, option.rerun)
