"""Judging a joint graph with variants taken, with nothing taken from the rules that found them.

Two graphs are compared, before and after. A stand-in counts as the node that it stands for; all
else has to compute what it did before, each value from the same values by the same call (value
numbering). The second graph is right if

* both return the same, and every call that is not a function of its arguments runs as often;
* a stand-in has the sizes, strides, dtype and device of what it stands for;
* stand-ins are computed from values that the first graph has, and from constants;
* no result of the forward depends on a lossy stand-in, on one for the backward only, or on a
  tangent that it did not depend on before;
* each stand-in is near the old value on random numbers (see `spot_checks`).

By induction along the second graph, whatever a stand-in reads is then what it was.
Rules are known here by their names only, for what they promise (`CONTRACTS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat.compat.joint_graph import is_tangent, must_be_in_forward
from fxremat.compat.sizes import size_bound
from fxremat.errors import VerificationFailed
from fxremat.verify.predicates import (
    is_fetch,
    is_function,
    is_mutating,
    is_put,
    is_view,
    root,
    with_nodes_as,
)
from fxremat.verify.site_cuts import SiteCut
from fxremat.verify.spot_checks import Unchecked, spot_check


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


@dataclass(frozen=True)
class NumbersTried:
    """What was found right: how many sites numbers were tried on, and what was not tried."""

    checked: int = 0
    small: int = 0
    """Of these, sites that are too large and were tried in smaller sizes."""
    unchecked: tuple[tuple[str, str], ...] = ()
    """(site, why no numbers were tried); the structure around it was judged all the same."""


@dataclass(frozen=True)
class Contract:
    """What the stand-ins of one rule promise: an error at most, in parts of the old value's norm.

    None: as much as rounding makes. An infinite error: right in the mean only, no number tells.
    """

    error: float | None = None


EXACT = Contract()
CONTRACTS: Mapping[str, Contract] = {
    "saved_8bit": Contract(0.1),
    "saved_4bit": Contract(0.5),
    "saved_fp8": Contract(0.2),
    "saved_bf16": Contract(0.05),
    "few_bit_activation": Contract(0.8),
    "random_matmul": Contract(float("inf")),
}
"""By the names of rules; one that is not here has to be exact."""


def _fail(taken: TakenVariant, what: str) -> None:
    advice = f"compile without the variant {taken.rule!r} (option variants), or with verify=False"
    raise VerificationFailed(f"variant {taken.rule}", f"at {taken.site}: {what}; {advice}")


@dataclass
class _Numbers:
    """Value numbers, common to both graphs; of a stand-in, that of the old node."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def read(
        self, graph: fx.Graph, meant: Mapping[fx.Node, int]
    ) -> tuple[dict[fx.Node, int], dict[str, int]]:
        """The number of every node; the calls that are no functions, by name."""
        of: dict[fx.Node, int] = {}
        once: dict[str, int] = {}
        written: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node in meant:
                of[node] = meant[node]
            elif node.op in ("placeholder", "get_attr"):
                of[node] = self.number((node.op, str(node.target)))
            elif is_fetch(node) or is_put(node):
                of[node] = of[node.all_input_nodes[0]]
            elif node.op == "call_function":
                key = (node.target, self.arguments(node, of, written))
                if not (is_view(node) or is_function(node)):
                    key = (*key, node.name)  # type: ignore[assignment]
                    once[node.name] = self.number(key)
                of[node] = self.number(key)
                if is_mutating(node) and isinstance(node.args[0], fx.Node):
                    written[root(node.args[0])] = of[node]
        return of, once

    @staticmethod
    def arguments(node: fx.Node, of: dict[fx.Node, int], written: dict[fx.Node, int]) -> Any:
        def read(source: fx.Node) -> Any:
            return "node", of[source], written.get(root(source))

        return with_nodes_as(node.args, read), with_nodes_as(node.kwargs, read)


def _results(graph: fx.Graph) -> list[Any]:
    (results,) = graph.output_node().args
    assert isinstance(results, (tuple, list))
    return list(results)


def _before(nodes: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and all that they are computed from, up to some."""
    found, ends, stack = set[fx.Node](), set(stop), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node in ends else node.all_input_nodes)
    return found


def _form(value: Any) -> Any:
    """Sizes, strides where they matter, dtype and device."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = [size_bound(n) for n in value.shape]
    strides = [size_bound(s) for s, n in zip(value.stride(), sizes, strict=True) if n > 1]
    return sizes, strides if 0 not in sizes else None, value.dtype, value.device


class _Judge:
    """Both graphs, and which nodes stand in for which."""

    def __init__(
        self, before: fx.Graph, after: fx.Graph, taken: Sequence[TakenVariant], early: int
    ) -> None:
        self.before, self.after, self.early = before, after, early
        self.old = {node.name: node for node in before.nodes}
        self.new = {node.name: node for node in after.nodes}
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

    def structure(self) -> None:
        """Everything that may be seen without numbers."""
        for new, old in self.stands_for.items():
            if _form(new.meta.get("val")) != _form(old.meta.get("val")):
                what = f"{new.name} and {old.name}, which it stands for, differ in size, stride, "
                _fail(self.of_site[new], f"{what}dtype or device")
        numbering = _Numbers()
        first, once_before = numbering.read(self.before, {})
        meant = {new: first[old] for new, old in self.stands_for.items()}
        second, once_after = numbering.read(self.after, meant)
        self._same(first, second)
        self._once(once_before, once_after)
        self._early()
        for new in self.stands_for:
            for source in _before([new], self._known()):
                inside = source.name not in self.old and source not in self.stands_for
                if source.op in ("placeholder", "get_attr") and inside:
                    _fail(self.of_site[new], f"{new.name} reads {source.name}, which is new")

    def _known(self) -> list[fx.Node]:
        return [n for n in self.after.nodes if n.name in self.old]

    def _same(self, first: dict[fx.Node, int], second: dict[fx.Node, int]) -> None:
        """The results, and whatever has a name of the graph before."""
        for node, number in second.items():
            if node.name in self.old and number != first[self.old[node.name]]:
                self._blame(node, f"{node.name} is computed from something else")
        old, new = _results(self.before), _results(self.after)
        if len(old) != len(new):
            raise VerificationFailed("variants", "the number of results is another")
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            one = first[a] if isinstance(a, fx.Node) else a
            other = second[b] if isinstance(b, fx.Node) else b
            if one != other:
                self._blame(self.after.output_node(), f"result {index} is computed differently")

    def _blame(self, node: fx.Node, what: str) -> None:
        """Name the site whose node is the nearest that was read."""
        for source in sorted(_before([node]), key=lambda n: n.name):
            if source in self.of_site and node in source.users:
                _fail(self.of_site[source], what)
        sites = {one.rule for one in self.of_site.values()}
        raise VerificationFailed(f"variants {', '.join(sorted(sites))}", what)

    def _once(self, first: Mapping[str, int], second: Mapping[str, int]) -> None:
        """Calls with an effect or random numbers; one may go if only what was replaced read it."""
        replaced = _before(self.stands_for.values())
        for name in sorted(second.keys() - first.keys()):
            self._blame(self.new[name], f"{name} is new, and is no function of its arguments")
        for name in sorted(first.keys() - second.keys()):
            node = self.old[name]
            if node not in replaced or is_mutating(node) or node.is_impure():
                raise VerificationFailed("variants", f"{name} does not run any more")

    def _early(self) -> None:
        """What the forward must not depend on."""
        nodes = [r for r in _results(self.after)[: self.early] if isinstance(r, fx.Node)]
        nodes += [n for n in self._known() if must_be_in_forward(n)]
        held = _before(nodes)
        for new, one in self.of_site.items():
            if (one.lossy or new.name in one.backward_only) and new in held:
                _fail(one, f"a result of the forward depends on {new.name}")
        results = [r for r in _results(self.before)[: self.early] if isinstance(r, fx.Node)]
        known = {n.name for n in _before(results)}
        for node in held:
            if is_tangent(node) and node.name not in known and nodes:
                self._blame(node, "a result of the forward depends on a tangent")

    def cuts(self) -> Iterator[tuple[TakenVariant, SiteCut]]:
        """Each site with the nodes that compute its stand-ins, and what these read."""
        sites: dict[TakenVariant, list[fx.Node]] = {}
        for new, one in self.of_site.items():
            sites.setdefault(one, []).append(new)
        order = {node: index for index, node in enumerate(self.after.nodes)}
        for one, stand_ins in sites.items():
            others = {n for n in self.stands_for if n not in stand_ins}
            ends = {n for n in order if n.name in self.old} | others
            inside = _before(stand_ins, ends)
            reads = {
                n: self.stands_for[n] if n in others else self.old[n.name] for n in inside & ends
            }
            nodes = sorted(inside - ends, key=order.__getitem__)
            yield (
                one,
                SiteCut(self.before, {n: self.stands_for[n] for n in stand_ins}, nodes, reads),
            )


def check_variants(
    before: fx.Graph,
    after: fx.Graph,
    taken: Sequence[TakenVariant],
    *,
    num_forward_outputs: int,
    numbers: bool = True,
) -> NumbersTried:
    """Raise `VerificationFailed`, with the rule's name, unless ``after`` computes as ``before``.

    ``numbers`` says whether stand-ins are tried on random numbers too.
    """
    judge = _Judge(before, after, taken, num_forward_outputs)
    judge.structure()
    checked, small, unchecked = 0, 0, []
    for one, cut in judge.cuts() if numbers else ():
        contract = CONTRACTS.get(one.rule, EXACT)
        if one.lossy and (contract.error is None or contract.error == float("inf")):
            unchecked.append((one.site, "its error has no bound"))
            continue
        try:
            verdict = spot_check(cut, contract.error)
        except Unchecked as reason:
            unchecked.append((one.site, str(reason)))
            continue
        checked, small = checked + 1, small + verdict.small
        if verdict.wrong:
            _fail(one, verdict.wrong)
    return NumbersTried(checked, small, tuple(unchecked))
