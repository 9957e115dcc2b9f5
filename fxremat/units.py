"""Graphs of which several runs wait for their backward at once: one plan for all of these runs.

A block that is compiled by itself is one graph that runs once for each block, and a pipeline's
stage once for each micro-batch. What each run saves counts as often as it waits. So the graph is
traced first, and the versions that it may take are offered (`fxremat.compiling.units`); which run
takes which is chosen for all of them together (`fxremat.planner.units`). Each version is then
compiled as any graph is, within the bytes that the others leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from fxremat import compat
from fxremat.compiling.request import Request
from fxremat.compiling.units import Boundary, Offer, Unit, repeated
from fxremat.core.units import UnitStep, Version
from fxremat.errors import InfeasibleBudget
from fxremat.options import Options
from fxremat.planner import units as planner
from fxremat.report.report import Report
from fxremat.runtime.host_memory import is_on
from fxremat.runtime.in_flight import Around, Promise, Promised, Runs
from fxremat.sizes import format_bytes

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
TRIES = 6
"""Times the choice is made anew, after versions that took more than was offered."""


@dataclass(frozen=True)
class Surroundings:
    """Where a graph is compiled: how often it will run, and what lies around it.

    ``others`` are the parameters and buffers of the model that are not the unit's own, which take
    ``nbytes``; ``everything`` are its own too.
    """

    runs: int = 1
    nbytes: int = 0
    others: Around = ()
    everything: Around = ()


def surroundings(options: Options, device: torch.device) -> Surroundings:
    """Of the graph that Dynamo compiles now, by the modules whose forward is running.

    Its unit is the innermost of them, and the model the outermost. As many runs wait at once as
    there are modules of the unit's class that are compiled by themselves.
    """
    modules = compat.calling_modules()
    if not modules:
        return Surroundings(options.instances or 1)
    model, unit = modules[0], modules[-1]
    alike = [one for one in compat.compiled_parts(model) if type(one) is type(unit)]
    own = {id(x) for x in _tensors_of(unit)}
    others = [x for x in _tensors_of(model) if id(x) not in own and is_on(x, device)]
    storages = {compat.storage_key(x): x.untyped_storage().nbytes() for x in others}
    runs = options.instances or max(1, len(alike))
    return Surroundings(
        runs, sum(storages.values()), tuple(map(ref, others)), tuple(map(ref, _tensors_of(model)))
    )


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@dataclass(frozen=True)
class CompiledVersion:
    """A graph as it was compiled for one request; without a report if it has no backward."""

    call: Compiled
    report: Report | None
    pooled: bool = False
    """Whether it allocates in pools of its own, so that no segment is taken for it."""


@dataclass
class RunsOfOneGraph:
    """One graph, asked to run so many times at once.

    ``compile`` and ``plan`` are given a request: the latter generates no kernels, and both raise
    `InfeasibleBudget`. ``look`` traces the graph as a unit. ``unseen_bytes`` of what is held are no
    saved tensors.
    """

    request: Request
    device: torch.device
    around: Surroundings
    unseen_bytes: int
    compile: Callable[[Request], CompiledVersion]
    plan: Callable[[Request], Report]
    look: Callable[[Request, int], Unit]
    known: dict[Request, CompiledVersion] = field(default_factory=dict)
    looked: dict[int, Unit] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        """What the runs may take together, with all that lives outside."""
        assert self.request.budget_bytes is not None
        return self.request.budget_bytes - self.request.tuning_bytes

    def unit(self, count: int) -> Unit:
        """The graph as a unit of which so many runs wait at once."""
        if count not in self.looked:
            self.looked[count] = self.look(self.request, count)
        return self.looked[count]

    def compiled_for(self, count: int) -> Runs:
        """The versions for so many runs; raises `InfeasibleBudget` with the least for as many."""
        offers = list(self.unit(count).offers)
        for _ in range(TRIES):
            step = self._step(offers, count)
            chosen = planner.fastest(step, self.budget_bytes)
            if chosen is None:
                break
            try:
                made = {
                    place: self._compiled(offers, place, count) for place in sorted(set(chosen))
                }
            except InfeasibleBudget:
                continue
            step = self._step(offers, count)
            peak = step.peak_bytes(chosen)
            if peak <= self.budget_bytes:
                log.info("%s", _told(step, chosen, peak, self.budget_bytes))
                places = list(made)
                of_run = tuple(places.index(place) for place in chosen)
                return Runs(tuple(made.values()), of_run, peak - self.request.held_bytes)
        raise self._refusal(offers, count)

    def _step(self, offers: Sequence[Offer], count: int) -> UnitStep:
        unit = replace(self.unit(count), offers=tuple(offers))
        own = unit.boundary
        return repeated(unit, count, self.request.held_bytes + own.resident - own.given)

    def _compiled(self, offers: list[Offer], place: int, count: int) -> Promised:
        """A version, compiled; what it really takes is offered from now on.

        Raises `InfeasibleBudget` where that is more than was asked for.
        """
        request = offers[place].asked(self.request)
        if request not in self.known:
            try:
                self.known[request] = self.compile(request)
            except InfeasibleBudget as refused:
                offers[place] = _raised(offers[place], refused)
                raise
        made = self.known[request]
        offers[place] = replace(offers[place], version=_version(made.report))
        return self.promised(made, request, self.unit(count).boundary)

    def promised(
        self, version: CompiledVersion, request: Request, own: Boundary | None = None
    ) -> Promised:
        """A version with what was promised of it.

        Of several runs, each of them with its ``own`` inputs, the parameters count as part of what
        lies around.
        """
        report, unseen, around = version.report, self.unseen_bytes, self.around.others
        assert report is not None
        assert request.budget_bytes is not None
        peak = report.counted_peak_bytes - report.held_bytes
        if own is not None:
            unit, around = _version(report), self.around.everything
            unseen += own.resident - own.given
            peak = max(unit.forward_bytes + own.given, unit.backward_bytes + own.incoming)
        promise = Promise(
            graph=f"graph {report.graph}",
            device=self.device,
            budget_bytes=request.budget_bytes,
            peak_bytes=peak,
            held_bytes=report.held_bytes,
            reserve_bytes=unseen,
            saved_bytes=report.saved_bytes,
            segment_bytes=0 if version.pooled else report.segment_bytes,
            around=around,
        )
        return Promised(version.call, promise)

    def _refusal(self, offers: list[Offer], count: int) -> InfeasibleBudget:
        """The error that names the least, by versions that have been rehearsed."""
        assert self.request.budget_bytes is not None
        for _ in range(TRIES):
            step = self._step(offers, count)
            chosen = planner.lowest(step)
            least = step.peak_bytes(chosen)
            for place in sorted(set(chosen)):
                asked = replace(self.request, budget_bytes=least + self.request.tuning_bytes)
                try:
                    report = self.plan(offers[place].asked(asked))
                    offers[place] = replace(offers[place], version=_version(report))
                except InfeasibleBudget as refused:
                    offers[place] = _raised(offers[place], refused)
            if self._step(offers, count).peak_bytes(chosen) <= least:
                break
        return InfeasibleBudget(self.request.budget_bytes, least + self.request.tuning_bytes)


def _version(report: Report | None) -> Version:
    assert report is not None
    assert report.as_unit is not None
    return report.as_unit


def _raised(one: Offer, refused: InfeasibleBudget) -> Offer:
    """The offer with the bytes that it really takes, which are more than was thought."""
    assert refused.minimum_bytes is not None
    more = refused.minimum_bytes - refused.budget_bytes
    version = replace(
        one.version,
        saved_bytes=one.version.saved_bytes + more,
        forward_bytes=one.version.forward_bytes + more,
        backward_bytes=one.version.backward_bytes + more,
    )
    return replace(one, version=version, peak_bytes=one.peak_bytes + more)


def _told(step: UnitStep, of_run: Sequence[int], peak_bytes: int, budget_bytes: int) -> str:
    """One line for the log."""
    each = ", ".join(
        f"{of_run.count(k)} save {format_bytes(step.versions[0][k].saved_bytes)}"
        for k in sorted(set(of_run))
    )
    return (
        f"fxremat: {len(of_run)} runs wait at once: {each}; peak {format_bytes(peak_bytes)} of "
        f"{format_bytes(budget_bytes)}"
    )
