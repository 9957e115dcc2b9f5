"""Clusters: a graph of ops cut into parts that are planned apart, with what crosses between them.

A *cluster* is a stretch of the forward part in base order and the stretch of the backward part
that reads its values. Stretches of a topological order are convex, and the graph of clusters has
no cycles, whatever the graph of ops looks like: long skips and cross attention only make more
values cross.

Source: Gusak et al., "HiRemate" (ICML 2025, PMLR 267), section on partitioning: clusters of
bounded size and small interface. Theirs grow bottom up by a score; ours are about equally large.

One level of their hierarchy is an integer programme that chooses an option for each cluster and
lets clusters run again. Here it is the MILP that chooses variants
(`fxremat.planner.variants.choice_milp`), with a program point at each cluster, asked about this:

    once c      writes what the forward of cluster c makes that cannot be made again
    run c       makes the values that other clusters read, and may do so again
    save c, o   holds what option o of the backward needs; as a repeat it makes that again
    back c      the backward, as option o says: other reads, another time, another workspace

The first run of the forward saves as it goes, so what ``save`` takes there is a constant. Where
values come and go inside of a cluster is known to its workspace only; schedules are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxremat.core.problem import Change, Op, Problem, Value, Variant
from fxremat.core.variants import take
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.level_sweep import narrow_cuts
from fxremat.planner.published.chain import block_of_each_op, turns
from fxremat.planner.published.parts import Part, Steps, most_alive, read_later
from fxremat.planner.variants.all_variants import AllVariants
from fxremat.planner.variants.choice_milp import ChoiceMilp
from fxremat.planner.variants.choose_and_plan import runs_that_hold


@dataclass(frozen=True)
class Cluster(Part):
    """A part whose forward ``makes`` values, too, that others read and that it can make again."""

    makes: frozenset[int]

    @property
    def marks(self) -> tuple[Set[int], ...]:
        """What others read, too, differs from what they do not."""
        return self.local, self.makes

    @property
    def own(self) -> frozenset[int]:
        """All values of its forward that can be computed again."""
        return self.local | self.makes


def decompose(model: IndexedProblem, count: int) -> list[Cluster]:
    """The model in about so many clusters, in forward order; their backwards come in reverse."""
    turn = turn_of(model)
    firsts = [0, *narrow_cuts(model, turn, count)]
    whose = block_of_each_op(model, turn, firsts)
    readers: list[set[int]] = [set() for _ in model.bytes]
    for op, reads in enumerate(model.reads):
        for value in reads:
            readers[value].add(whose[op])
    local: list[set[int]] = [set() for _ in firsts]
    makes: list[set[int]] = [set() for _ in firsts]
    for value, op in enumerate(model.writer):
        if op <= turn and model.evictable(value):
            (local if readers[value] <= {whose[op]} else makes)[whose[op]].add(value)
    clusters = []
    for c, (start, stop) in enumerate(pairwise((*firsts, turn + 1))):
        ops = [op for op in range(turn + 1, model.n) if whose[op] == c]
        backward = range(ops[0], ops[-1] + 1) if ops else range(model.n, model.n)
        sets = frozenset(local[c]), frozenset(makes[c])
        clusters.append(Cluster(model, range(start, stop), backward, *sets))
    return clusters


def turn_of(model: IndexedProblem) -> int:
    """The last op of the forward part that makes something that may be dropped."""
    turn = [*turns(model), model.n - 1][0]
    while turn > 0 and not any(model.evictable(value) for value in model.writes[turn]):
        turn -= 1
    return turn


# -- one level of the hierarchy ---------------------------------------------------------------


class Level:
    """Clusters and the backwards of each that there are to choose from; the first is store-all."""

    def __init__(self, clusters: Sequence[Cluster], options: list[list[Steps]]) -> None:
        self.clusters, self.options, self.model = clusters, options, clusters[0].model
        self.again = dict[str, Steps]()
        """The ops of each op of the problem when it runs again, or of a backward."""

    def steps(self, budget: int, deadline: Deadline) -> Iterator[int]:
        """The ops of the best choice for a budget, in order; none where there is no choice."""
        combined = AllVariants(self.problem)
        points = [k for k, op in enumerate(combined.ops) if op.name.startswith(("run", "back"))]
        choice = ChoiceMilp(combined, points, budget)
        solution = choice.solve(deadline)
        if solution.values is None:
            return
        names = choice.names(solution)
        left = take(self.problem, names)
        option = dict(name.split(".") for name in names)
        runs = runs_that_hold(IndexedProblem(left), combined, choice.held_at(solution))
        again = {stage: [op for op, other in runs if other == stage] for _, stage in runs}
        done = 0
        for stage, op in enumerate(left.ops):
            for other in again.get(stage, ()):
                yield from self.again[left.ops[other].name]
            kind, c, *_ = op.name.split()
            cluster = self.clusters[int(c)]
            if kind == "run":
                yield from range(done, cluster.forward.stop)
                done = cluster.forward.stop
            elif kind == "back":
                yield from range(done, cluster.backward.start)
                yield from self.options[int(c)][int(option.get(c, 0))]
                done = cluster.backward.stop
        yield from range(done, self.model.n)

    # -- the problem -----------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        """The problem of this level."""
        model, clusters = self.model, range(len(self.clusters))
        options = [(c, o) for c in clusters for o in range(len(self.options[c]))]
        values = [Value(str(v), size) for v, size in enumerate(model.bytes) if self._crosses[v]]
        values += [Value(f"save {c} {o}", model.size_of(self._saved(c, o))) for c, o in options]
        values += [Value(f"run {c}", 0) for c in clusters]
        forward = [op for c in clusters for op in self._forward(c)]
        backward = [self._backward(c, 0) for c in reversed(clusters) if self.options[c]]
        return Problem(
            name="clusters",
            values=(*values, Value("resident", model.problem.resident_bytes)),
            ops=(*forward, *backward),
            inputs=self._named(model.inputs),
            resident=("resident",),
            outputs=self._named(v for v, kept in enumerate(model.is_output) if kept),
            variants=tuple(self._variant(c, o) for c, o in options if o),
        )

    @cached_property
    def _crosses(self) -> list[bool]:
        """Whether each value is seen outside of one cluster's half."""
        model, stop = self.model, self.clusters[-1].forward.stop
        users: list[set[tuple[int, bool]]] = [set() for _ in model.bytes]
        for c, cluster in enumerate(self.clusters):
            for op in cluster.ops:
                for value in (*model.reads[op], *model.writes[op]):
                    users[value].add((c, op in cluster.backward))
        local = frozenset[int]().union(*(cluster.local for cluster in self.clusters))
        return [
            value not in local
            and (len(its) > 1 or model.is_output[value] or model.writer[value] == INPUT
                 or (model.writer[value] < stop and not model.evictable(value)))
            for value, its in enumerate(users)
        ]  # fmt: skip

    def _forward(self, c: int) -> Iterator[Op]:
        """The ops of the forward part of a cluster."""
        model, cluster = self.model, self.clusters[c]
        written = {v for op in cluster.forward for v in model.writes[op] if self._crosses[v]}
        reads = {v for op in cluster.forward for v in model.reads[op]} - cluster.makes
        once = self._named(written - cluster.makes)
        yield Op(f"once {c}", (), once, 0.0, phase="forward", repeatable=False)
        name = f"run {c}"
        again = self.again[name] = model.makers(cluster.forward, cluster.makes, cluster.own)
        yield Op(
            name,
            self._named(reads),
            (*self._named(cluster.makes), name),
            self.model.time_of(again),
            self._workspace(cluster.forward, written, reads | written),
            phase="forward",
        )
        if self.options[c]:
            yield self._save(c, 0)

    def _save(self, c: int, o: int) -> Op:
        """What an option holds, made from what enters the cluster."""
        model, cluster = self.model, self.clusters[c]
        name, saved = f"save {c} {o}", self._saved(c, o)
        again = self.again[name] = model.makers(cluster.forward, saved, cluster.own)
        reads = read_later(model, again)
        space = (
            most_alive(model, again, saved | reads) - model.size_of(reads) - model.size_of(saved)
        )
        return Op(
            name,
            (*self._named(reads), f"run {c}"),
            (name,),
            self.model.time_of(again),
            max(0, space),
            phase="forward",
        )

    def _backward(self, c: int, o: int) -> Op:
        """The backward of a cluster as an option says."""
        model, steps, cluster = self.model, self.options[c][o], self.clusters[c]
        self.again[f"back {c}"] = ()
        reads = {v for v in read_later(model, steps) if self._crosses[v]}
        written = {v for op in cluster.backward for v in model.writes[op] if self._crosses[v]}
        end = cluster.backward.stop
        staying = {v for v in reads if model.is_output[v] or model.last_reads[v] >= end}
        space = self._workspace(steps, written | staying, reads | written)
        return Op(
            f"back {c}",
            (*self._named(reads), f"save {c} {o}"),
            self._named(written),
            self.model.time_of(steps),
            max(0, space - self.model.size_of(self._saved(c, o))),
            phase="backward",
            repeatable=False,
        )

    def _variant(self, c: int, o: int) -> Variant:
        """An option of a cluster; what its saving takes the first time is taken off again."""
        base, other, saved = self._backward(c, 0), self._backward(c, o), self._save(c, o)
        change = Change(
            base.name,
            drops=tuple(name for name in base.reads if name not in other.reads),
            adds=tuple(name for name in other.reads if name not in base.reads),
            time_us=other.time_us - base.time_us + self._save(c, 0).time_us - saved.time_us,
            workspace_bytes=other.workspace_bytes - base.workspace_bytes,
        )
        return Variant(f"{c}.{o}", (saved,), (change,))

    # -- figures ---------------------------------------------------------------------------

    def _named(self, values: Iterable[int]) -> tuple[str, ...]:
        return tuple(str(value) for value in sorted(values) if self._crosses[value])

    def _saved(self, c: int, o: int) -> frozenset[int]:
        return read_later(self.model, self.options[c][o]) & self.clusters[c].local

    def _workspace(self, steps: Sequence[int], keep: set[int], seen: set[int]) -> int:
        """Bytes at the worst step beside those of the values that the level sees."""
        worst = most_alive(self.model, steps, frozenset(keep))
        return max(0, worst - self.model.size_of(v for v in seen if self._crosses[v]))
