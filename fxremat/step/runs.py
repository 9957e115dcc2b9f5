"""Graphs of which several runs wait for their backward at once: one plan for all of these runs.

A block that is compiled by itself is one graph that runs once for each block, and a pipeline's
stage once for each micro-batch. What each run saves counts as often as it waits. So the graph is
traced first, and the versions that it may take are offered (`fxremat.step.versions`); which run
takes which is chosen for all of them together (`fxremat.planner.units`). Each version is then
compiled as any graph is, within the bytes that the others leave. Where the budget counts reserved
bytes, the events of the step they make are replayed in the model of torch's allocator, and the
choice is made anew where that takes too much.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.compat.call_stack import calling_modules
from fxremat.compat.distributed.ranks import Shards, shards_of
from fxremat.compat.dynamo import compiled_parts
from fxremat.compat.tensors import is_dtensor
from fxremat.compile.request import Request
from fxremat.core.events import Outside
from fxremat.core.places import Places
from fxremat.core.step import Boundary, Moment, UnitStep, Version
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.memory.reserved_bytes import LARGER, Reserved, least_reserved, reserved_with_rest
from fxremat.memory.segments import SMALL_BYTES
from fxremat.options import Options
from fxremat.passes.memory_estimation import nbytes
from fxremat.planner import units as planner
from fxremat.report.report import Report
from fxremat.sizes import format_bytes
from fxremat.step.events import StepEvents, composed, repeated_outside
from fxremat.step.in_flight import Around, Promise, Promised, Runs, storage_bytes
from fxremat.step.pipelines import Pipeline, pipeline_of
from fxremat.step.versions import NOTHING_GATHERED, Gathered, Offer, Unit, followed_by, repeated

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
TRIES = 6
"""Times the choice is made anew, after versions that took more than was offered."""
RESERVED_TRIES = 16
"""The same where the budget counts reserved bytes: a step may leave more unused than thought."""
UNUSED_PART = 0.03
"""Of a budget in reserved bytes that several runs share: what may stay unused between blocks.

Only as long as the events of the step are not known: some of its units are not compiled yet, or
their code cannot be rehearsed.
"""


@dataclass(frozen=True)
class Surroundings:
    """Where a graph is compiled: how often it will run, and what lies around it.

    ``others`` are the parameters and buffers of the model that are not the unit's own, and what the
    model is given. They take ``nbytes``; ``everything`` are its own too, and buffers of a pipeline.
    ``left_bytes`` are the gradients of one run that stay, None: as many as its graph gives. Where a
    schedule runs it, the ``pipeline`` says what the rank does in a step. Of ``nbytes``,
    ``late_bytes`` may be there for a moment, and are not compared with what is seen at run time.
    Besides there is what is ``gathered``.
    """

    runs: int = 1
    nbytes: int = 0
    others: Around = ()
    everything: Around = ()
    left_bytes: int | None = None
    pipeline: Pipeline | None = None
    late_bytes: int = 0
    gathered: Gathered = NOTHING_GATHERED


def surroundings(options: Options, device: torch.device) -> Surroundings:
    """Of the graph that Dynamo compiles now, by the modules whose forward is running.

    Its unit is the innermost of them, and the model the outermost. As many runs wait at once as
    there are modules like the unit that are compiled by themselves. Where Dynamo could not go on
    into the unit, and so compiles it by itself, these are all modules like it.
    """
    calls = calling_modules()
    if not calls:
        return Surroundings(options.instances or 1)
    model, unit = next(iter(calls)), next(reversed(calls))

    def alike(module: nn.Module) -> int:
        """How many modules inside are compiled by themselves, and like the unit."""
        parts = compiled_parts(module)
        parts = parts if unit in compiled_parts(model) else list(module.modules())
        return sum(_form(one) == _form(unit) for one in parts)

    pipeline = pipeline_of(unit, device, alike) if options.instances is None else None
    modules = (model,) if pipeline is None else pipeline.modules
    everything = [x for module in modules for x in _tensors_of(module)]
    own = {id(x) for x in _tensors_of(unit)}
    others = [x for x in everything if id(x) not in own]
    runs = options.instances or max(1, alike(model))
    if pipeline is not None:
        runs = max(1, pipeline.runs)
        others += pipeline.batch
    elif runs > 1:  # else the graph itself is given what the model is
        own |= {id(x) for x in pytree.tree_leaves(calls[unit]) if not _needs_gradient(x)}
        given = pytree.tree_leaves(calls[model])
        others += [x for x in given if isinstance(x, torch.Tensor)]
    beside = _sharded_bytes(model, unit, device, runs) or _bucket_bytes(calls, device)
    beside = _Beside(0, None) if beside is None else beside
    around: Around = tuple(ref(x) for x in {id(x): x for x in (*everything, *others)}.values())
    if pipeline is not None:
        around += (pipeline.buffers,)
    gathered = beside.gathered
    if pipeline is not None and _is_sharded(model) and gathered.ahead:
        most, gives_back = max(gathered.ahead, gathered.sent), gathered.kept < gathered.ahead
        pipeline = replace(pipeline, gathered_bytes=most, gives_back=gives_back)
        beside = replace(beside, left=None)
    late = _late_bytes(unit, calls[unit], device, max(gathered.ahead, gathered.sent))
    total = storage_bytes([x for x in others if id(x) not in own], device)
    total += beside.held + late
    if pipeline is not None and pipeline.gathered_bytes:
        gathered = NOTHING_GATHERED
    elif pipeline is not None or runs == 1:  # then it is not known when they are there
        total += gathered.ahead + gathered.sent + (runs - 1) * gathered.kept
        gathered = NOTHING_GATHERED
    if options.reserve is not None or device.type == "cuda":  # as all around, counted elsewhere
        gathered = NOTHING_GATHERED
    total += 0 if pipeline is None else pipeline.buffer_bytes
    return Surroundings(
        runs,
        total,
        tuple(map(ref, others)),
        around,
        beside.left,
        pipeline,
        late,
        gathered,
    )


@dataclass(frozen=True)
class _Beside:
    """What wrappers hold beside a unit, in bytes.

    ``held`` are there all the time, ``left`` stay of a run's gradients, None: all.
    """

    held: int
    left: int | None
    gathered: Gathered = NOTHING_GATHERED


def _sharded_bytes(
    model: nn.Module, unit: nn.Module, device: torch.device, alike: int
) -> _Beside | None:
    """What FSDP2 holds beside a unit; None where it shards nothing. ``alike`` units are like it.

    The graph is given the gathered parameters. Beside them are its own parts of these. In the
    backward the next unit is gathered ahead, and the gradients of the last one are on their way: of
    the last unit nothing is on its way, and nothing is gathered beside the first. Modules around
    the unit have gathered the parameters that they shard themselves, and keep the whole gradients
    of these to their own end. Of modules inside of the unit one after the other is gathered.
    """
    if not _is_sharded(unit):
        return None
    from torch.distributed.fsdp import FSDPModule

    shards = [one for one in model.modules() if isinstance(one, FSDPModule)]
    around = [one for one in shards if one is not unit and unit in set(one.modules())]
    inside = [one for one in unit.modules() if isinstance(one, FSDPModule)]
    own = sum(map(shards_of, inside), Shards())
    inner = {id(x) for one in shards if one not in around for x in one.parameters()}
    outer = {id(x): x for one in around for x in one.parameters() if id(x) not in inner}
    held = own.part - storage_bytes(outer.values(), device)
    for outside in map(shards_of, around):
        held += outside.part + outside.gathered + outside.sent
    mine = shards_of(unit)
    nested = [shards_of(one) for one in inside if one is not unit]
    ahead = mine.gathered + max((one.gathered for one in nested), default=0)
    sent = mine.sent + max((one.sent for one in nested), default=0)
    others = (one for one in shards if one is not unit and one not in around)
    if len(shards) - len(around) > alike * len(inside):  # its neighbours are of another kind
        held += ahead + sent + sum(shards_of(one).kept for one in others)
        return _Beside(held, own.part)
    held += own.kept - mine.kept
    return _Beside(held, own.part, Gathered(ahead, sent, mine.kept))


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _bucket_bytes(calls: Iterable[nn.Module], device: torch.device) -> _Beside | None:
    """What DDP's buckets take, and what stays of a unit's gradients beside them.

    A bucket holds a gradient as long as DDP lives, and the parameter has it once more unless its
    ``grad`` is a view of that. None outside of DDP.
    """
    if not torch.distributed.is_available():
        return None
    parallel = nn.parallel.DistributedDataParallel
    for module in calls:
        if isinstance(module, parallel):
            buckets = sum(x.nbytes for x in module.parameters() if x.requires_grad)
            return _Beside(buckets, 0 if module.gradient_as_bucket_view else None)
    return None


LATE_RESULTS = 2
"""Of collectives on the CPU: so many were seen to live on after the last who knows them."""


def _late_bytes(
    unit: nn.Module, given: Iterable[Any], device: torch.device, gathered_bytes: int
) -> int:
    """What gloo's threads hold of results that nobody else holds any more.

    They let go of a result a moment after whoever waits for it has it. Where parameters are
    DTensors, results are taken to be as large as the largest tensor that the unit is given; where
    they are gathered, so are these.
    """
    if device.type != "cpu":
        return 0
    largest = 0
    if any(is_dtensor(x) for x in unit.parameters()):
        tensors = [x for x in pytree.tree_leaves(list(given)) if isinstance(x, torch.Tensor)]
        largest = max((x.nbytes for x in tensors), default=0)
    return LATE_RESULTS * (largest + gathered_bytes)


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _form(module: nn.Module) -> Any:
    """What is the same for modules that make the same graph."""
    return type(module), [tuple(x.shape) for x in _tensors_of(module)]


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class NoBackward(Exception):
    """A graph that was asked for its versions has no backward, so that no run of it waits."""


@dataclass(frozen=True)
class CompiledVersion:
    """A graph as it was compiled for one request; without a report if it has no backward."""

    call: Compiled
    report: Report | None
    pooled: bool = False
    """Whether it allocates in pools of its own, so that no segment is taken for it."""


@dataclass
class SeenStep:
    """A step that was looked at before it is compiled (`fxremat.step.preparation`).

    A run of a unit is told by its place: the lowest that no other run of the unit had when it came.
    ``unit_of`` and ``place_of`` are those of each run. ``units`` offer fewer versions once they are
    compiled. The ``request`` is one of a unit: what is the same for all of them. ``outside`` is
    what is asked of the allocator outside of the units, on CUDA. Where the step was not looked at,
    ``held_bytes`` are there all the time, and of gradients ``left_bytes`` stay (None: all). Where
    unit 1 stands for blocks that follow unit 0, ``followed_bytes`` are what these are given.
    """

    moments: tuple[Moment, ...]
    unit_of: tuple[int, ...]
    place_of: tuple[int, ...]
    units: list[Unit]
    request: Request | None = None
    outside: tuple[Outside, ...] | None = None
    held_bytes: int = 0
    left_bytes: int | None = None
    followed_bytes: int | None = None
    fixed: dict[int, int] = field(default_factory=dict)
    """The versions of runs whose unit is compiled, by their places."""

    def events(self, chosen: Sequence[int]) -> StepEvents | None:
        """What the step asks of the allocator; None where a version is not known so well.

        ``chosen`` is the version of each run that is not compiled yet.
        """
        places = {**dict(enumerate(chosen)), **self.fixed}
        found = [self.units[unit].offers[places[k]].events for k, unit in enumerate(self.unit_of)]
        runs = [one for one in found if one is not None]
        if not runs or len(runs) < len(found):
            return None
        outside: Iterable[Outside] | None = self.outside
        if outside is None:
            outside = repeated_outside(len(runs), runs[0], self.held_bytes, self.left_bytes)
        return composed(outside, runs.__getitem__)

    def offer(self, index: int, offers: Iterable[Offer]) -> None:
        """From now on the unit offers these versions."""
        self.units[index] = replace(self.units[index], offers=tuple(offers))
        if self.followed_bytes is not None:
            self.units[1] = followed_by(self.units[0], self.followed_bytes)

    def step(self) -> UnitStep:
        """Its moments, and what the units offer now."""
        versions = (tuple(offer.version for offer in unit.offers) for unit in self.units)
        return UnitStep(self.moments, self.unit_of, tuple(versions))

    def outside_bytes(self, unit: int) -> int:
        """Live outside when the last run of a unit goes backward, beside the gradients it gets."""
        last = self.runs_of(unit)[-1]
        outside = [
            moment.outside_bytes
            for moment in self.moments
            if (moment.running, moment.phase) == (last, "backward")
        ]
        return max(0, max(outside, default=0) - self.units[unit].boundary.incoming)

    def runs_of(self, unit: int) -> tuple[int, ...]:
        """The runs of a unit, by their places."""
        runs = [run for run, own in enumerate(self.unit_of) if own == unit]
        return tuple(sorted(runs, key=self.place_of.__getitem__))


def fixed_inputs(inputs: Iterable[Any]) -> tuple[int, ...]:
    """Bytes of each input of a graph that could have a gradient, and needs none."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)]
    return tuple(nbytes(x) for x in tensors if x.is_floating_point() and not x.requires_grad)


def unplanned_bytes(request: Request) -> int:
    """Of a budget, what no version is planned to take: for tuning, and what may stay unused.

    How blocks of several graphs come to lie is not known before the events of the step are.
    """
    assert request.budget_bytes is not None
    unused = UNUSED_PART * request.budget_bytes if request.count == "reserved" else 0
    return request.tuning_bytes + int(unused)


def budget_for(nbytes: int, request: Request) -> int:
    """The least that leaves so many bytes for all versions together."""
    part = UNUSED_PART if request.count == "reserved" else 0.0
    return math.ceil((nbytes + request.tuning_bytes) / (1 - part))


def repeated_step(
    unit: Unit,
    count: int,
    held_bytes: int,
    left_bytes: int | None = None,
    gathered: Gathered = NOTHING_GATHERED,
    others: Sequence[Unit] = (),
    unit_of: Sequence[int] | None = None,
    *,
    either_order: bool = False,
) -> SeenStep:
    """A step in which so many runs of one unit wait at once, and nothing else is known.

    Where ``unit_of`` is given, it says of which unit each run is: of this one, 0, or of one of the
    ``others``. Of the gradients of a run ``left_bytes`` stay; None: all that are no inputs' of its
    own.
    """
    if left_bytes is not None:
        left = min(unit.boundary.left, left_bytes)
        unit = replace(unit, boundary=replace(unit.boundary, left=left))
    own = unit.boundary
    outside = held_bytes + own.resident - own.given
    units = [unit, *others]
    unit_of = (0,) * count if unit_of is None else unit_of
    step = repeated(units, unit_of, outside, gathered, either_order=either_order)
    return SeenStep(
        step.moments,
        step.unit_of,
        tuple(range(count)),
        units,
        held_bytes=held_bytes + gathered.ahead + gathered.sent + count * gathered.kept,
        left_bytes=left_bytes,
    )


@dataclass
class RunsOfOneGraph:
    """One graph, asked to run so many times at once.

    ``compile`` and ``plan`` are given a request: the latter generates no kernels, and both raise
    `InfeasibleBudget`. ``look`` traces the graph as a unit, and raises `NoBackward`.
    ``unseen_bytes`` of what is held are no saved tensors, and ``coming_bytes`` are said to come
    beside the graph. ``seen`` is the step that was looked at, in which the graph is the unit of
    this ``index``; or another graph of the same module is, if it is not there ``as_seen``. Where it
    was not looked at, the ``first`` runs are those of other graphs, which wait already, with what
    each of these takes at each place; else of the
    inputs that need no gradient, and are no parameters, ``fixed_inputs`` are the bytes: where one
    is as large as the results, the blocks that follow are given what needs one.
    """

    request: Request
    device: torch.device
    around: Surroundings
    unseen_bytes: int
    compile: Callable[[Request], CompiledVersion]
    plan: Callable[[Request], Report]
    look: Callable[[Request, int], Unit]
    seen: SeenStep | None = None
    index: int = 0
    as_seen: bool = True
    coming_bytes: int = 0
    first: tuple[tuple[Unit, ...], ...] = ()
    fixed_inputs: tuple[int, ...] = ()
    known: dict[Request, CompiledVersion] = field(default_factory=dict)
    count: int = 0
    """Of the runs that were planned for last."""
    between_bytes: int = 0
    """That others need while all runs wait."""
    saved_bytes: int = 0
    """By all runs, as they were chosen."""
    offered: UnitStep | None = None
    """What they could choose from."""
    is_asked: bool = False
    """Whether others need more since."""
    places: Places = field(default_factory=Places)

    @property
    def budget_bytes(self) -> int:
        """What the runs may take together, with all that lives outside."""
        assert self.request.budget_bytes is not None
        return self.request.budget_bytes - unplanned_bytes(self.request)

    def compiled_for(self, count: int) -> Runs:
        """The versions for so many runs; raises `InfeasibleBudget` with the least for as many."""
        seen = self.seen
        if seen is None or count != len(seen.runs_of(self.index)):
            unit = self.look(self.request, count)
            self.seen, self.index = None, 0  # the step is not as it was seen
            seen = self._step_of(unit, count)
        elif not self.as_seen:
            beside = replace(self.request, held_bytes=self.coming_bytes)
            seen.units[self.index], self.as_seen = self.look(beside, count), True
        self.count, self.offered, self.is_asked = count, seen.step(), False
        seen.moments = _with_between(self.offered, self.between_bytes).moments
        unit = seen.units[self.index]
        offers, aim = list(unit.offers), self._first_aim(seen)
        failed: set[planner.Chosen] = set()
        ways = tuple(self._lowest_ways())
        for _ in range(TRIES if self.request.count == "allocated" else RESERVED_TRIES):
            seen.offer(self.index, offers)
            chosen = planner.fastest(seen.step(), aim)
            if chosen is None and failed:
                step = seen.step()
                chosen = next((one for way in ways if (one := way(step)) not in failed), None)
            if chosen is None:
                break
            mine = [chosen[run] for run in seen.runs_of(self.index)]
            try:
                made = {k: self._compiled(offers, k, unit.boundary) for k in sorted(set(mine))}
            except InfeasibleBudget as refused:
                forget_frames(refused)
                continue
            seen.offer(self.index, offers)
            if self.seen is None:
                mine, chosen = self._saving_most_first(seen, chosen)
            peak, taken = seen.step().peak_bytes(chosen), self._reserved(seen, chosen)
            if taken is None:
                aim = min(aim, self.budget_bytes)
                if peak <= self.budget_bytes:
                    return self._settled(seen, offers, made, mine, peak, None)
                continue
            over = taken.usage.peak_reserved_bytes - self._most_bytes
            if over <= 0:
                return self._settled(seen, offers, made, mine, peak, taken)
            failed.add(chosen)
            aim = min(aim, peak) - over
        raise self._refusal(seen, offers)

    @property
    def outside_bytes(self) -> int:
        """What lives around the unit, without what its own graph is given."""
        return self.around.nbytes

    @property
    def all_wait(self) -> bool:
        """Whether as many runs wait now as were planned for."""
        return 0 < self.count <= len(self.places.taken)

    @property
    def waiting_bytes(self) -> int:
        """What all runs have saved, and what their own parameters take."""
        return self.saved_bytes

    def least_bytes(self, needed: int) -> int:
        """The least budget, by what was offered, where others need so many bytes while all wait.

        What the runs hold then is among these bytes.
        """
        assert self.offered is not None
        step = _with_between(self.offered, self._between(needed))
        return budget_for(step.peak_bytes(planner.lowest(step)), self.request)

    def leave(self, needed: int) -> None:
        """Have the runs hold less while all wait, once they are `compiled_for` anew."""
        self.between_bytes, self.is_asked = self._between(needed), True

    def _between(self, needed: int) -> int:
        """Of the bytes that others need, those that are neither the runs' nor around them."""
        beside = self.request.tuning_bytes + self.request.held_bytes + self.saved_bytes
        return max(self.between_bytes, needed - beside)

    def _lowest_ways(self) -> Iterator[Callable[[UnitStep], planner.Chosen]]:
        """How to choose versions that take little.

        Where what is outside makes the peak, any versions have it that are low enough beside it.
        More may then stay unused between what they save: so they are also chosen by themselves.
        """
        yield planner.lowest
        if self.request.count == "reserved":
            yield lambda step: planner.lowest(_by_itself(step))

    @property
    def _most_bytes(self) -> int:
        """What may be reserved, where that is known."""
        assert self.request.budget_bytes is not None
        return self.request.budget_bytes - self.request.tuning_bytes

    def _first_aim(self, seen: SeenStep) -> int:
        """All that may be taken, if what stays unused will be known; else some of it is left."""
        others = [unit for k, unit in enumerate(seen.units) if k != self.index]
        known = all(offer.events is not None for unit in others for offer in unit.offers)
        recorded = seen.outside is not None or self.seen is None
        return self._most_bytes if known and recorded else self.budget_bytes

    def _reserved(self, seen: SeenStep, chosen: Sequence[int]) -> Reserved | None:
        """What the allocator takes for the whole step; None where that is not known.

        Of several units each first runs before the next is compiled. So all that the budget leaves
        is one segment before anybody knows which size is best, and that is what is modelled.
        """
        settings = self.request.allocator
        if self.request.count != "reserved" or settings is None:
            return None
        if self.seen is not None and seen.outside is None:
            return None
        if self.around.pipeline is not None:  # halves take turns there in another order
            return None
        found = seen.events(chosen)
        if found is None:
            return None
        if len(seen.units) > 1 and not settings.expandable_segments:
            limit = self._most_bytes - SMALL_BYTES
            return reserved_with_rest(found.events, settings, limit, found.before)
        sizes = () if settings.expandable_segments else LARGER
        return least_reserved(found.events, settings, 0, sizes, found.before)

    def _settled(
        self,
        seen: SeenStep,
        offers: Sequence[Offer],
        made: dict[int, Promised],
        mine: Sequence[int],
        peak: int,
        taken: Reserved | None,
    ) -> Runs:
        """The versions that were chosen; no other ones are offered from now on."""
        self.saved_bytes = _saved_bytes(seen, self.index, [offers[k] for k in mine])
        kept = tuple(offers[k] for k in made)
        of_run = tuple(list(made).index(k) for k in mine)
        seen.units[self.index] = replace(seen.units[self.index], offers=kept)
        runs = seen.runs_of(self.index)
        seen.fixed.update(zip(runs, of_run, strict=True))
        versions, limit = tuple(made.values()), self.budget_bytes
        if taken is not None:
            peak, limit = taken.usage.peak_reserved_bytes, self._most_bytes
            if len(seen.units) == 1:
                versions = tuple(_with_segment(one, taken.segment_bytes) for one in versions)
        counted = "allocated" if taken is None else "reserved"
        log.info("%s", _told(kept, of_run, peak, limit, counted))
        late = self.around.late_bytes if self.seen is None else 0
        least = min(of_run, key=lambda k: kept[k].version.saved_bytes)
        taken_by = dict(zip(runs, of_run, strict=True))  # others have the other places
        at_place = tuple(taken_by.get(place, least) for place in range(runs[-1] + 1))
        units: tuple[Unit, ...] = ()
        if self.seen is None:
            own = seen.units[self.index].boundary
            units = tuple(Unit(own, (kept[k],)) for k in at_place)
        return Runs(versions, at_place, peak - self.request.held_bytes, peak - late, units)

    def _saving_most_first(
        self, seen: SeenStep, chosen: tuple[int, ...]
    ) -> tuple[list[int], tuple[int, ...]]:
        """The versions of the runs by what they save, the most first, where the budget allows it.

        Blocks of one class are several graphs where their inputs differ: the first block's needs no
        gradient. These share the places, and each is planned as if it had all of them. So at each
        place they should save about as much.
        """
        step, runs = seen.step(), seen.runs_of(self.index)
        versions, mine = step.versions[self.index], [chosen[run] for run in runs]
        by_saved = sorted(mine, key=lambda k: versions[k].saved_bytes, reverse=True)
        sorted_so = list(chosen)
        for run, k in zip(runs, by_saved, strict=True):
            sorted_so[run] = k
        if step.peak_bytes(sorted_so) <= self.budget_bytes:
            return by_saved, tuple(sorted_so)
        return mine, chosen

    def _step_of(self, unit: Unit, count: int) -> SeenStep:
        """A step in which so many runs wait: the one of its pipeline, if that says as many."""
        pipeline, held, left = self.around.pipeline, self.request.held_bytes, self.around.left_bytes
        if pipeline is None or count != pipeline.runs:
            gathered = self.around.gathered
            if self.first:
                before = [units[place] for place, units in enumerate(self.first)]
                unit_of = *range(1, len(before) + 1), *[0] * (count - len(before))
                return repeated_step(unit, count, held, left, gathered, before, unit_of)
            given = unit.boundary.results
            if given in self.fixed_inputs and count > 1 and not self.known:
                others, unit_of = [followed_by(unit, given)], (0, *[1] * (count - 1))
                followed = repeated_step(unit, count, held, left, gathered, others, unit_of)
                followed.followed_bytes = given
                return followed
            # More wait than modules are alike: these are micro-batches, which may go either way.
            either = count > self.around.runs
            return repeated_step(unit, count, held, left, gathered, either_order=either)
        if left is not None:
            left = min(unit.boundary.left, left)
            unit = replace(unit, boundary=replace(unit.boundary, left=left))
        return self._step_of_pipeline(unit, pipeline)

    def _step_of_pipeline(self, unit: Unit, pipeline: Pipeline) -> SeenStep:
        """The step of its schedule; the first blocks of the first stage are another graph.

        Their input needs no gradient, and is a part of the batch, which lies around.
        """
        held, given, places = self.request.held_bytes, unit.boundary.results, range(pipeline.runs)
        parts, units, unit_of = pipeline.parts, [unit], [0] * pipeline.runs
        followed = None
        if parts is not None and 0 < len(self.first) < parts:
            if all(len(known) >= pipeline.runs - parts + 1 for known in self.first):
                for place in places:
                    if place % parts < len(self.first):
                        unit_of[place] = len(units)
                        units.append(self.first[place % parts][place])
        elif parts is not None and parts > 1 and given in self.fixed_inputs and not self.known:
            units.append(followed_by(unit, given))
            unit_of = [int(place % parts > 0) for place in places]
            held, followed = held - given, given
        step = pipeline.step(units, held, unit_of)
        found = SeenStep(step.moments, step.unit_of, tuple(places), units)
        found.followed_bytes = followed
        return found

    def _compiled(self, offers: list[Offer], place: int, own: Boundary) -> Promised:
        """A version, compiled; what it really takes is offered from now on.

        Raises `InfeasibleBudget` where that is more than was asked for.
        """
        request = offers[place].asked(self.request)
        if request not in self.known:
            try:
                made = self.compile(request)
                # A cache answered, and has forgotten what it took.
                self.known[request] = replace(made, report=made.report or self.plan(request))
            except InfeasibleBudget as refused:
                offers[place] = _raised(offers[place], refused)
                raise
        made = self.known[request]
        offers[place] = _rehearsed(offers[place], made.report)
        return self.promised(made, request, own)

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
            unseen -= self.around.late_bytes
            if self.around.pipeline is not None:
                unseen -= self.around.pipeline.arriving_bytes(own.incoming)
            if self.seen is not None:
                unseen = self.seen.outside_bytes(self.index)
            peak = max(unit.forward_bytes + own.given, unit.backward_bytes + own.incoming)
        promise = Promise(
            graph=f"graph {report.graph}",
            device=self.device,
            budget_bytes=request.budget_bytes,
            peak_bytes=peak,
            held_bytes=report.held_bytes,
            reserve_bytes=unseen,
            saved_bytes=report.saved_bytes,
            segment_bytes=report.segment_bytes if self._takes_segment(version) else None,
            tuning_bytes=request.tuning_bytes,
            coming_bytes=self.coming_bytes,
            unseen_bytes=self.unseen_bytes,
            several=own is not None,
            around=around,
        )
        return Promised(version.call, promise)

    def _takes_segment(self, version: CompiledVersion) -> bool:
        """Whether the allocator is one that takes segments, and this version asks it."""
        settings = self.request.allocator
        one_by_one = settings is not None and not settings.expandable_segments
        return one_by_one and self.request.count == "reserved" and not version.pooled

    def _refusal(self, seen: SeenStep, offers: list[Offer]) -> InfeasibleBudget:
        """The error that names the least, by versions of this graph that have been rehearsed."""
        refusals = [self._refused(seen, offers, way) for way in self._lowest_ways()]
        return min(refusals, key=lambda one: one.minimum_bytes or 0)

    def _refused(
        self, seen: SeenStep, offers: list[Offer], choose: Callable[[UnitStep], planner.Chosen]
    ) -> InfeasibleBudget:
        """The error that names what one way to choose needs."""
        assert self.request.budget_bytes is not None
        runs = seen.runs_of(self.index)
        if seen.followed_bytes is not None:
            runs += seen.runs_of(1)  # by versions of this unit
        for _ in range(TRIES):
            seen.offer(self.index, offers)
            chosen = choose(seen.step())
            least = seen.step().peak_bytes(chosen)
            for place in sorted({chosen[run] for run in runs}):
                if offers[place].events is not None:
                    continue  # what it takes is known
                asked = replace(self.request, budget_bytes=budget_for(least, self.request))
                try:
                    report = self.plan(offers[place].asked(asked))
                    offers[place] = _rehearsed(offers[place], report)
                except InfeasibleBudget as refused:
                    offers[place] = _raised(offers[place], refused)
                    forget_frames(refused)
            seen.offer(self.index, offers)
            if seen.step().peak_bytes(chosen) <= least:
                break
        taken = self._reserved(seen, chosen)
        if taken is None:
            return InfeasibleBudget(self.request.budget_bytes, budget_for(least, self.request))
        needed = taken.usage.peak_reserved_bytes + self.request.tuning_bytes
        unused = taken.usage.peak_reserved_bytes - seen.step().peak_bytes(chosen)
        return InfeasibleBudget(self.request.budget_bytes, needed, (), max(0, unused))


def _saved_bytes(seen: SeenStep, index: int, taken: Sequence[Offer]) -> int:
    """By all runs, with the parameters of the unit of this ``index``, which has ``taken`` these."""
    own = seen.units[index].boundary
    others = [seen.units[unit].offers[0] for unit in seen.unit_of if unit != index]
    return own.resident - own.given + sum(one.version.saved_bytes for one in (*taken, *others))


def _with_between(step: UnitStep, nbytes: int) -> UnitStep:
    """The same where so many bytes more are live while all runs wait."""
    moments = (
        replace(moment, outside_bytes=moment.outside_bytes + nbytes)
        if moment.running is None and len(moment.waiting) == len(step.unit_of)
        else moment
        for moment in step.moments
    )
    return replace(step, moments=tuple(moments))


def _by_itself(step: UnitStep) -> UnitStep:
    """The same without what is live outside."""
    moments = tuple(replace(moment, outside_bytes=0) for moment in step.moments)
    return replace(step, moments=moments)


def _version(report: Report | None) -> Version:
    assert report is not None
    assert report.as_unit is not None
    return report.as_unit


def _rehearsed(one: Offer, report: Report | None) -> Offer:
    """The offer with what it really takes."""
    version = _version(report)
    return replace(one, version=version, events=None if report is None else report.events)


def _with_segment(one: Promised, shared_bytes: int) -> Promised:
    """The same in one segment of that size for the whole step."""
    if one.promise.segment_bytes is None:
        return one
    return replace(one, promise=replace(one.promise, shared_bytes=shared_bytes))


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
    return replace(one, version=version, peak_bytes=one.peak_bytes + more, events=None)


def _told(
    offers: Sequence[Offer], of_run: Sequence[int], peak_bytes: int, limit_bytes: int, counted: str
) -> str:
    """One line for the log."""
    each = ", ".join(
        f"{of_run.count(k)} save {format_bytes(offers[k].version.saved_bytes)}"
        for k in sorted(set(of_run))
    )
    return (
        f"fxremat: {len(of_run)} runs wait at once: {each}; peak {format_bytes(peak_bytes)} "
        f"{counted}, of {format_bytes(limit_bytes)}"
    )
