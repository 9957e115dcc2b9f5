"""What the graphs of one budget are given, what of them has run, and what has not run yet."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fxremat.compat.backward import given_before, saved_before, when_freed
from fxremat.core.step import ALL_RESULTS
from fxremat.errors import InfeasibleBudget
from fxremat.memory.storages import Storages, saved_storages, storages_of, without
from fxremat.step.graph import SharingGraph
from fxremat.step.promise import Promise, RunVersions, Tensors, alive

References = weakref.WeakValueDictionary[int, torch.Tensor]
"""Tensors by their identity, as long as they live."""


@dataclass(eq=False)
class Beside:
    """Bytes beside the graphs: the most ``seen``, of which so many ``counted`` are planned for."""

    seen: int = 0
    counted: int = 0

    def news(self) -> int:
        """Bytes that were seen and are not planned for yet; they count from now on."""
        more, self.counted = self.seen - self.counted, self.seen
        return more


@dataclass(eq=False)
class Checkpointed(Beside):
    """Forwards under `torch.utils.checkpoint`, which save nothing and run again in the backward.

    Until then, what they are given is held: by the ``nodes`` of those that have not gone backward.
    Of it, so many bytes were ``seen`` beside one of them.
    """

    nodes: dict[int, Storages] = field(default_factory=dict)

    def add(self, node: Any, given: Storages) -> None:
        """One more; all but its own inputs are held beside it when it runs again."""
        others = dict(item for each in self.nodes.values() for item in each.items())
        self.seen = max(self.seen, sum(without(others, given).values()))
        self.nodes[id(node)] = given
        leaves = partial(self.nodes.pop, id(node), None)
        weakref.finalize(node, leaves)
        when_freed(node, leaves)


@dataclass(frozen=True)
class WaitingRun:
    """A forward that has run, told by its node in the graph of autograd."""

    node: weakref.ref[Any]
    promise: Promise
    runs: RunVersions
    graph: SharingGraph | None
    frame: int
    place: int
    given: frozenset[int] = frozenset()
    """Addresses of the storages that it was given."""
    results: frozenset[int] = frozenset()
    made: tuple[weakref.ref[torch.Tensor], ...] = ()
    """The results themselves."""
    weights: Mapping[int, int] = field(default_factory=dict)
    """Bytes by address of the leaves among what it was given that need a gradient."""
    returned_bytes: int = 0
    """Of the results, unless they are given or saved, and of the gradients that these will have."""

    def saved(self) -> Storages:
        """The storages that it holds."""
        node = self.node()
        if node is None:
            return {}
        return saved_storages(node, self.promise.saved_bytes, self.promise.device)

    def kept_beside(self, given: Collection[int]) -> int:
        """Bytes of results that others have when a run begins that is ``given`` some of them."""
        if not self.results.intersection(given):
            return ALL_RESULTS
        alive = storages_of([one() for one in self.made], self.promise.device)
        return sum(
            size for key, size in alive.items() if key not in given and key not in self.given
        )

    def in_use(self, saved: Container[int]) -> bool:
        """Whether somebody has a result, at none of the addresses that are ``saved``."""
        results = storages_of([one() for one in self.made], self.promise.device)
        return any(key not in saved for key in results)


@dataclass(frozen=True)
class Recorded:
    """One half of a run, as it has run.

    Others hold so many ``kept_bytes`` of its results until its backward: all where the next graph
    is given none, for something that is not compiled is. So many ``held_bytes`` of them they hold
    beyond that, as whoever is given a loss, and maybe logits. It was given these ``weights``.
    """

    graph: weakref.ref[Any]
    place: int
    phase: Literal["forward", "backward"]
    kept_bytes: int = 0
    held_bytes: int = 0
    weights: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Given:
    """The ``parameters`` that graphs were given, and of the ``batch`` what no graph has made.

    ``modules`` were found compiled for the budget when the first graph was. Of their parameters,
    those ``expected`` have not been given to any graph. Where modules that are alike were taken to
    run in turn, for all at once were ``refused``, that is raised if several wait. Frames of which
    several runs have waited are ``together``. What ``eager`` code before a graph saves for its
    backward lies beside all of them. What is ``read_behind`` them, as by a loss, is in no plan if
    no graph is given it.
    """

    parameters: References = field(default_factory=References)
    batch: References = field(default_factory=References)
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    expected: References = field(default_factory=References)
    checkpointed: Checkpointed = field(default_factory=Checkpointed)
    eager: Beside = field(default_factory=Beside)
    read_behind: References = field(default_factory=References)
    refused: InfeasibleBudget | None = None
    together: set[int] = field(default_factory=set)

    def expect(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """These modules are compiled for the budget, and will be trained."""
        self.modules = weakref.WeakSet(modules)
        weights = [one for module in self.modules for one in module.parameters()]
        weights = [one for one in weights if one.device == device]
        self.expected = References({id(one): one for one in weights})

    def know(self, weights: Iterable[nn.Parameter]) -> None:
        """These are there, whether or not they will be trained."""
        self.parameters.update((id(one), one) for one in weights)

    def note(self, given: Iterable[object]) -> None:
        """A graph is given these arguments."""
        for one in given:
            if isinstance(one, torch.Tensor) and one.is_leaf:
                self.expected.pop(id(one), None)
                known = self.parameters if isinstance(one, nn.Parameter) else self.batch
                known[id(one)] = one

    def see_eager(
        self,
        given: Sequence[object],
        around: Tensors,
        runs: Iterable[WaitingRun],
        device: torch.device,
    ) -> None:
        """See what eager code has saved that made what a graph is ``given``.

        What lies ``around`` the graph is counted elsewhere, and so is what ``runs`` that wait were
        given, have returned, and have saved: whatever that is for the versions that they have now.
        """
        runs = list(runs)
        saved = storages_of(saved_before(given, [run.node() for run in runs]), device)
        known = set(storages_of([*given, *alive(around), *self.weights()], device))
        for run in runs:
            known |= run.given | run.results
        held = sum(size for key, size in saved.items() if key not in known)
        self.eager.seen = max(self.eager.seen, held)

    def see_behind(self, outputs: Iterable[object]) -> None:
        """A backward starts at these outputs: see what they were made of."""
        self.read_behind.update((id(one), one) for one in given_before(outputs))

    def weights(self) -> list[torch.Tensor]:
        """All parameters that live."""
        return list(self.parameters.values())

    def coming_bytes(self, own: Storages, device: torch.device) -> int:
        """Of the gradients that those expected will have, unless they are a graph's ``own``."""
        weights = [x for x in self.expected.values() if x.requires_grad and x.grad is None]
        return sum(without(storages_of(weights, device), own).values())
