"""The rows of Checkmate's programme that say what fits while ops run again.

Families of constraints of Jain et al. (arXiv 1910.02653, section 4), for a stage whose repeats
run in base order, and weaker ones that hold in whatever order they run.
"""

from __future__ import annotations

from collections.abc import Collection

from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.milp.checkmate_columns import SCALE, Allowed, Staged
from fxremat.planner.milp.highs import Term


def programme(
    model: IndexedProblem, budget: int, allowed: Allowed, ordered: Collection[int]
) -> Staged:
    """The whole programme; the order of repeats counts in the stages ``ordered``."""
    staged = Staged(model, budget, allowed, ordered)
    for stage in range(model.n):
        if stage in ordered:
            _add_frees(staged, stage)
            _track_order(staged, stage)
            _fit_in_order(staged, stage)
        else:
            _provide_reads(staged, stage)
            _fit_in_any_order(staged, stage)
    return staged


def _writes(it: Staged, op: int) -> float:
    """Bytes that a repeat of the op brings: outputs are there already."""
    return sum(it.size(v) for v in it.model.writes[op] if not it.model.is_output[v])


def _users(it: Staged, stage: int, value: int) -> list[int]:
    """The ops that may read the value in the stage, in order."""
    return [op for op in it.run[stage] if value in it.model.reads[op]]


def _add_frees(it: Staged, stage: int) -> None:
    """FREE[t,v,k] <= R[t,k], for repeats k that write or read v, unless op t reads it too."""
    model = it.model
    kept_on = {*model.reads[stage], *model.writes[stage]}
    for op in it.allowed[stage]:
        for value in (*model.reads[op], *model.writes[op]):
            if value not in kept_on and not model.is_output[value]:
                column = it.mip.real()
                it.free[stage][value, op] = column
                it.at_most([(column, 1.0)], [(it.run[stage][op], 1.0)])


def _track_order(it: Staged, stage: int) -> None:
    """R[t,k] + sum of FREE[t,v,i] over i before k <= S[t,v] + R[t,w], for users k of v.

    After the last user the same holds of S[t+1,v]; the paper's bounds on FREE follow. No
    stage that runs w has v before, as its readers come later: S[t,v] + R[t,w] <= 1.
    """
    for value in it.touched[stage]:
        if it.model.is_output[value]:
            continue
        there, writer = it.there(stage, value), it.model.writer[value]
        gone: list[Term] = []
        if writer in it.allowed[stage]:
            it.at_most(there, [], 1.0)
        for op in sorted({*_users(it, stage, value), *{writer} & {*it.run[stage]}}):
            if op != writer:
                it.at_most([(it.run[stage][op], 1.0), *gone], there)
            if (value, op) in it.free[stage]:
                gone.append((it.free[stage][value, op], 1.0))
        it.at_most([(it.stays(stage + 1, value), 1.0), *gone], there)


def _fit_in_order(it: Staged, stage: int) -> None:
    """U[t,k] = U after the repeat before k + R[t,k] (writes + workspace) - taken over <= budget.

    After k its workspace goes, and m_v FREE[t,v,k] of what it reads and writes, less what it
    took over from v: these bytes went before. A pair counts wherever its read goes, so what
    is taken over is a part of FREE.
    """
    model = it.model
    before: list[Term] = [(it.through[stage], 1.0)]
    for op in it.allowed[stage]:
        ran = it.run[stage][op]
        own = _writes(it, op) + model.workspace[op] / it.unit
        saved = it.taken_over(stage, op)
        gone, shared = _gone(it, stage, op, saved)
        used = it.sum_of([*before, (ran, own), *shared])
        before = [(used, 1.0), (ran, -model.workspace[op] / it.unit), *gone]


def _gone(
    it: Staged, stage: int, op: int, saved: dict[int, float]
) -> tuple[list[Term], list[Term]]:
    """Terms of what goes after the op, once it ran, and of what it takes over."""
    model = it.model
    gone: list[Term] = []
    shared: list[Term] = []
    for value in (*model.reads[op], *model.writes[op]):
        column = it.free[stage].get((value, op))
        if column is not None:
            taken = saved.get(value, 0.0)
            gone.append((column, taken - it.size(value)))
            shared.append((column, -taken))
    return gone, shared


def _provide_reads(it: Staged, stage: int) -> None:
    """R[t,k] <= S[t,v] + R[t,w] for reads v of k; S[t+1,v] <= S[t,v] + R[t,w]."""
    for value in it.touched[stage]:
        if not it.model.is_output[value]:
            there = it.there(stage, value)
            for op in _users(it, stage, value):
                it.at_most([(it.run[stage][op], 1.0)], there)
            it.at_most([(it.stays(stage + 1, value), 1.0)], there)


def _fit_in_any_order(it: Staged, stage: int) -> None:
    """Other values held + R[t,k] (reads + writes + workspace - taken over) <= budget."""
    if not it.allowed[stage]:
        return
    model = it.model
    held = _add_held(it, stage)
    changes: list[Term] = []
    for value, column in held.items():
        changes += [(it.stay[stage][value], -it.size(value)), (column, it.size(value))]
    others = it.sum_of([(it.through[stage], 1.0), *changes])
    for op in it.allowed[stage]:
        terms: list[Term] = [(others, 1.0)]
        own = model.workspace[op] / it.unit - sum(it.taken_over(stage, op).values())
        for value in (*model.reads[op], *model.writes[op]):
            if not model.is_output[value]:
                own += it.size(value)
                if value in held:
                    terms.append((held[value], -it.size(value)))
        it.at_most([*terms, (it.run[stage][op], own)], [], SCALE)


def _add_held(it: Staged, stage: int) -> dict[int, int]:
    """held[t,v] >= S[t,v] + S[t+1,v] - 1 - R[t,w], with 1 for S[t+1,v] if op t reads v.

    A copy is held throughout the stage if it is there at its start, must be there at its
    end, and is not written again. Values that nothing in the stage touches need no column.
    """
    model, one = it.model, it.one
    for value in it.touched[stage]:
        if value not in it.stay[stage] or model.is_output[value]:
            continue
        needed = one if value in model.reads[stage] else it.stays(stage + 1, value)
        terms: list[Term] = [(it.stay[stage][value], 1.0), (needed, 1.0), (one, -1.0)]
        if model.writer[value] in it.run[stage]:
            terms.append((it.run[stage][model.writer[value]], -1.0))
        column = it.held[stage][value] = it.mip.real()
        it.at_most(terms, [(column, 1.0)])
    return it.held[stage]
