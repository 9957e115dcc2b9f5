"""Where a graph is compiled: the model around it, what wrappers such as FSDP2 and DDP hold, and the
step as it is taken to be before it has run."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.compat.backward import backward_drops_gradients, hooks_on_what_is_saved
from fxremat.compat.dynamo import calling_modules, compiled_parts, unwrapped
from fxremat.compat.ranks import Shards, parts_split_for_ddp, shards_of
from fxremat.compat.tensors import is_dtensor
from fxremat.compile import session
from fxremat.compile.request import Request, for_inputs
from fxremat.core.step import NOTHING_GATHERED, Gathered, in_order, is_number, last_first
from fxremat.memory.storages import storage_bytes
from fxremat.options import Options
from fxremat.passes.memory_estimation import nbytes
from fxremat.step.description import StepDescription, repeated_step
from fxremat.step.graph import Graph, NoBackward, Place
from fxremat.step.pipelines import Pipeline, pipeline_of
from fxremat.step.promise import LOSS_BYTES, Tensors
from fxremat.step.scope import BudgetScope, Neighbours
from fxremat.step.versions import Part, followed_by

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelContext:
    """Where a graph is compiled: how often it will run, and what lies around it.

    ``others`` are the parameters and buffers of the model that are not the part's own, and what the
    model is given. They take ``nbytes``; ``everything`` are its own too, and buffers of a pipeline.
    ``left_bytes`` are the gradients of one run that stay, None: as many as its graph gives. Where a
    schedule runs it, the ``pipeline`` says what the rank does in a step. Of ``nbytes``,
    ``late`` may be there for a short time, and are not compared with what is seen at run time.
    Besides there is what is ``gathered``, where the part is ``sharded``. So many of the runs are of
    ``siblings``: modules like the part that are in no module with it, so they may run in turn.
    """

    runs: int = 1
    nbytes: int = 0
    others: Tensors = ()
    everything: Tensors = ()
    left_bytes: int | None = None
    pipeline: Pipeline | None = None
    late: int = 0
    gathered: Gathered = NOTHING_GATHERED
    sharded: bool = False
    siblings: int = 0


def model_context(
    options: Options, device: torch.device, compiled: Sequence[nn.Module] = ()
) -> ModelContext:
    """Of the graph that Dynamo compiles now, by the modules whose forward is running.

    Its part is the innermost of them, and the model the outermost. As many runs wait at once as
    there are modules like the part that are compiled by themselves. Where Dynamo could not go on
    into the part, and so compiles it by itself, these are all modules like it. Where no module is
    around the part, they are among those that are ``compiled`` for the budget.
    """
    calls = calling_modules()
    if not calls:
        return ModelContext(options.instances or 1)
    model, part = next(iter(calls)), next(reversed(calls))
    plain = unwrapped(part)
    siblings = _called_in_turn(plain, compiled) if unwrapped(model) is plain else []

    def alike(module: nn.Module) -> int:
        """How many modules inside are compiled by themselves, and like the part."""
        parts = compiled_parts(module)
        parts = parts if plain in compiled_parts(model) else list(module.modules())
        return sum(_form(one) == _form(plain) for one in [*parts, *siblings])

    pipeline = pipeline_of(part, device, alike) if options.instances is None else None
    modules = (model, *siblings) if pipeline is None else pipeline.modules
    everything = [x for module in modules for x in _tensors_of(module)]
    own = {id(x) for x in _tensors_of(part)}
    others = [x for x in everything if id(x) not in own]
    runs = options.instances or max(1, alike(model))
    if pipeline is not None:
        runs = max(1, pipeline.runs)
        others += pipeline.batch
    elif runs > 1:  # else the graph itself is given what the model is
        own |= {id(x) for x in _tensors_among(calls[part]) if not x.requires_grad}
        others += _tensors_among(calls[model])
    beside = _sharded_memory(model, part, device, runs) or _bucket_memory(calls)
    around: Tensors = tuple(ref(x) for x in {id(x): x for x in (*everything, *others)}.values())
    if pipeline is not None:
        around += (pipeline.buffers,)
    gathered = beside.gathered
    most = max(gathered.ahead, gathered.sent)
    if pipeline is not None and _is_sharded(model) and gathered.ahead:
        pipeline = replace(pipeline, gathered_bytes=most, gives_back=gathered.kept < gathered.ahead)
        beside = replace(beside, left=None)
    late = _late_results(part, calls[part], device, most)
    total = beside.held + late + storage_bytes([x for x in others if id(x) not in own], device)
    if pipeline is not None:
        total += pipeline.buffers_size
    elif runs > 1:  # a function that calls blocks may add what each gives to what it was given
        sums = storage_bytes(_tensors_among(calls[model]), device) if siblings else 0
        total += LOSS_BYTES + sums
    at_all_times, gathered = _gathered(gathered, pipeline, runs)
    if device.type == "cuda":  # as all around, counted elsewhere
        gathered = NOTHING_GATHERED
    return ModelContext(
        runs, total + at_all_times, tuple(map(ref, others)), around, left_bytes=beside.left,
        pipeline=pipeline, late=late, gathered=gathered, sharded=any(map(_is_sharded, calls)),
        siblings=len(siblings),
    )  # fmt: skip


def _called_in_turn(part: nn.Module, compiled: Sequence[nn.Module]) -> list[nn.Module]:
    """Those like the part among the ``compiled``, which a function calls one after the other.

    Each of them waits for its backward then, unless `torch.utils.checkpoint` runs it again.
    """
    if part not in compiled or hooks_on_what_is_saved():
        return []
    return [one for one in compiled if one is not part and _form(one) == _form(part)]


def _gathered(gathered: Gathered, pipeline: Pipeline | None, runs: int) -> tuple[int, Gathered]:
    """Bytes of gathered parameters that count at all times, and what is gathered besides.

    Where it is not known when they are there, they count at all times.
    """
    if pipeline is not None and pipeline.gathered_bytes:
        return 0, NOTHING_GATHERED
    if pipeline is not None or runs == 1:
        return gathered.ahead + gathered.sent + (runs - 1) * gathered.kept, NOTHING_GATHERED
    return 0, gathered


@dataclass(frozen=True)
class _WrapperMemory:
    """What wrappers hold beside a part, in bytes.

    ``held`` are there all the time, ``left`` stay of a run's gradients, None: all.
    """

    held: int = 0
    left: int | None = None
    gathered: Gathered = NOTHING_GATHERED


def _sharded_memory(
    model: nn.Module, part: nn.Module, device: torch.device, alike: int
) -> _WrapperMemory | None:
    """What FSDP2 holds beside a part; None where it shards nothing. ``alike`` parts are like it.

    The graph is given the gathered parameters. Beside them are its own parts of these. In the
    backward the next part is gathered ahead, and the gradients of the last one are on their way: of
    the last part nothing is on its way, and nothing is gathered beside the first. Modules around
    the part have gathered the parameters that they shard themselves, and keep the whole gradients
    of these to their own end. Of modules inside of the part one after the other is gathered.
    """
    if not _is_sharded(part):
        return None
    shards = [one for one in model.modules() if _is_sharded(one)]
    around = [one for one in shards if one is not part and part in set(one.modules())]
    inside = [one for one in part.modules() if _is_sharded(one)]
    own = sum(map(shards_of, inside), Shards())
    inner = {id(x) for one in shards if one not in around for x in one.parameters()}
    outer = {id(x): x for one in around for x in one.parameters() if id(x) not in inner}
    held = own.part - storage_bytes(outer.values(), device)
    for outside in map(shards_of, around):
        held += outside.part + outside.gathered + outside.sent
    mine = shards_of(part)
    nested = [shards_of(one) for one in inside if one is not part]
    ahead = mine.gathered + max((one.gathered for one in nested), default=0)
    sent = mine.sent + max((one.sent for one in nested), default=0)
    others = (one for one in shards if one is not part and one not in around)
    if len(shards) - len(around) > alike * len(inside):  # its neighbours are of another kind
        held += ahead + sent + sum(shards_of(one).kept for one in others)
        return _WrapperMemory(held, own.part)
    held += own.kept - mine.kept
    return _WrapperMemory(held, own.part, Gathered(ahead, sent, mine.kept))


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _bucket_memory(calls: Iterable[nn.Module]) -> _WrapperMemory:
    """What DDP's buckets take, and what stays of a part's gradients beside them.

    A bucket holds a gradient as long as DDP lives, and the parameter has it once more unless its
    ``grad`` is a view of that.
    """
    for module in calls if torch.distributed.is_available() else ():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            buckets = sum(x.nbytes for x in module.parameters() if x.requires_grad)
            return _WrapperMemory(buckets, 0 if module.gradient_as_bucket_view else None)
    return _WrapperMemory()


LATE_RESULTS = 2
"""Of collectives of gloo, on the CPU: so many live on after the last who knows them."""


def _late_results(
    part: nn.Module, given: Iterable[Any], device: torch.device, gathered_bytes: int
) -> int:
    """What gloo's threads hold of results that nobody else holds any more.

    They let go of a result shortly after whoever waits for it has it. Where parameters are
    DTensors, results are taken to be as large as the largest tensor that the part is given; where
    they are gathered, so are these.
    """
    if device.type != "cpu":
        return 0
    largest = 0
    if any(is_dtensor(x) for x in part.parameters()):
        largest = max((x.nbytes for x in _tensors_among(list(given))), default=0)
    return LATE_RESULTS * (largest + gathered_bytes)


def _form(module: nn.Module) -> Any:
    """What is the same for modules that make the same graph."""
    return type(module), [tuple(x.shape) for x in _tensors_of(module)]


def others_to_come(
    part: nn.Module, compiled: Iterable[nn.Module], expected: Container[int]
) -> bool:
    """Whether a module of another form than the part is among the ``compiled``, and has not run.

    The identities of parameters that are ``expected`` are those that no graph was given yet.
    """
    others = (one for one in compiled if _form(one) != _form(part))
    return any(id(x) in expected for one in others for x in one.parameters())


def _tensors_among(given: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@dataclass(frozen=True)
class Surroundings:
    """Where a graph was compiled, and what was there.

    ``neighbours`` are what other graphs of the ``scope`` held. If others ``follow`` in the step,
    they are not known yet. ``given`` are the addresses of the storages that it was given. Of the
    inputs that need no gradient, and are no parameters, ``fixed_inputs`` are the bytes: where one
    is as large as the results, the blocks that follow are given what needs one.
    """

    device: torch.device
    context: ModelContext
    scope: BudgetScope
    place: Place
    neighbours: Neighbours = field(default_factory=Neighbours)
    follow: bool = False
    given: frozenset[int] = frozenset()
    fixed_inputs: tuple[int, ...] = ()


def fixed_inputs(inputs: Iterable[Any]) -> tuple[int, ...]:
    """Bytes of each input of a graph that could have a gradient, and needs none."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)]
    return tuple(nbytes(x) for x in tensors if x.is_floating_point() and not x.requires_grad)


def first_description(
    part: Part, count: int, where: Surroundings, held_bytes: int, *, compiled_before: bool
) -> StepDescription:
    """A step in which so many runs wait: the one of its pipeline, if that says as many.

    ``held_bytes`` are there all the time. The first block is another graph than those that follow
    unless one was ``compiled_before``.
    """
    pipeline, left = where.context.pipeline, where.context.left_bytes
    if pipeline is None or count != pipeline.runs:
        gathered = where.context.gathered
        places = range(count)
        if where.neighbours.first:
            first = where.neighbours.first
            before = [parts[place] for place, parts in enumerate(first)]
            left_over = range(len(first), count)
            return repeated_step(part, left_over, held_bytes, left, gathered, before)
        given = part.interface.results
        if given in where.fixed_inputs and count > 1 and not compiled_before:
            return repeated_step(part, places, held_bytes, left, gathered, followers_given=given)
        # More wait than modules are alike: these are micro-batches, which may go either way.
        either = count > where.context.runs
        return repeated_step(part, places, held_bytes, left, gathered, either_order=either)
    part = part.leaving(left)
    return _of_pipeline(part, pipeline, where, held_bytes, compiled_before=compiled_before)


def _of_pipeline(
    part: Part, pipeline: Pipeline, where: Surroundings, held: int, *, compiled_before: bool
) -> StepDescription:
    """The step of its schedule; the first blocks of the first stage are another graph.

    Their input needs no gradient, and is a part of the batch, which lies around.
    """
    first = where.neighbours.first
    given, places = part.interface.results, range(pipeline.runs)
    blocks, parts, part_of = pipeline.blocks, [part], [0] * pipeline.runs
    followed = None
    if blocks is not None and 0 < len(first) < blocks:
        if all(len(known) >= pipeline.runs - blocks + 1 for known in first):
            for place in places:
                if place % blocks < len(first):
                    part_of[place] = len(parts)
                    parts.append(first[place % blocks][place])
    elif blocks is not None and blocks > 1 and given in where.fixed_inputs and not compiled_before:
        parts.append(followed_by(part, given))
        part_of = [int(place % blocks > 0) for place in places]
        held, followed = held - given, given
    points = pipeline.points(parts, held, part_of)
    return StepDescription(points, tuple(part_of), tuple(places), parts, followers_given=followed)


def see_split_parts(request: Request, left_bytes: int | None, graph: Graph) -> None:
    """Have the session know the step of a graph that Dynamo splits for DDP, before any is compiled.

    Its parts run forward one after the other, and backward in the opposite order: so their versions
    are chosen together. The ``request`` is that of the first part. Of each part's gradients
    ``left_bytes`` stay beside DDP's buckets, None: all.
    """
    request = request.with_inputs(passed_on=backward_drops_gradients())
    try:
        graphs = parts_split_for_ddp()
        if len(graphs) < 2:
            return
        parts = [
            graph.of_another(gm, inputs, for_inputs(request, inputs), len(graphs))
            for gm, inputs in graphs
        ]
    except NoBackward:
        return
    except Exception as error:  # whatever a part raises that runs without memory
        log.warning("fxremat: parts that DDP makes of a graph are planned one by one: %s", error)
        return
    parts = [part.leaving(left_bytes) for part in parts]
    outside = request.budget.held - _shared_bytes([inputs for _, inputs in graphs])
    outside += sum(part.interface.resident - part.interface.given for part in parts)
    last = parts[-1].interface
    if is_number(last.results):  # a loss, which stays with its gradient to the end
        outside += last.results + last.incoming
    part_of = tuple(range(len(parts)))
    order = last_first(len(parts))
    points = in_order([part.interface for part in parts], part_of, order, outside)
    seen = StepDescription(points, part_of, part_of, parts, request)  # they share the places
    for index, (gm, inputs) in enumerate(graphs):
        session.STATE.seen[session.signature(gm, inputs)] = seen, index


def _shared_bytes(inputs: Sequence[Sequence[Any]]) -> int:
    """Of inputs that several parts are given, and no part makes: all but one of each."""
    known, shared = set[int](), 0
    for one in (one for each in inputs for one in each if isinstance(one, torch.Tensor)):
        if isinstance(one, nn.Parameter) or not one.requires_grad:
            shared += nbytes(one) if id(one) in known else 0
            known.add(id(one))
    return shared
