"""Candidates: the ways to run a graph that the search may try, and what one of them takes.

A candidate is data: the graph in some variants, a plan for it, and who orders what runs:

* ``inductor``: the plan says what runs again and what is saved; Inductor orders the kernels;
* ``planned near the peak``: the order of the plan is held through Inductor where it is near the
  aim; elsewhere Inductor fuses and moves loops as it likes;
* ``planned``: the order of the plan is held everywhere, at some cost in time;
* ``torch``: torch's own partition is compiled; the plan only says what it comes to;
* ``torch, donated``: the same, and the backward writes over what was saved.

An `Evaluator` makes the two halves of a candidate and counts their bytes in a dry run: the peak is
that of the code that Inductor would generate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fxremat.compat.configuration import cache_directory
from fxremat.compile.constants import NEAR_PEAK
from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import DryRun, dry_run_once
from fxremat.compile.pipeline import APPLY, BEGIN, Runner
from fxremat.compile.request import Request, as_asked
from fxremat.core.constants import NEGLIGIBLE_PART
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import replay
from fxremat.memory.reserved_bytes import Reserved, reserved, reserved_by_run
from fxremat.passes.fixed_order import live_where_free
from fxremat.passes.halves import original

log = logging.getLogger(__name__)

Order = Literal["inductor", "planned near the peak", "planned", "torch", "torch, donated"]


@dataclass(frozen=True)
class Candidate:
    """One way to run the graph. ``draft`` is the graph with its variants taken, and its problem.

    ``held`` are the steps of the plan at which its order is held; None stands for all.
    """

    draft: Draft
    plan: Plan
    order: Order
    held: frozenset[int] | None = frozenset()

    @classmethod
    def near_peak(cls, draft: Draft, plan: Plan, aim: int) -> Candidate:
        """The plan with its order held where it is near the aim.

        Where an op runs again that makes much of next to nothing, as a mask of dropout of a seed,
        all that runs again is held: Inductor would fuse such ops, and what reads them, into one
        early loop, and what that makes is then there for long.
        """
        problem, steps = draft.problem, plan.steps
        live = live_where_free(draft.estimate, replay(problem, steps))
        held = {k for k, nbytes in enumerate(live) if nbytes >= NEAR_PEAK * aim}
        first = {step: k for k, step in reversed([*enumerate(steps)])}
        again = {k: s for k, s in enumerate(steps) if isinstance(s, str) and first[s] < k}
        if any(_is_of_next_to_nothing(problem.op_of[name], problem) for name in again.values()):
            held |= again.keys()
        return cls(draft, plan, "planned near the peak" if held else "inductor", frozenset(held))

    @classmethod
    def planned(cls, draft: Draft, plan: Plan) -> Candidate:
        """The plan with its order held everywhere."""
        return cls(draft, plan, "planned", None)

    @property
    def key(self) -> tuple[tuple[str, ...], tuple[Step, ...], Order, frozenset[int] | None]:
        """Equal for candidates that are the same two halves."""
        names = tuple(one.name for one in self.draft.taken)
        return names, self.plan.steps, self.order, self.held


def _is_of_next_to_nothing(op: Op, problem: Problem) -> bool:
    """Whether what an op reads is small beside what it writes.

    What reads nothing at all is a constant, which loops make for themselves.
    """
    sizes = problem.bytes_of
    read, written = (sum(sizes[name] for name in names) for names in (op.reads, op.writes))
    return 0 < read <= NEGLIGIBLE_PART * written


@dataclass(frozen=True)
class Corrections:
    """What dry runs have shown to differ from the problem, by op.

    ``scratch`` are bytes of library calls in Inductor's layouts. ``beside`` is by how much more
    than planned is live while an op runs: loops that Inductor did not fuse, or fused otherwise.
    """

    scratch: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)

    def apply_to(self, problem: Problem) -> Problem:
        """The problem with these workspaces, also in its variants; itself where none differs."""
        ops = self._corrected(problem.ops)
        others = tuple(replace(one, ops=self._corrected(one.ops)) for one in problem.variants)
        if ops == problem.ops and others == problem.variants:
            return problem
        return replace(problem, ops=ops, variants=others)

    def _corrected(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        def workspace(op: Op) -> int:
            return self.scratch.get(op.name, op.workspace_bytes) + self.beside.get(op.name, 0)

        return tuple(replace(op, workspace_bytes=workspace(op)) for op in ops)

    @classmethod
    def of_all(cls, several: Iterable[Corrections]) -> Corrections:
        """What they show together."""
        scratch: dict[str, int] = {}
        beside: dict[str, int] = {}
        for one in several:
            scratch.update(one.scratch)
            for name, nbytes in one.beside.items():
                beside[name] = max(nbytes, beside.get(name, 0))
        return cls(scratch, beside)


@dataclass(frozen=True)
class Evaluation:
    """A candidate with its halves made, and the peak that they really have.

    The peak is in the bytes that the budget counts. Without a dry run it is the plan's.
    """

    candidate: Candidate
    draft: Draft
    peak_bytes: int
    dry_run: DryRun | None
    reserved: Reserved | None = None
    """What torch's allocator takes, where the budget counts that."""

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def allocated(self) -> int:
        """The peak in allocated bytes."""
        return self.peak_bytes if self.dry_run is None else self.dry_run.peak_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """What the budget counts beyond allocated bytes; plans know nothing of it."""
        return self.peak_bytes - self.allocated

    def corrections(self) -> Corrections:
        """What its dry run shows of library calls."""
        return Corrections(self.dry_run.scratch if self.dry_run is not None else {})

    def corrections_above(self, aim: int) -> Corrections:
        """The same, and by how much the plan was wrong where more than ``aim`` bytes are live."""
        corrections, shown = self.corrections(), self.dry_run
        if shown is None or self.candidate.order.startswith("torch"):
            return corrections
        problem = corrections.apply_to(self.candidate.draft.problem)
        planned = _most_live(problem, self.plan.steps)
        op_of = {**problem.writer_of, **{op.name: op.name for op in problem.ops}}
        beside: dict[str, int] = {}
        computed = ""
        for name, live in zip(reversed(shown.computed), reversed(shown.live_bytes), strict=True):
            computed = op_of.get(original(name), computed)  # a loop makes its result last
            if live > aim and live > planned.get(computed, live):
                beside[computed] = max(beside.get(computed, 0), live - planned[computed])
        return replace(corrections, beside=beside)


def _most_live(problem: Problem, steps: Sequence[Step]) -> dict[str, int]:
    """The most bytes that are live while an op runs, by the op."""
    most: dict[str, int] = {}
    for step, live in zip(steps, replay(problem, steps).live_bytes, strict=True):
        if isinstance(step, str):
            most[step] = max(live, most.get(step, 0))
    return most


def plain_peak(shown: DryRun, request: Request) -> int:
    """The peak in a dry run of code that is not ours, in the bytes that the budget counts."""
    allocator = request.budget.counted_allocator
    if allocator is None or not shown.events:
        return shown.peak_bytes
    usage = reserved(shown.events, allocator, request.budget.held)
    return usage.peak_reserved_bytes - request.budget.held


def _counted(plan: Plan, shown: DryRun | None, request: Request) -> tuple[int, Reserved | None]:
    """The peak of a candidate in the bytes that the budget counts, and what is reserved for it.

    Without a dry run it is the peak of its plan. None where what is reserved is not known.
    """
    budget, taken = request.budget, None
    if shown is not None and shown.allocator.as_run is not None and budget.allocator is not None:
        run = as_asked(shown.allocator.as_run, request)
        taken = reserved_by_run(shown.events, run, budget.allocator, budget.held)
    if taken is not None and budget.counted_allocator is not None:
        return taken.nbytes - budget.held, taken
    return (plan if shown is None else shown).peak_bytes, taken


@dataclass(frozen=True)
class Evaluator:
    """Makes candidates and counts them in dry runs, each only once.

    Kernels of their own are begun, for they take long, unless only the plan is asked for.
    """

    runner: Runner
    seen: dict[Any, Evaluation] = field(default_factory=dict)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """What the candidate comes to. Raises `VerificationFailed` where it is not sound."""
        known = self.seen.get(candidate.key)
        if known is not None:
            return replace(known, candidate=candidate)
        draft = candidate.draft
        if not candidate.order.startswith("torch"):
            draft = replace(draft, planned=(candidate.plan.steps, candidate.held))
            draft = self.runner.run("apply", APPLY, draft)
        if not draft.plan_only:
            draft = self.runner.run("kernels", BEGIN, draft)
        request = self.runner.costs.request
        shown = None
        if request.compiled and request.budget.target is not None:
            likely = candidate.plan.peak_bytes <= request.budget.target
            shown = self._dry_run(draft, with_kernels=likely and not draft.plan_only)
        peak, taken = _counted(candidate.plan, shown, request)
        made = self.seen[candidate.key] = Evaluation(candidate, draft, peak, shown, taken)
        log.debug(
            "candidate %d: %d variants, %d runs again, order of %s: planned %d bytes, takes %d",
            len(self.seen), len(draft.taken), sum(candidate.plan.repeats().values()),
            candidate.order, candidate.plan.peak_bytes, peak,
        )  # fmt: skip
        return made

    def _dry_run(self, draft: Draft, *, with_kernels: bool) -> DryRun | None:
        """The real peak; None, with a warning, for code that does not run without data.

        Code that may well be taken comes ``with_kernels``, and they begin to be compiled.
        """
        costs = self.runner.costs
        with self.runner.times.stage("dry run"):
            try:
                shown = dry_run_once(
                    *draft.halves,
                    num_fwd_outputs=draft.num_forward_outputs,
                    device=costs.device.type,
                    workspace=costs.workspaces.blocks_of_call,
                    directory=cache_directory() / "dry_runs",
                    with_kernels=with_kernels,
                    card=costs.request.device.card,
                )
                return shown.with_between(costs.request.budget.between)
            except Exception as error:  # any op of any library may refuse
                log.warning(
                    "fxremat: the generated code could not run without data (%s: %s); the budget "
                    "is held by the plan alone, which may be off by some percent: leave a reserve",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                return None
