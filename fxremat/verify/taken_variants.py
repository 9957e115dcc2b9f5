"""Verifying a joint graph with variants taken, with nothing taken from the rules that found them.

Two graphs are compared, before and after. A stand-in counts as the node that it stands for; all
else has to compute what it did before, each value from the same values by the same call (value
numbering). Every call that is not a function of its arguments has to run as often. The other
conditions are listed in docs/design/verification.md.

By induction along the second graph, whatever a stand-in reads is then what it was. That what it
computes from this is what it stands for, its rule answers for: rules are tried on random training
steps by `tests/fuzz`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.compat.joint_graph import is_tangent, must_be_in_forward
from fxremat.errors import VerificationFailed
from fxremat.verify.data_flow import Numbering, ReadGraph
from fxremat.verify.predicates import (
    computed_from,
    forms_of,
    is_fetch,
    is_function,
    is_mutating,
    is_put,
    results_of,
)


@dataclass(frozen=True)
class TakenVariant:
    """A site that was taken: who stands in for whom, by the names of nodes.

    ``pairs`` are (node of the graph before, its stand-in in the graph after); an old node may have
    two, one for each half. Stand-ins that are not in the graph after are not looked for.
    """

    rule: str
    site: str
    pairs: tuple[tuple[str, str], ...]
    lossy: bool = False
    backward_only: frozenset[str] = frozenset()
    """Names of stand-ins that no result of the forward may depend on."""


INEXACT_FORWARD = ("masked_attention",)
"""Lossy rules whose results are inexact in the forward, too: rows without keys weigh otherwise."""


def _fail(taken: TakenVariant, what: str) -> None:
    advice = f"compile without the variant {taken.rule!r} (option variants), or with verify=False"
    raise VerificationFailed(f"variant {taken.rule}", f"at {taken.site}: {what}; {advice}")


class _Numbers(Numbering):
    """Calls are one of a kind where they are no functions, also those that only wait."""

    waits = frozenset()

    def only_moves(self, node: fx.Node) -> bool:
        return is_fetch(node) or is_put(node)

    def may_repeat(self, node: fx.Node, mutated: frozenset[fx.Node]) -> bool:
        return is_function(node)


class _Comparison:
    """Both graphs, and which nodes stand in for which."""

    def __init__(
        self, before: fx.Graph, after: fx.Graph, taken: Sequence[TakenVariant], early: int
    ) -> None:
        self.before, self.after, self.early = before, after, early
        self.old = {node.name: node for node in before.nodes}
        self.new = {node.name: node for node in after.nodes}
        self.known = [node for node in after.nodes if node.name in self.old]
        self.stands_for: dict[fx.Node, fx.Node] = {}
        self.of_site: dict[fx.Node, TakenVariant] = {}
        for one in taken:
            for old, new in one.pairs:
                self._add(one, old, new)

    def _add(self, one: TakenVariant, old: str, new: str) -> None:
        if old not in self.old:
            _fail(one, f"{new} stands for {old}, which is not in the graph")
        if new in self.old:
            _fail(one, f"{new}, which stands for {old}, was in the graph before")
        if new in self.new:
            node = self.new[new]
            if self.stands_for.setdefault(node, self.old[old]) is not self.old[old]:
                _fail(one, f"{new} stands for several nodes")
            self.of_site[node] = one

    def check(self) -> None:
        """Raise where one of the conditions above does not hold."""
        self._same_forms()
        numbering = _Numbers(frozenset())
        first = numbering.read(self.before)
        meant = {new: (first.of[old], None) for new, old in self.stands_for.items()}
        second = numbering.read(self.after, meant)
        self._same(first, second)
        self._once({*first.once}, {*second.once})
        self._early()
        self._sources()

    def _same_forms(self) -> None:
        """A stand-in lies in memory as what it stands for does."""
        for new, old in self.stands_for.items():
            found, wanted = forms_of(new.meta.get("val")), forms_of(old.meta.get("val"))
            if found != wanted:
                what = f"{new.name} has {found}, and {old.name}, which it stands for, {wanted}"
                _fail(self.of_site[new], what)

    def _sources(self) -> None:
        """Stand-ins are computed from what the graph before has."""
        for new in self.stands_for:
            for source in computed_from([new], self.known):
                inside = source.name not in self.old and source not in self.stands_for
                if source.op in ("placeholder", "get_attr") and inside:
                    _fail(self.of_site[new], f"{new.name} reads {source.name}, which is new")

    def _same(self, first: ReadGraph, second: ReadGraph) -> None:
        """The results, and whatever has a name of the graph before."""
        for node in filter(second.of.__contains__, self.known):
            if second.of[node] != first.of[self.old[node.name]]:
                self._blame(node, f"{node.name} is computed from something else")
        old, new = results_of(self.before), results_of(self.after)
        if len(old) != len(new):
            raise VerificationFailed("variants", "the number of results is another")
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            if first.number(a) != second.number(b):
                self._blame(self.after.output_node(), f"result {index} is computed differently")

    def _blame(self, node: fx.Node, what: str) -> None:
        """Name the site whose node is the nearest that was read."""
        for source in sorted(computed_from([node]), key=lambda n: n.name):
            if source in self.of_site and node in source.users:
                _fail(self.of_site[source], what)
        sites = {one.rule for one in self.of_site.values()}
        raise VerificationFailed(f"variants {', '.join(sorted(sites))}", what)

    def _once(self, first: set[str], second: set[str]) -> None:
        """Calls with an effect or random numbers; one may go if only what was replaced read it."""
        replaced = computed_from(self.stands_for.values())
        for name in sorted(second - first):
            self._blame(self.new[name], f"{name} is new, and is no function of its arguments")
        for name in sorted(first - second):
            node = self.old[name]
            if node not in replaced or is_mutating(node) or node.is_impure():
                raise VerificationFailed("variants", f"{name} does not run any more")

    def _early(self) -> None:
        """What the forward must not depend on."""
        nodes = [r for r in results_of(self.after)[: self.early] if isinstance(r, fx.Node)]
        nodes += filter(must_be_in_forward, self.known)
        held = computed_from(nodes)
        for new, one in self.of_site.items():
            is_late = one.lossy and one.rule not in INEXACT_FORWARD
            if (is_late or new.name in one.backward_only) and new in held:
                _fail(one, f"a result of the forward depends on {new.name}")
        results = [r for r in results_of(self.before)[: self.early] if isinstance(r, fx.Node)]
        known = {n.name for n in computed_from(results)}
        for node in held:
            if is_tangent(node) and node.name not in known and nodes:
                self._blame(node, "a result of the forward depends on a tangent")


def check_variants(
    before: fx.Graph,
    after: fx.Graph,
    taken: Sequence[TakenVariant],
    *,
    num_forward_outputs: int,
) -> None:
    """Raise `VerificationFailed`, with the rule's name, unless ``after`` computes as ``before``."""
    _Comparison(before, after, taken, num_forward_outputs).check()
