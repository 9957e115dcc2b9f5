"""H-Rockmate: clusters planned apart, and an integer programme that puts their plans together.

Gusak et al., "HiRemate: Hierarchical approach for efficient re-materialization of neural networks"
(ICML 2025, PMLR 267; earlier named H-Rockmate). The graph is cut into clusters
(`decomposition`). Each distinct one is a problem of its own: its forward,
a pause that needs memory, its backward. Planned for several budgets and pauses it gives the options
of the level above, where an integer programme (`level_milp`) chooses one
for each cluster and lets clusters run again. Large clusters are cut again, down to those that the
solver `moments` takes whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.local.editable_schedule import EditableSchedule, descend
from fxremat.planner.local.pareto_front import ParetoFront, steps_of
from fxremat.planner.local.ruin_and_repair import polish
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp.highs import OnProgress, Solution
from fxremat.planner.milp.moments import Refinement
from fxremat.planner.options import Progress, SolverOptions
from fxremat.planner.peak_bound import peak_bound
from fxremat.planner.plans import make_plan
from fxremat.planner.published.chains.isolated_part import (
    backward_schedules,
    eviction_front,
    isolated_problem,
)
from fxremat.planner.published.hrockmate.cluster_costs import (
    ClusterCosts,
    ClusterOption,
    ClusterRuns,
    pareto,
)
from fxremat.planner.published.hrockmate.decomposition import (
    Cluster,
    Cutter,
    Decomposition,
    Signature,
    decompose,
    role,
    signature,
    turn_of,
)
from fxremat.planner.published.hrockmate.level_milp import LevelMilp
from fxremat.planner.published.known_schedule import extra_runs_of, start_plan, without_unread

NAME = "hrockmate"


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    deadline = Deadline(options.time_limit_s)
    best = make_plan(problem, problem.base_steps(), NAME)
    model = build_model(problem)
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        known = start_plan(problem, budget_bytes, options)
        front = ParetoFront(model)
        front.offer(StageSchedule(model, without_unread(model, extra_runs_of(model, known.ops))))
        on_progress = _progress_reporter(
            options, deadline, known.time_us if known.peak_bytes <= budget_bytes else None
        )
        Hierarchy(deadline, on_progress=on_progress).fill(front, budget_bytes, constants.NODES)
        polish(front, budget_bytes, options.seed, deadline)
        entry = front.best(budget_bytes) or front.least()
        found = make_plan(problem, model.names(steps_of(model.n, entry.runs())), NAME)
        best = min((known, found), key=lambda p: (max(p.peak_bytes, budget_bytes), p.time_us))
    return make_plan(
        problem,
        best.steps,
        NAME,
        budget_bytes=budget_bytes,
        seconds=deadline.seconds(),
        peak_bound_bytes=max(peak_bound(model), best.peak_bound_bytes or 0),
    )


def _progress_reporter(
    options: SolverOptions, deadline: Deadline, time_us: float | None
) -> OnProgress | None:
    """Tells how long it takes; what a programme believes of time is not known to be so."""
    tell = options.progress
    if tell is None:
        return None
    return lambda _objective, _bound: tell(Progress(NAME, deadline.seconds(), time_us, None))


@dataclass
class Hierarchy:
    """Plans for graphs of any size; the options of each distinct cluster are found once.

    ``cutter`` chooses where to cut.
    """

    deadline: Deadline
    cutter: Cutter | None = None
    on_progress: OnProgress | None = None
    solved: dict[Signature, list[tuple[int, ...]]] = field(default_factory=dict)

    def fill(self, front: ParetoFront, budget: int, nodes: int) -> None:
        """Offer what the programme over clusters finds for the budget."""
        level = self.level(front.model)
        if level is not None:
            level.fill(front, budget, nodes, self.deadline, self.on_progress)

    def level(self, model: IndexedProblem) -> Level | None:
        """The clusters of a model with their options; None where there is nothing to cut."""
        decomposition = self._cut(model)
        if len(decomposition.clusters) < 2:
            return None
        return Level(
            decomposition,
            [self.options(decomposition, cluster) for cluster in decomposition.clusters],
        )

    def _cut(self, model: IndexedProblem) -> Decomposition:
        """The decomposition with the fewest ops in distinct clusters."""
        forward = turn_of(model) + 1
        most = max(2, min(constants.POINTS, forward // 3))
        fewest = min(
            most,
            max(2, min(constants.POINTS // 2, forward // constants.FEW_OPS)),
        )
        cuts = [decompose(model, count, self.cutter) for count in range(fewest, most + 1)]
        return min(
            cuts,
            key=lambda decomposition: (_distinct_ops(decomposition), -len(decomposition.clusters)),
        )

    def options(self, decomposition: Decomposition, cluster: Cluster) -> list[ClusterOption]:
        """Store-all and the others that are worth a choice."""
        if not cluster.backward:
            return []
        ops = (*cluster.forward, *cluster.backward)
        key = signature(decomposition, cluster)
        if key not in self.solved and self.deadline.running():
            place = {op: k for k, op in enumerate(ops)}
            found = pareto(
                decomposition,
                cluster,
                self._search(decomposition, cluster),
                constants.MOST_OPTIONS,
            )
            self.solved[key] = [tuple(place[op] for op in option.backward) for option in found]
        moved = [ClusterOption(tuple(ops[k] for k in steps)) for steps in self.solved.get(key, ())]
        return list(dict.fromkeys([ClusterOption(tuple(cluster.backward)), *moved]))

    def _search(self, decomposition: Decomposition, cluster: Cluster) -> Iterator[ClusterOption]:
        """Schedules of the cluster's own problem, for several pauses and budgets."""
        whole = _bytes_at_most(decomposition, cluster)
        for pause in constants.HALVES:
            if not self.deadline.running():
                return
            problem = isolated_problem(
                decomposition.model,
                cluster.forward,
                cluster.backward,
                int(pause * whole),
                outlives=lambda value: role(decomposition, cluster, value) == "staying",
                may_rerun=lambda op: decomposition.model.repeatable[op],
            )
            front = self._plans(build_model(problem))
            for steps in backward_schedules(front, cluster.forward, cluster.backward):
                yield ClusterOption(tuple(steps))

    def _plans(self, model: IndexedProblem) -> ParetoFront:
        """What evictions find, and then the level below or the solver `moments`."""
        front = eviction_front(model, self.deadline)
        most, least = StageSchedule(model).max_peak(), front.least().peak
        level = self.level(model) if turn_of(model) + 1 > constants.FEW_OPS else None
        for part in (0.75, 0.5, 0.25, 0.0):
            budget = least + int(part * (most - least))
            if not self.deadline.running():
                break
            if level is not None:
                level.fill(front, budget, constants.NODES // 13, self.deadline, self.on_progress)
            else:
                rounds = Refinement.at_the_peak(front, budget, self.deadline).rounds()
                for state in islice(rounds, 3):
                    front.offer(state)
        return front


@dataclass(frozen=True)
class Level:
    """Clusters and the options of each: what one programme chooses from."""

    decomposition: Decomposition
    options: list[list[ClusterOption]]

    def fill(
        self,
        front: ParetoFront,
        budget: int,
        nodes: int,
        deadline: Deadline,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Offer the best schedules of two programmes: without repeats of clusters, and with them.

        The second chooses from the options that the first one took, and starts from it.
        """
        costs = [
            ClusterCosts(self.decomposition, cluster) for cluster in self.decomposition.clusters
        ]
        runs = [cost.runs(its) for cost, its in zip(costs, self.options, strict=True)]
        room = budget
        for _ in range(3):
            choice = LevelMilp(self.decomposition, runs, room, allow_reruns=False)
            chosen = choice.milp.solve(
                deadline, nodes=nodes, gap=constants.GAP, on_progress=on_progress
            )
            over = self._offer(front, choice, chosen, budget)
            if over == 0:
                break
            # Where options are too coarse to fit, evictions may make a schedule of more bytes fit.
            room += -over if chosen.values is not None else int((1 - constants.LESS) * budget)
        whole = LevelMilp(self.decomposition, self._few(choice, chosen), min(room, budget))
        start = None
        if chosen.values is not None and room <= budget:
            start = whole.start(choice, chosen)
        found = whole.milp.solve(
            deadline,
            nodes=nodes,
            gap=constants.GAP,
            start=start,
            on_progress=on_progress,
        )
        self._offer(front, whole, found, budget)

    def _offer(
        self, front: ParetoFront, programme: LevelMilp, solution: Solution, budget: int
    ) -> int:
        """Offer the solution's schedule; by how many bytes it is over the budget, 1 for none."""
        if solution.values is None:
            return 1
        model = front.model
        steps = model.names(programme.steps(solution))
        state = StageSchedule(model, without_unread(model, extra_runs_of(model, steps)))
        over: int = max(0, state.max_peak() - budget)
        front.offer(state)
        if over:
            descend(EditableSchedule(state), front, budget, constants.WORK // 5)
        return over

    def _few(self, programme: LevelMilp, solution: Solution) -> list[ClusterRuns]:
        """The options of each cluster that any cluster like it takes, and a few others."""
        places: dict[Signature, set[int]] = {}
        keys = [signature(self.decomposition, cluster) for cluster in self.decomposition.clusters]
        for key, runs in zip(keys, programme.runs, strict=True):
            places.setdefault(key, set()).update(_spread(len(runs.options), 5))
        for (c, o), column in programme.use.items():
            if solution.chosen(column):
                places[keys[c]].add(o)
        return [
            replace(runs, options=tuple(runs.options[k] for k in sorted(places[key])))
            for key, runs in zip(keys, programme.runs, strict=True)
        ]


def _spread(count: int, most: int) -> list[int]:
    """At most so many places out of ``count``, evenly spread from first to last."""
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)}) if count else []


def _distinct_ops(decomposition: Decomposition) -> int:
    """Forward ops that are to be planned where clusters of one signature are planned once."""
    return sum(
        {signature(decomposition, c): len(c.forward) for c in decomposition.clusters}.values()
    )


def _bytes_at_most(decomposition: Decomposition, cluster: Cluster) -> int:
    """Bytes that the cluster's forward writes, and the most that one of its ops needs."""
    model = decomposition.model
    ops = (*cluster.forward, *cluster.backward)
    held = sum(model.bytes[v] for v in cluster.local | cluster.makes)
    most: int = max(model.own_bytes[op] for op in ops)
    return held + most
