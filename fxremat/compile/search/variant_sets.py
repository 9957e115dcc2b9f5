"""Which variants a graph may take, and which of them the planner takes for a number of bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxremat.compile.cost_model import CostModel, with_between
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import PLAN, Runner
from fxremat.compile.search.planning import ONE_PASS, Planning
from fxremat.core.constants import TIME_DOUBT
from fxremat.core.problem import Op, Problem
from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.variants.insertion import GraphWithVariants, Rule, Site, find_sites, insert_all
from fxremat.passes.variants.table import rules_named

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VariantSet:
    """The sites of a graph, and its problem with what they would put there beside its ops.

    There, the ops of variants take longer by what measured times may be wrong by: a variant that
    saves less may as well lose. Once it is taken, its ops take what was measured.
    """

    sites: tuple[Site, ...]
    estimate: Estimate

    @property
    def problem(self) -> Problem:
        """The graph's problem, with all variants to choose from."""
        return self.estimate.problem


@dataclass(frozen=True)
class GraphInVariants:
    """A prepared graph in the variants that it may take; what is made of it is made once."""

    runner: Runner
    prepared: Draft
    drafts: dict[tuple[str, ...], Draft] = field(default_factory=dict)

    @property
    def plain(self) -> Draft:
        """The graph as it is, and its problem."""
        return self.draft(())

    def draft(self, names: tuple[str, ...]) -> Draft:
        """The graph with these of the offered variants taken, and its problem."""
        if names not in self.drafts:
            sites = self.offered.sites if names and self.offered is not None else ()
            asked = replace(self.prepared, sites=tuple(one for one in sites if one.name in names))
            self.drafts[names] = self.runner.run("estimate", PLAN, asked)
        return self.drafts[names]

    def also_with(
        self, planning: Planning, budget: int, *between: int, improved: bool = True
    ) -> list[Draft]:
        """The graph as it is, and with the variants that one pass takes for a budget.

        They are taken for each number of bytes that is held ``between`` its halves.
        """
        if self.offered is None:
            return [self.plain]
        problems = [with_between(self.offered.problem, nbytes) for nbytes in between]
        plans = [planning.solve(one, budget, ONE_PASS, improved=improved) for one in problems]
        return [self.draft(names) for names in dict.fromkeys([(), *(p.variants for p in plans)])]

    @cached_property
    def offered(self) -> VariantSet | None:
        """What the graph could take, as the request allows."""
        return self._variants(allow_lossy=self.runner.costs.request.policy.allow_lossy)

    @cached_property
    def exact(self) -> VariantSet | None:
        """The same without lossy variants; None where none were allowed."""
        lossy = self.runner.costs.request.policy.allow_lossy
        return self._variants(allow_lossy=False) if lossy else None

    def _variants(self, *, allow_lossy: bool) -> VariantSet | None:
        named = self.runner.costs.request.policy.variants
        with self.runner.times.stage("estimate"):
            rules = rules_named(named, allow_lossy=allow_lossy)
            return variant_set(self.prepared, rules, self.runner.costs)


def variant_set(draft: Draft, rules: Sequence[Rule], costs: CostModel) -> VariantSet | None:
    """All that these rules find in the prepared graph; None where that is nothing.

    Raises `VerificationFailed`, which names the rule, where a rule fails and the request asks to
    verify; else the rule is left out, with a warning.
    """
    sites = tuple(site for rule in rules for site in _sites(draft.joint, rule, costs))
    if not sites:
        return None
    sites, offered = _insert(draft.joint, sites, costs)
    found = costs.estimate(offered.joint, offered.inserted)
    return VariantSet(sites, replace(found, problem=with_doubt(found.problem)))


def with_doubt(problem: Problem) -> Problem:
    """The problem in which the ops of variants take longer by what measured times are unsure of."""

    def slower(op: Op) -> Op:
        return replace(op, time_us=op.time_us * (1 + TIME_DOUBT))

    variants = (replace(v, ops=tuple(map(slower, v.ops))) for v in problem.variants)
    return replace(problem, variants=tuple(variants))


def _sites(joint: JointGraph, rule: Rule, costs: CostModel) -> tuple[Site, ...]:
    try:
        return find_sites(joint, [rule], costs.workspace)
    except Exception as error:  # whatever a rule's own code may raise
        _blame(rule.name, "finding its sites", error, costs)
        return ()


def _insert(
    joint: JointGraph, sites: tuple[Site, ...], costs: CostModel
) -> tuple[tuple[Site, ...], GraphWithVariants]:
    """The sites that can be inserted, beside the ops of a copy of the graph."""
    try:
        return sites, insert_all(joint, sites)
    except Exception:  # one of them, found by inserting each alone
        left = tuple(site for site in sites if _can_be_inserted(joint, site, costs))
        return left, insert_all(joint, left)


def _can_be_inserted(joint: JointGraph, site: Site, costs: CostModel) -> bool:
    try:
        insert_all(joint, [site])
    except Exception as error:
        _blame(site.rule, f"inserting {site.name}", error, costs)
        return False
    return True


def _blame(rule: str, doing: str, error: Exception, costs: CostModel) -> None:
    what = f"{doing} raised {type(error).__name__}: {error}"
    if costs.request.policy.verify:
        raise VerificationFailed(f"variant {rule}", what) from error
    log.warning("fxremat: the rule %s is left out: %s", rule, what)
