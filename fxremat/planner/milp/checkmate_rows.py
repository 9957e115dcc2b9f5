"""The rows of Checkmate's programme for the repeats of a stage: reads, frees and bytes.

For stages whose repeats run in base order they are those of Jain et al. (arXiv 1910.02653,
section 4). For other stages there are weaker ones, which hold in whatever order the repeats run.
"""

from __future__ import annotations

from collections.abc import Collection

from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.milp.checkmate_columns import Allowed, CheckmateMilp
from fxremat.planner.milp.highs import SCALE, Term


def build_programme(
    model: IndexedProblem, budget: int, allowed: Allowed, ordered: Collection[int]
) -> CheckmateMilp:
    """The whole programme; the order of repeats counts in the stages ``ordered``."""
    programme = CheckmateMilp(model, budget, allowed, ordered)
    for stage in range(model.n):
        if stage in ordered:
            _add_frees(programme, stage)
            _track_order(programme, stage)
            _fit_in_order(programme, stage)
        else:
            _provide_reads(programme, stage)
            _fit_in_any_order(programme, stage)
    return programme


def _writes(programme: CheckmateMilp, op: int) -> float:
    """What a repeat of the op writes, in units of the programme; outputs are there already."""
    return sum(
        programme.size(v) for v in programme.model.writes[op] if not programme.model.is_output[v]
    )


def _users(programme: CheckmateMilp, stage: int, value: int) -> list[int]:
    """The ops that may read the value in the stage, in order."""
    return [op for op in programme.run[stage] if value in programme.model.reads[op]]


def _add_frees(programme: CheckmateMilp, stage: int) -> None:
    """FREE[t,v,k] <= R[t,k], for repeats k that write or read v, unless op t reads it too."""
    model = programme.model
    kept_on = {*model.reads[stage], *model.writes[stage]}
    for op in programme.allowed[stage]:
        for value in (*model.reads[op], *model.writes[op]):
            if value not in kept_on and not model.is_output[value]:
                column = programme.milp.real()
                programme.free[stage][value, op] = column
                programme.at_most([(column, 1.0)], [(programme.run[stage][op], 1.0)])


def _track_order(programme: CheckmateMilp, stage: int) -> None:
    """R[t,k] + sum of FREE[t,v,i] over i before k <= S[t,v] + R[t,w], for users k of v.

    After the last user the same holds of S[t+1,v]; the paper's bounds on FREE follow. No
    stage that runs w has v before, as its readers come later: S[t,v] + R[t,w] <= 1.
    """
    for value in programme.touched[stage]:
        if programme.model.is_output[value]:
            continue
        available, writer = programme.available(stage, value), programme.model.writer[value]
        gone: list[Term] = []
        if writer in programme.allowed[stage]:
            programme.at_most(available, [], 1.0)
        for op in sorted({*_users(programme, stage, value), *{writer} & {*programme.run[stage]}}):
            if op != writer:
                programme.at_most([(programme.run[stage][op], 1.0), *gone], available)
            if (value, op) in programme.free[stage]:
                gone.append((programme.free[stage][value, op], 1.0))
        programme.at_most([(programme.stays(stage + 1, value), 1.0), *gone], available)


def _fit_in_order(programme: CheckmateMilp, stage: int) -> None:
    """U[t,k] = U after the repeat before k + R[t,k] (writes + workspace) - taken over <= budget.

    After k its workspace goes, and m_v FREE[t,v,k] of what it reads and writes, less what it
    took over from v: these bytes went before. A pair counts wherever its read goes, so what
    is taken over is a part of FREE.
    """
    model = programme.model
    before: list[Term] = [(programme.bytes_at_start[stage], 1.0)]
    for op in programme.allowed[stage]:
        ran = programme.run[stage][op]
        own = _writes(programme, op) + model.workspace[op] / programme.byte_unit
        saved = programme.taken_over(stage, op)
        gone, shared = _gone(programme, stage, op, saved)
        used = programme.sum_of([*before, (ran, own), *shared])
        before = [(used, 1.0), (ran, -model.workspace[op] / programme.byte_unit), *gone]


def _gone(
    programme: CheckmateMilp, stage: int, op: int, saved: dict[int, float]
) -> tuple[list[Term], list[Term]]:
    """Terms of the bytes that are freed after the op, and of those that it takes over."""
    model = programme.model
    gone: list[Term] = []
    shared: list[Term] = []
    for value in (*model.reads[op], *model.writes[op]):
        column = programme.free[stage].get((value, op))
        if column is not None:
            taken = saved.get(value, 0.0)
            gone.append((column, taken - programme.size(value)))
            shared.append((column, -taken))
    return gone, shared


def _provide_reads(programme: CheckmateMilp, stage: int) -> None:
    """R[t,k] <= S[t,v] + R[t,w] for reads v of k; S[t+1,v] <= S[t,v] + R[t,w]."""
    for value in programme.touched[stage]:
        if not programme.model.is_output[value]:
            available = programme.available(stage, value)
            for op in _users(programme, stage, value):
                programme.at_most([(programme.run[stage][op], 1.0)], available)
            programme.at_most([(programme.stays(stage + 1, value), 1.0)], available)


def _fit_in_any_order(programme: CheckmateMilp, stage: int) -> None:
    """Other values held + R[t,k] (reads + writes + workspace - taken over) <= budget."""
    if not programme.allowed[stage]:
        return
    model = programme.model
    held = _add_held_throughout(programme, stage)
    changes: list[Term] = []
    for value, column in held.items():
        changes += [
            (programme.stay[stage][value], -programme.size(value)),
            (column, programme.size(value)),
        ]
    others = programme.sum_of([(programme.bytes_at_start[stage], 1.0), *changes])
    for op in programme.allowed[stage]:
        terms: list[Term] = [(others, 1.0)]
        own = model.workspace[op] / programme.byte_unit - sum(
            programme.taken_over(stage, op).values()
        )
        for value in (*model.reads[op], *model.writes[op]):
            if not model.is_output[value]:
                own += programme.size(value)
                if value in held:
                    terms.append((held[value], -programme.size(value)))
        programme.at_most([*terms, (programme.run[stage][op], own)], [], SCALE)


def _add_held_throughout(programme: CheckmateMilp, stage: int) -> dict[int, int]:
    """held_throughout[t,v] >= S[t,v] + S[t+1,v] - 1 - R[t,w], with 1 for S[t+1,v] if op t reads v.

    A copy is held throughout the stage if it is there at its start, must be there at its
    end, and is not written again. Values that nothing in the stage touches need no column.
    """
    model, one = programme.model, programme.one
    for value in programme.touched[stage]:
        if value not in programme.stay[stage] or model.is_output[value]:
            continue
        needed = one if value in model.reads[stage] else programme.stays(stage + 1, value)
        terms: list[Term] = [(programme.stay[stage][value], 1.0), (needed, 1.0), (one, -1.0)]
        if model.writer[value] in programme.run[stage]:
            terms.append((programme.run[stage][model.writer[value]], -1.0))
        column = programme.held_throughout[stage][value] = programme.milp.real()
        programme.at_most(terms, [(column, 1.0)])
    return programme.held_throughout[stage]
