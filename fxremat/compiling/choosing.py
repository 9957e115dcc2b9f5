"""Which other forms of ops a graph takes, if any, and its fit under the budget in them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxremat.compiling.fitting import QUICK_SOLVER, Run, Split, fit
from fxremat.core.problem import Op, Problem
from fxremat.core.schedule import keep_all
from fxremat.core.timeline import replay
from fxremat.passes.joint_graph import is_tensor
from fxremat.passes.memory_estimation import nbytes
from fxremat.passes.variants.insertion import Form, Offer, find_sites, offer, take
from fxremat.passes.variants.rule import Site
from fxremat.passes.variants.table import RULES, rules_named
from fxremat.report.report import Row
from fxremat.report.where import describe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """A run, the best split that was found for it, and how many were rehearsed."""

    run: Run
    split: Split
    rehearsals: int

    @property
    def over(self) -> bool:
        """Whether it takes more than there is."""
        return self.run.budget is not None and self.split.peak_bytes > self.run.budget


@dataclass
class Forms:
    """Takes other forms of ops where the plan says so."""

    plain: Run
    sites: tuple[Site, ...]
    offered: Offer
    problem: Problem
    fitted: dict[tuple[str, ...], Fitted] = field(default_factory=dict)
    """What was found in the forms of each choice so far."""

    def fit(self, budget: int) -> Fitted | None:
        """The graph in the forms that are chosen for a budget; None where that does not fit.

        With a budget of 0, in those of least peak. The choice is that of a quick solver; once it
        is made, the graph in these forms is planned with the solver that was asked for.
        """
        asked = self.plain.answer(budget, QUICK_SOLVER, self.problem)
        names = asked.variants
        if not names or 0 < budget < asked.peak_bytes:
            return None
        if names not in self.fitted:
            self.fitted[names] = self._fit(names)
        return self.fitted[names]

    def quickest_of_least(self) -> Fitted | None:
        """The fit in the forms that are chosen for the least planned peak as a budget.

        Unlike those of ``fit(0)``, they are the quickest there; forms that are equal in plan may
        differ in what their rehearsals show.
        """
        return self.fit(self.plain.answer(0, QUICK_SOLVER, self.problem).peak_bytes)

    def _fit(self, names: Sequence[str]) -> Fitted:
        plain = self.plain
        with plain.clock.stage("estimate"):
            joint = take(plain.joint, [site for site in self.sites if site.name in names])
            found = plain.costs.estimate(joint)
        index = {node.name: node for node in joint.primals}
        static = [index[node.name] for node in plain.static_inputs]
        run = replace(
            plain, joint=joint, found=found, static_inputs=static,
            variants=tuple(map(_form_row, self._taken(names))), plain=plain.found.problem,
        )  # fmt: skip
        return Fitted(run, *fit(run))

    def knowing(self, fitted: Fitted) -> Forms:
        """The same with the workspaces that Inductor's layouts need, as a fit showed them."""
        known = {op.name: op.workspace_bytes for op in fitted.run.found.problem.ops}

        def told(ops: Iterable[Op]) -> tuple[Op, ...]:
            return tuple(
                replace(op, workspace_bytes=known.get(op.name, op.workspace_bytes)) for op in ops
            )

        problem = self.problem
        others = tuple(replace(form, ops=told(form.ops)) for form in problem.alternatives)
        return replace(self, problem=replace(problem, ops=told(problem.ops), alternatives=others))

    def _taken(self, names: Sequence[str]) -> list[Form]:
        return [form for form in self.offered.forms if form.name in names]


def _form_row(form: Form) -> Row:
    """A form in the report: its rule, where it is, and the bytes that it stands in for."""
    old = [node for node in form.stand_ins if is_tensor(node)]
    where = describe(old[0]) if old else form.name
    lossy = " (inexact)" if any(rule.lossy for rule in RULES if rule.name == form.rule) else ""
    return Row(f"{form.name}{lossy}: {where}", sum(nbytes(node.meta["val"]) for node in old), 1)


def _forms(run: Run, *, allow_lossy: bool) -> Forms | None:
    """The forms that the graph could take."""
    rules = rules_named(run.request.variants, allow_lossy=allow_lossy)
    with run.clock.stage("estimate"):
        try:
            sites = find_sites(run.joint, rules, run.costs.workspaces.of_node)
            if not sites:
                return None
            offered = offer(run.joint, sites)
        except Exception as error:  # a graph that no rule was tried on: it trains without them
            log.warning("no other forms of ops: %s: %s", type(error).__name__, error)
            return None
        problem = run.costs.estimate(offered.joint, offered.forms).problem
        return Forms(run, sites, offered, problem)


def fit_in_forms(run: Run) -> Fitted:
    """The graph as it is where all of it fits the budget, else in the forms that are best.

    Where nothing fits, what takes least of all that was tried.
    """
    budget = run.budget if run.request.wanted_bytes is None else run.request.wanted_bytes
    if budget is None:
        return Fitted(run, *fit(run))
    tried: list[Fitted] = []
    for fitted in _attempts(run, budget):
        if fitted is not None:
            tried.append(fitted)
            if not fitted.over:
                break
    return min(tried, key=lambda one: (one.over, one.split.peak_bytes))


def _attempts(run: Run, budget: int) -> Iterator[Fitted | None]:
    """What to try, the best first.

    Where the forms that are chosen do not fit, after all, the graph as it is comes next if a plan
    for it does, then the forms of least peak, chosen before and after what rehearsals taught, and
    the quickest of them; which they are does not depend on the budget. Exact forms are tried
    without the lossy ones too: more to choose from is never to end in more bytes.
    """
    is_tried = _fits_as_it_is(run, budget)
    if is_tried:
        yield Fitted(run, *fit(run))
    forms = _forms(run, allow_lossy=run.request.allow_lossy)
    if forms is not None:
        yield forms.fit(budget)
        if not is_tried and run.solve(budget).peak_bytes <= budget:
            is_tried = True
            yield Fitted(run, *fit(run))
        lowest = forms.fit(0)
        yield lowest
        yield None if lowest is None else forms.knowing(lowest).fit(0)
        yield forms.quickest_of_least()
        exact = _forms(run, allow_lossy=False) if run.request.allow_lossy else None
        yield None if exact is None else exact.fit(0)
    if not is_tried:
        yield Fitted(run, *fit(run))


def _fits_as_it_is(run: Run, budget: int) -> bool:
    """Whether nothing has to run again, and nothing to move but what lives on the host."""
    problem = run.found.problem
    if problem.host:
        plan = run.solve(budget)
        return plan.peak_bytes <= budget and not plan.repeats() and not plan.moves
    return replay(problem, keep_all(problem)).peak_bytes <= budget
