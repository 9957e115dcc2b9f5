"""Keep, recompute or move to the host: one decision, by any solver, at a price for each byte moved.

What comes back from the host is computed again from nothing: an op that reads a token of no
bytes. So an op whose values may move is two in the problem that the solvers are given, and each
of them, the integer programmes of every level included, chooses among keeping and fetching where
before it chose among keeping and recomputing:

    a = conv(x)   becomes   a's token = conv(x), once;   a = fetch(a's token), again at a price

The price, microseconds for each byte, stands for the one thing that this problem does not say:
an engine makes one transfer at a time, beside the ops (a Lagrange multiplier of its capacity). At
a high price nothing moves, at none everything does; in between, values move whose recomputation
costs more than their bytes. `fxremat.planner.transfers` turns each answer into a schedule with
transfers on two engines, whose real time is what counts; the price is searched for.

Source: the problem with both choices is that of POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS
2021) on graphs; pricing by multipliers and the search are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.timeline import Timeline
from fxremat.core.timing import transfer_us
from fxremat.planner import greedy
from fxremat.planner.bound import peak_bound
from fxremat.planner.clock import Clock
from fxremat.planner.model import build_model
from fxremat.planner.options import SolverOptions
from fxremat.planner.plans import make_plan
from fxremat.planner.transfers import Fetch, Item, place

Inner = Callable[[Problem, int | None, SolverOptions], Plan]

NAME = "offload"
TOKEN, GET = " on the host", "fetch "


def movable(problem: Problem) -> dict[str, int]:
    """Ops all of whose values may move, with the bytes of these."""
    fixed = {*problem.resident, *problem.outputs}
    sizes = problem.bytes_of
    found = {}
    for op in problem.ops:
        if op.writes and not fixed.intersection(op.writes):
            found[op.name] = sum(sizes[name] for name in op.writes)
    return {name: size for name, size in found.items() if size}


def priced(problem: Problem, moved: set[str], us_per_byte: float, *, recompute: bool) -> Problem:
    """The problem in which the values of the ops ``moved`` are fetched instead of recomputed.

    Without ``recompute`` nothing else runs again.
    """
    sizes = problem.bytes_of
    last = {name: op.name for op in problem.ops for name in op.reads}
    ops: list[Op] = []
    for op in problem.ops:
        if op.name not in moved:
            ops.append(op if recompute else replace(op, repeatable=False))
            continue
        written = sum(sizes[name] for name in op.writes)
        over = {write: sizes[read] for read, write in op.inplace if last[read] == op.name}
        written -= sum(min(sizes[write], size) for write, size in over.items())
        ops.append(replace(op, writes=(op.name + TOKEN,), inplace=(), repeatable=False,
                           workspace_bytes=op.workspace_bytes + written))  # fmt: skip
        ops.extend(
            Op(GET + name, (op.name + TOKEN,), (name,), us_per_byte * sizes[name], 0, op.phase)
            for name in op.writes
        )
    tokens = tuple(Value(name + TOKEN, 0) for name in sorted(moved))
    return replace(problem, values=problem.values + tokens, ops=tuple(ops), copies=None)


def items_of(problem: Problem, steps: Sequence[str]) -> list[Item]:
    """A schedule of a priced problem: ops of the problem, and fetches."""
    known, seen = problem.op_of, set[str]()
    items: list[Item] = []
    for step in steps:
        if step in known:
            items.append(step)
        elif step in seen:
            items.append(Fetch(step.removeprefix(GET)))
        seen.add(step)
    return items


@dataclass(frozen=True)
class Choice:
    """Which values may move: see `chosen`. ``load`` None: all, and all at once."""

    worth: float
    load: float | None
    recompute: bool = True


CHOICES = (
    Choice(0.03, 1.0),
    Choice(0.15, 1.0),
    Choice(0.03, 0.8),
    Choice(0.03, 1.15),
    Choice(0.0, None),
    Choice(0.0, None, recompute=False),
)
"""What is tried, by worth against the time on the engine and by load of the engine."""
ROOM = (0, 1, 2)
"""Values of the largest size for which the budget leaves room."""
NEARLY_NOTHING = 1e-3
"""Price of a fetch, as a part of its time on the engine: enough not to fetch for nothing."""
BACKLOG = 1.0
"""A value joins the queue of the engine if that is no longer than the value's own transfer."""


def chosen(problem: Problem, choice: Choice) -> set[str]:
    """Ops whose values may move, so many that the engine is busy during the forward.

    Walking through the forward, a value that the backward reads joins the engine's queue where it
    costs enough to compute again, the queue is short, and the transfer ends before the forward
    does. With a ``load`` of 2, half of these transfers would have to be waited for.
    """
    copies, can = problem.copies, movable(problem)
    assert copies is not None
    if choice.load is None:
        return set(can)
    again, wanted = _again_us(problem), _read_by_backward(problem)
    forward = [op for op in problem.ops if op.phase == "forward"]
    end = choice.load * sum(op.time_us for op in forward)
    now = engine = 0.0
    found = set()
    for op in forward:
        now += choice.load * op.time_us
        if op.name not in can or wanted.isdisjoint(op.writes):
            continue
        takes = transfer_us(copies, "to host", can[op.name])
        back = transfer_us(copies, "to device", can[op.name])
        begin = max(now, engine)
        queue = begin - now <= BACKLOG * takes
        if again[op.name] >= choice.worth * back and queue and begin + takes <= end:
            engine = begin + takes
            found.add(op.name)
    return found


def _read_by_backward(problem: Problem) -> set[str]:
    return {name for op in problem.ops if op.phase == "backward" for name in op.reads}


def _again_us(problem: Problem) -> dict[str, float]:
    """Time to run each op again, with what it reads; what the backward reads too is there."""
    wanted = _read_by_backward(problem)
    cost: dict[str, float] = {}
    found = {}
    for op in problem.ops:
        reads = sum(cost.get(name, 0.0) for name in op.reads if name not in wanted)
        found[op.name] = op.time_us + reads if op.repeatable else math.inf
        cost.update(dict.fromkeys(op.writes, found[op.name]))
    return found


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions, inner: Inner) -> Plan:
    """The fastest plan of the solver ``inner`` within the budget, with or without moves.

    Never slower than its plan without: that is among those compared.
    """
    clock = Clock(options.time_limit_s)
    alone = inner(replace(problem, copies=None), budget_bytes, options)
    fits = budget_bytes is None or alone.peak_bytes <= budget_bytes
    if budget_bytes is None or (fits and alone.time_us <= problem.base_time_us):
        return alone
    search = _Search(problem, budget_bytes, options, clock)
    quick = [search.offer(choice, greedy.solve) for choice in CHOICES]
    best = min(range(len(CHOICES)), key=lambda k: search.rank(quick[k]))
    if inner is not greedy.solve:
        search.offer(CHOICES[best], inner)
    return search.plan(alone)


@dataclass
class _Search:
    """The best schedule so far."""

    problem: Problem
    budget: int
    options: SolverOptions
    clock: Clock
    best: Timeline | None = None

    def offer(self, choice: Choice, inner: Inner) -> Timeline:
        """The best schedule that a solver makes of a choice.

        Where its transfers have to be waited for, also with room left for values to come early.
        """
        copies = self.problem.copies
        assert copies is not None
        moved = chosen(self.problem, choice)
        price = NEARLY_NOTHING / max(copies.to_device, 1e-9)
        question = priced(self.problem, moved, price, recompute=choice.recompute)
        largest = max((movable(self.problem)[name] for name in moved), default=0)
        lines: list[Timeline] = []
        for room in ROOM:
            answer = inner(question, self.budget - room * largest, self.options)
            lines.append(place(self.problem, items_of(self.problem, answer.ops), self.budget))
            if not lines[-1].timing.stall_us:
                break
        line = min(lines, key=self.rank)
        if self._allowed(line) and (self.best is None or self.rank(line) < self.rank(self.best)):
            self.best = line
        return line

    def _allowed(self, line: Timeline) -> bool:
        copies = self.problem.copies
        assert copies is not None
        cap = math.inf if copies.host_bytes is None else copies.host_bytes
        return line.host_peak_bytes <= cap and line.time_us < math.inf

    def rank(self, line: Timeline) -> tuple[int, float]:
        """Less is better: within the budget first, then less time."""
        return max(0, line.peak_bytes - self.budget), line.time_us

    def plan(self, alone: Plan) -> Plan:
        """The best of all, and of the plan without moves.

        What is proven for plans without moves does not hold for others.
        """
        line = self.best
        here = (max(0, alone.peak_bytes - self.budget), alone.time_us)
        moves = line is not None and self.rank(line) < here
        return make_plan(
            self.problem,
            line.steps if line is not None and moves else alone.steps,
            f"{alone.solver}+{NAME}" if moves else alone.solver,
            budget_bytes=self.budget,
            seconds=self.clock.seconds(),
            peak_bound_bytes=least_bytes(self.problem),
        )


def least_bytes(problem: Problem) -> int:
    """A proven lower bound on the peak of every schedule, moves included.

    Whatever may move may be absent at any step that does not touch it.
    """
    everything = priced(problem, set(movable(problem)), 0.0, recompute=True)
    return peak_bound(build_model(everything))
