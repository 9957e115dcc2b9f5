"""What the graphs of one budget are given, and what is compiled for it and has not run yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.compat.backward import given_before, saved_before, when_freed
from fxremat.errors import InfeasibleBudget
from fxremat.memory.storages import Storages, storages_of, with_gradients
from fxremat.step.graph import Tensors, WaitingRun

References = dict[int, weakref.ref[torch.Tensor]]
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
        others: Storages = {}
        for each in self.nodes.values():
            others |= each
        held = sum(size for storage, size in others.items() if storage not in given)
        self.seen = max(self.seen, held)
        self.nodes[id(node)] = given
        leaves = partial(self.nodes.pop, id(node), None)
        weakref.finalize(node, leaves)
        when_freed(node, leaves)


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

    parameters: References = field(default_factory=dict)
    batch: References = field(default_factory=dict)
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    expected: References = field(default_factory=dict)
    checkpointed: Checkpointed = field(default_factory=Checkpointed)
    eager: Beside = field(default_factory=Beside)
    read_behind: References = field(default_factory=dict)
    refused: InfeasibleBudget | None = None
    together: set[int] = field(default_factory=set)

    def expect(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """These modules are compiled for the budget, and will be trained."""
        self.modules = weakref.WeakSet(modules)
        weights = [one for module in self.modules for one in module.parameters()]
        weights = [one for one in weights if one.device == device]
        self.note(weights)
        self.expected = {id(one): self.parameters[id(one)] for one in weights}

    def note(self, given: Iterable[object]) -> None:
        """A graph is given these arguments."""
        for one in given:
            if isinstance(one, torch.Tensor) and one.is_leaf:
                self.expected.pop(id(one), None)
                known = self.parameters if isinstance(one, nn.Parameter) else self.batch
                if id(one) not in known:
                    known[id(one)] = weakref.ref(one, partial(_forget, known, id(one)))

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
        lasting = pytree.tree_leaves([each() for each in around])
        known = set(storages_of([*given, *lasting, *self.weights()], device))
        for run in runs:
            known |= run.given | run.results
        held = sum(size for key, size in saved.items() if key not in known)
        self.eager.seen = max(self.eager.seen, held)

    def see_behind(self, outputs: Iterable[object]) -> None:
        """A backward starts at these outputs: see what they were made of."""
        for one in given_before(outputs):
            known = self.read_behind
            known[id(one)] = weakref.ref(one, partial(_forget, known, id(one)))

    def weights(self) -> list[torch.Tensor]:
        """All parameters that live."""
        return _alive(self.parameters.values())

    def batches(self) -> list[torch.Tensor]:
        """All else that lives of what graphs were given."""
        return _alive(self.batch.values())

    def behind(self) -> list[torch.Tensor]:
        """All that lives of what code behind the graphs has read."""
        return _alive(self.read_behind.values())

    def resident(self, device: torch.device) -> Storages:
        """The parameters, and the gradients that they have."""
        return with_gradients(self.weights(), device)

    def coming_bytes(self, own: Storages, device: torch.device) -> int:
        """Of the gradients that those expected will have, unless they are a graph's ``own``."""
        weights = [x for x in _alive(self.expected.values()) if x.requires_grad and x.grad is None]
        coming = storages_of(weights, device)
        return sum(size for key, size in coming.items() if key not in own)


def _forget(known: dict[int, Any], identity: int, _: object) -> None:
    known.pop(identity, None)


def _alive(tensors: Iterable[Callable[[], torch.Tensor | None]]) -> list[torch.Tensor]:
    return [one for each in tensors if (one := each()) is not None]
