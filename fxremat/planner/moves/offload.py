"""Keep, recompute or move to the host: one decision, by any solver, at a price for each byte moved.

What comes back from the host is computed again from nothing: an op that reads a token of no
bytes. So an op whose values may move is two in the problem that the solvers are given, and each
of them, the integer programmes of every level included, chooses among keeping and fetching where
before it chose among keeping and recomputing:

    a = conv(x)   becomes   a's token = conv(x), once;   a = fetch(a's token), again at a price

The price, microseconds for each byte, stands for the one thing that this problem does not say: an
engine makes one transfer at a time, beside the ops (a Lagrange multiplier of its capacity). At a
high price nothing moves, at none everything does; in between, values move whose recomputation costs
more than their bytes. `fxremat.planner.moves.transfers` turns each answer into a schedule with
transfers on two engines, whose real time is what counts; the price is searched for.

Source: the problem with both choices is that of POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS
2021) on graphs; pricing by multipliers and the search are ours.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.schedule import ops_of
from fxremat.core.timeline import Timeline, transfer_us
from fxremat.core.variants import run_once
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, peak_bound
from fxremat.planner.local import greedy
from fxremat.planner.moves.time_bound import relax
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.planner.plans import make_plan, rank
from fxremat.planner.solvers import ProblemRefused, Solver, SolverOptions

NAME = "offload"
TOKEN, GET = " on the host", "fetch "


def movable(problem: Problem) -> dict[str, int]:
    """Ops all of whose values may move, with the bytes of these."""
    if problem.copies is None or problem.copies.only_host:
        return {}
    fixed = {*problem.resident, *problem.outputs, *problem.host}
    sizes = problem.bytes_of
    free = (op for op in problem.ops if fixed.isdisjoint(op.writes))
    found = {op.name: sum(sizes[name] for name in op.writes) for op in free}
    return {name: size for name, size in found.items() if size}


def priced(problem: Problem, moved: set[str], us_per_byte: float, *, recompute: bool) -> Problem:
    """The problem in which the values of the ops ``moved`` are fetched instead of recomputed.

    So are the values that live in host memory, also for the first time. Without ``recompute``
    nothing else runs again.
    """
    sizes = problem.bytes_of
    last = {name: op.name for op in problem.ops for name in op.reads}
    coming = set(problem.from_host)
    ops: list[Op] = []

    def fetch(name: str, token: tuple[str, ...], op: Op) -> Op:
        return Op(GET + name, token, (name,), us_per_byte * sizes[name], 0, op.phase)

    for op in problem.ops:
        ops.extend(fetch(name, (), op) for name in op.reads if name in coming)
        coming.difference_update(op.reads)
        if op.name not in moved:
            ops.append(op if recompute else replace(op, repeatable=False))
            continue
        written = sum(sizes[name] for name in op.writes)
        over = {write: sizes[read] for read, write in op.inplace if last[read] == op.name}
        written -= sum(min(sizes[write], size) for write, size in over.items())
        token = (op.name + TOKEN,)
        space = op.workspace_bytes + written
        ops.append(replace(op, writes=token, inplace=(), repeatable=False, workspace_bytes=space))
        ops.extend(fetch(name, token, op) for name in op.writes)
    tokens = tuple(Value(name + TOKEN, 0) for name in sorted(moved))
    values = problem.values + tokens
    return replace(problem, values=values, ops=tuple(ops), copies=None, host=())


def items_of(problem: Problem, steps: Sequence[str]) -> list[Item]:
    """A schedule of a priced problem: ops of the problem, and fetches."""
    known, seen = problem.op_of, {GET + name for name in problem.from_host}
    items: list[Item] = []
    for step in steps:
        if step in known:
            items.append(step)
        elif step in seen:
            items.append(Fetch(step.removeprefix(GET)))
        seen.add(step)
    return items


@dataclass(frozen=True)
class MoveRule:
    """Which values may move: see `ops_to_move`.

    ``least_rerun_part`` is compared with the time to run the op again, as a part of the time of the
    fetch. ``engine_load`` is the part of the forward's time for which the engine may be busy; with
    None all values may move. ``price`` is that of a fetch, as a part of its time on the engine.
    """

    least_rerun_part: float
    engine_load: float | None
    recompute: bool = True
    price: float = 1e-3


ALONE = MoveRule(0.0, 0.0)
"""Nothing moves but what lives in host memory."""
ONLY_MOVES = MoveRule(0.0, None, recompute=False)
"""All that may move may, and nothing else runs again."""
MOVE_RULES = (
    MoveRule(0.03, 1.0),
    MoveRule(0.15, 1.0),
    MoveRule(0.0, None),
    MoveRule(0.03, 1.15),
)
"""The rules that are tried where values may move."""


def ops_to_move(problem: Problem, rule: MoveRule) -> set[str]:
    """Ops whose values may move, so many that the engine is busy during the forward.

    Walking through the forward, a value that the backward reads joins the engine's queue where it
    costs enough to compute again, the queue is short, and the transfer ends before the forward
    does. With an ``engine_load`` of 2, half of these transfers would have to be waited for.
    """
    copies, can = problem.copies, movable(problem)
    assert copies is not None
    if rule.engine_load is None:
        return set(can)
    reruns, wanted = rerun_costs(problem), _read_by_backward(problem)
    forward = [op for op in problem.ops if op.phase == "forward"]
    end = rule.engine_load * sum(op.time_us for op in forward)
    now = engine = 0.0
    found = set()
    for op in forward:
        now += rule.engine_load * op.time_us
        if op.name not in can or wanted.isdisjoint(op.writes):
            continue
        takes = transfer_us(copies, "to host", can[op.name])
        back = transfer_us(copies, "to device", can[op.name])
        begin = max(now, engine)
        queue = begin - now <= takes
        if reruns[op.name] >= rule.least_rerun_part * back and queue and begin + takes <= end:
            engine = begin + takes
            found.add(op.name)
    return found


def _read_by_backward(problem: Problem) -> set[str]:
    return {name for op in problem.ops if op.phase == "backward" for name in op.reads}


def rerun_costs(problem: Problem) -> dict[str, float]:
    """Microseconds to run each op again, with the ops that it reads from.

    What the backward reads as well counts as there.
    """
    wanted = _read_by_backward(problem)
    cost: dict[str, float] = {}
    found = {}
    for op in problem.ops:
        reads = sum(cost.get(name, 0.0) for name in op.reads if name not in wanted)
        found[op.name] = op.time_us + reads if op.repeatable else math.inf
        cost.update(dict.fromkeys(op.writes, found[op.name]))
    return found


def solve(
    problem: Problem, budget_bytes: int | None, options: SolverOptions, solver: Solver
) -> Plan:
    """The fastest plan of the ``solver`` within the budget, with or without moves.

    Never slower than its plan without: that is among those compared. Which values may move is
    chosen by quick plans; the solver then looks at that problem, and, as such plans are poor where
    only moves are left, at the one in which nothing else runs again.
    """
    search = _MoveSearch(problem, budget_bytes, options)
    alone = search.offer(search.by_rule(ALONE), solver)
    if budget_bytes is None or alone <= (0, problem.base_time_us):
        return search.plan()
    search.bound_us, fetched = relax(problem, budget_bytes, search.deadline)
    can = movable(problem)
    rules = [*MOVE_RULES] if can else []
    if problem.host:
        # Their transfers keep the engine busy without any other, so a fetch costs what it takes.
        rules += [replace(rule, price=1.0) for rule in (ALONE, *rules[:1])]
    candidates = [search.by_rule(rule) for rule in rules]
    if fetched and can:
        candidates.insert(0, search.priced(_writers(problem, fetched)))
    ranked: list[tuple[tuple[int, float], Problem]] = []
    for candidate in candidates:
        ranked.append((search.offer(candidate, greedy.quick), candidate))
        if search.is_done():
            break
    best = [min(ranked, key=lambda pair: pair[0])[1]] if ranked else []
    nothing_again = [search.by_rule(ONLY_MOVES)] if can else []
    if can and not search.is_done():
        _, fetched = relax(run_once(problem), budget_bytes, search.deadline)
        nothing_again.insert(0, search.priced(_writers(problem, fetched), recompute=False))
    for candidate in (*best, *nothing_again):
        if search.is_done():
            break
        search.offer(candidate, solver)
    return search.plan()


def _writers(problem: Problem, values: Iterable[str]) -> set[str]:
    """The ops that write values, of those that may move."""
    writers = {problem.writer_of[name] for name in values if name in problem.writer_of}
    return writers & movable(problem).keys()


def quick(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """A plan to compare problems by, from the two choices that are mostly the best."""
    search = _MoveSearch(problem, budget_bytes, options)
    search.offer(search.by_rule(ALONE), greedy.quick)
    if budget_bytes is not None and movable(problem):
        search.offer(search.by_rule(MOVE_RULES[0]), greedy.quick)
    return search.plan()


class _MoveSearch:
    """The best schedule so far, the solver that it is from, and its rank: less is better."""

    def __init__(self, problem: Problem, budget: int | None, options: SolverOptions) -> None:
        assert problem.copies is not None
        self.problem, self.copies, self.budget, self.options = (
            problem,
            problem.copies,
            budget,
            options,
        )
        self.deadline = Deadline(options.time_limit_s)
        self.best: tuple[Timeline, str] | None = None
        self.rank: tuple[int, float] = (sys.maxsize, math.inf)
        self.bound_us = 0.0
        """What is proven of every schedule within the budget."""

    def by_rule(self, rule: MoveRule) -> Problem:
        """The priced problem of a rule."""
        moved = ops_to_move(self.problem, rule)
        return self.priced(moved, rule.price, recompute=rule.recompute)

    def priced(
        self, moved: set[str], price: float = ALONE.price, *, recompute: bool = True
    ) -> Problem:
        """The priced problem in which the values of these ops may move."""
        rate = price / max(self.copies.to_device, 1e-9)
        return priced(self.problem, moved, rate, recompute=recompute)

    def offer(self, question: Problem, solver: Solver) -> tuple[int, float]:
        """The rank of the best schedule that a solver makes of a priced problem.

        Where transfers have to be waited for, the solver also leaves room for values to come early.
        """
        fetches = (op for op in question.ops if op.name.startswith(GET))
        sizes = (self.problem.bytes_of[name] for op in fetches for name in op.writes)
        largest, found = max(sizes, default=0), list[tuple[tuple[int, float], Timeline, str]]()
        for room in range(3) if largest and self.budget is not None else (0,):
            left = None if self.budget is None else self.budget - room * largest
            answer = solver(question, left, self.options)
            line = place(self.problem, items_of(self.problem, answer.ops), self.budget)
            found.append((rank(line, self.budget), line, answer.solver))
            if not line.timing.stall_us:
                break
        its_rank, line, name = min(found, key=lambda one: one[0])
        cap = math.inf if self.copies.host_bytes is None else self.copies.host_bytes
        allowed = line.host_peak_bytes <= cap and line.time_us < math.inf
        if allowed and (self.best is None or its_rank < self.rank):
            self.best, self.rank = (line, name), its_rank
        return its_rank

    def is_done(self) -> bool:
        """Whether there is no need to look on: the best is as fast as can be, or time is over."""
        return self.rank <= (0, self.bound_us) or not self.deadline.running()

    def plan(self) -> Plan:
        """The best of all."""
        if self.best is None:
            raise ProblemRefused("values live in host memory, but the bandwidth is zero")
        line, name = self.best
        moves = len(line.steps) > len(ops_of(line.steps))
        return make_plan(
            self.problem,
            line.steps,
            f"{name}+{NAME}" if moves else name,
            budget_bytes=self.budget,
            seconds=self.deadline.seconds(),
            time_bound_us=min(self.bound_us, line.time_us),
            peak_bound_bytes=least_bytes(self.problem),
        )


def least_bytes(problem: Problem) -> int:
    """A proven lower bound on the peak of every schedule, moves included.

    Whatever may move may be absent at any step that does not touch it.
    """
    everything = priced(problem, set(movable(problem)), 0.0, recompute=True)
    return peak_bound(IndexedProblem(everything))
