"""One level of the hierarchy: a problem whose ops are clusters, with their options as variants.

The integer programme of Gusak et al., "HiRemate" (ICML 2025, PMLR 267), chooses an option for each
cluster and lets clusters run again. Here it is the MILP that chooses variants
(`fxremat.planner.variants.choice_milp`), with a program point at each cluster, asked about this:

    once c      writes what the forward of cluster c makes that cannot be made again
    run c       makes the values that other clusters read, and may do so again
    save c, o   holds what option o of the backward needs; as a repeat it makes that again
    back c      the backward, as option o says: other reads, another time, another workspace

The first run of the forward saves as it goes, so what ``save`` takes there is a constant. Where
values come and go inside of a cluster is known to its workspace only; schedules are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxremat.core.problem import Change, Op, Problem, Value, Variant
from fxremat.core.variants import take
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT, build_model
from fxremat.planner.published.hrockmate.decomposition import Decomposition
from fxremat.planner.published.parts import Steps, makers, most_alive, read_later
from fxremat.planner.variants.all_variants import combine
from fxremat.planner.variants.choice_milp import ChoiceMilp
from fxremat.planner.variants.choose_and_plan import runs_that_hold


@dataclass
class Level:
    """Clusters and the backwards of each that there are to choose from; the first is store-all."""

    decomposition: Decomposition
    options: list[list[Steps]]
    again: dict[str, Steps] = field(default_factory=dict)
    """The ops of each op of the problem when it runs again, or of a backward."""

    def steps(self, budget: int, deadline: Deadline) -> Iterator[int]:
        """The ops of the best choice for a budget, in order; none where there is no choice."""
        combined = combine(self.problem)
        points = [k for k, op in enumerate(combined.ops) if op.name.startswith(("run", "back"))]
        choice = ChoiceMilp(combined, points, budget)
        solution = choice.solve(deadline)
        if solution.values is None:
            return
        names = choice.names(solution)
        left = take(self.problem, names)
        option = dict(name.split(".") for name in names)
        runs = runs_that_hold(build_model(left), combined, choice.held_at(solution))
        again = {stage: [op for op, other in runs if other == stage] for _, stage in runs}
        done = 0
        for stage, op in enumerate(left.ops):
            for other in again.get(stage, ()):
                yield from self.again[left.ops[other].name]
            kind, c, *_ = op.name.split()
            cluster = self.decomposition.clusters[int(c)]
            if kind == "run":
                yield from range(done, cluster.forward.stop)
                done = cluster.forward.stop
            elif kind == "back":
                yield from range(done, cluster.backward.start)
                yield from self.options[int(c)][int(option.get(c, 0))]
                done = cluster.backward.stop
        yield from range(done, self.decomposition.model.n)

    # -- the problem -----------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        """The problem of this level."""
        model, clusters = self.decomposition.model, range(len(self.decomposition.clusters))
        forward = [op for c in clusters for op in self._forward(c)]
        backward = [self._backward(c, 0) for c in reversed(clusters) if self.options[c]]
        variants = [self._variant(c, o) for c in clusters for o in range(1, len(self.options[c]))]
        values = [Value(str(v), size) for v, size in enumerate(model.bytes) if self._crosses[v]]
        values += [
            Value(f"save {c} {o}", self._held_between(c, o))
            for c in clusters
            for o in range(len(self.options[c]))
        ]
        values += [Value(f"run {c}", 0) for c in clusters]
        resident = model.problem.resident_bytes
        return Problem(
            name="clusters",
            values=(*values, Value("resident", resident)),
            ops=(*forward, *backward),
            inputs=self._named(model.inputs),
            resident=("resident",),
            outputs=self._named(v for v, kept in enumerate(model.is_output) if kept),
            variants=tuple(variants),
        )

    def _named(self, values: Sequence[int] | Iterator[int]) -> tuple[str, ...]:
        return tuple(str(value) for value in values if self._crosses[value])

    @cached_property
    def _crosses(self) -> list[bool]:
        """Whether each value is seen outside of one cluster's half."""
        decomposition, model = self.decomposition, self.decomposition.model
        users: list[set[tuple[int, bool]]] = [set() for _ in model.bytes]
        for c, cluster in enumerate(decomposition.clusters):
            for op in cluster.ops:
                for value in (*model.reads[op], *model.writes[op]):
                    users[value].add((c, op in cluster.backward))
        local = frozenset[int]().union(*(cluster.local for cluster in decomposition.clusters))
        return [
            value not in local
            and (len(its) > 1 or model.is_output[value] or model.writer[value] == INPUT
                 or (model.writer[value] <= decomposition.turn and not model.evictable(value)))
            for value, its in enumerate(users)
        ]  # fmt: skip

    def _forward(self, c: int) -> Iterator[Op]:
        """The ops of the forward part of a cluster."""
        model, cluster = self.decomposition.model, self.decomposition.clusters[c]
        written = {v for op in cluster.forward for v in model.writes[op] if self._crosses[v]}
        makes = self.decomposition.makes[c]
        once = sorted(written - makes)
        yield Op(f"once {c}", (), self._named(once), 0.0, phase="forward", repeatable=False)
        name, own = f"run {c}", makes | cluster.local
        again = self.again[name] = makers(cluster, makes, own)
        reads = {v for op in cluster.forward for v in model.reads[op]} - makes
        yield Op(
            name,
            self._named(sorted(reads)),
            (*self._named(sorted(makes)), name),
            self._time(again),
            self._workspace(cluster.forward, frozenset(written), reads | written),
            phase="forward",
        )
        if self.options[c]:
            yield self._save(c, 0)

    def _save(self, c: int, o: int) -> Op:
        """What an option holds, made from what enters the cluster."""
        model, cluster, name = (
            self.decomposition.model,
            self.decomposition.clusters[c],
            f"save {c} {o}",
        )
        saved = self._saved(c, o)
        again = self.again[name] = makers(
            cluster, saved, self.decomposition.makes[c] | cluster.local
        )
        reads = read_later(model, again)
        space = most_alive(model, again, saved | reads) - self._bytes(reads) - self._bytes(saved)
        return Op(
            name,
            (*self._named(sorted(reads)), f"run {c}"),
            (name,),
            self._time(again),
            max(0, space),
            phase="forward",
        )

    def _backward(self, c: int, o: int) -> Op:
        """The backward of a cluster as an option says."""
        model, steps = self.decomposition.model, self.options[c][o]
        cluster = self.decomposition.clusters[c]
        self.again[f"back {c}"] = ()
        reads = frozenset(v for v in read_later(model, steps) if self._crosses[v])
        written = {v for op in cluster.backward for v in model.writes[op] if self._crosses[v]}
        keep = frozenset(written) | {
            v for v in reads if model.is_output[v] or model.last_reads[v] >= cluster.backward.stop
        }
        inside = self._held_between(c, o)
        return Op(
            f"back {c}",
            (*self._named(sorted(reads)), f"save {c} {o}"),
            self._named(sorted(written)),
            self._time(steps),
            max(0, self._workspace(steps, keep, reads | written) - inside),
            phase="backward",
            repeatable=False,
        )

    def _variant(self, c: int, o: int) -> Variant:
        """An option of a cluster; what its saving takes the first time is taken off again."""
        base, other, saved = self._backward(c, 0), self._backward(c, o), self._save(c, o)
        added = other.time_us - base.time_us + self._save(c, 0).time_us - saved.time_us
        change = Change(
            base.name,
            drops=tuple(name for name in base.reads if name not in other.reads),
            adds=tuple(name for name in other.reads if name not in base.reads),
            time_us=added,
            workspace_bytes=other.workspace_bytes - base.workspace_bytes,
        )
        return Variant(f"{c}.{o}", (saved,), (change,))

    # -- figures ---------------------------------------------------------------------------

    def _saved(self, c: int, o: int) -> frozenset[int]:
        later = read_later(self.decomposition.model, self.options[c][o])
        return later & self.decomposition.clusters[c].local

    def _held_between(self, c: int, o: int) -> int:
        return self._bytes(self._saved(c, o))

    def _bytes(self, values: frozenset[int] | set[int]) -> int:
        return sum(self.decomposition.model.bytes[value] for value in values)

    def _time(self, steps: Sequence[int]) -> float:
        return sum(self.decomposition.model.time[op] for op in steps)

    def _workspace(
        self, steps: Sequence[int], keep: frozenset[int], seen: frozenset[int] | set[int]
    ) -> int:
        """Bytes at the worst step beside those of the values that the level sees."""
        worst = most_alive(self.decomposition.model, steps, keep)
        return max(0, worst - self._bytes({v for v in seen if self._crosses[v]}))
