"""`prepare`: a step is looked at as a whole, before its compiled parts are compiled one by one.

Where blocks are compiled by themselves, each compiler call sees one block. What runs between the
blocks, the loss, and how often each block runs is in the Python code around them. So one step runs
on tensors without memory. The compiled parts are stood in for: each gives results of the right
sizes, saves nothing, and notes when its forward and its backward run. What is live then, outside of
all parts, is counted. With what the parts offer (`fxremat.step.versions`) that is the step. On
CUDA what is allocated and freed outside is kept in order, too, for the model of torch's allocator.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxremat.compat.call_stack import calling_modules
from fxremat.compat.distributed.ranks import parts_given_back, shared_over_ranks
from fxremat.compat.dynamo import (
    compile_parts,
    compiled_in_place,
    compiled_parts,
    fresh_dynamo_caches,
    unwrapped,
)
from fxremat.compat.joint_graph import copy_module
from fxremat.compat.tensors import (
    fake_tensors,
    is_fake,
    on_device_without_memory,
    storage_key,
    storage_watch,
)
from fxremat.compile import session
from fxremat.compile.driver import total_bytes
from fxremat.compile.request import device_of_inputs, request_for, unseen_bytes
from fxremat.core.events import Allocate, Backward, Forward, Free, Outside
from fxremat.core.step import StepPoint
from fxremat.errors import InfeasibleBudget, NotTraceable
from fxremat.memory.segments import allocate_cublas
from fxremat.options import Options, parse_options
from fxremat.planner import step_versions as planner
from fxremat.runtime.host_memory import is_on
from fxremat.sizes import format_bytes
from fxremat.step.description import StepDescription
from fxremat.step.graph import Graph
from fxremat.step.runs import budget_for, unplanned_bytes

log = logging.getLogger(__name__)


def prepare(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    memory_budget: int | str | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> nn.Module:
    """Plan all compiled parts of ``model`` together, by a look at one step; gives the model back.

    The parts are the modules inside that are compiled by themselves, by ``block.compile()`` or by
    ``torch.compile(block)``; without any, the model is compiled as a whole. In place, they are
    compiled by fxremat with these ``options``, when they first run. The step is
    ``loss(model(*inputs, **keywords))``, forward and backward; ``loss`` is not needed where the
    model gives one number, or an object with a ``loss``. No tensor gets memory, and nothing of the
    model changes. ``memory_budget`` is a shorthand for the option that matters most.

    Raises `InfeasibleBudget` with the least that all parts together need, `NotTraceable` where the
    model gives no loss, or has parameters in parts by tensor parallel, and `InvalidOption`.
    """
    given = dict(options or {})
    if memory_budget is not None:
        given["memory_budget"] = memory_budget
    own = unwrapped(model)
    device = device_of_inputs([*own.parameters(), *pytree.tree_leaves((inputs, keywords))])
    parsed = parse_options(given, device_total_bytes=total_bytes(device))
    parts = compiled_parts(model) or [own]
    shared = shared_over_ranks(own)
    if shared:
        raise NotTraceable(type(own).__name__, _SHARED.format(shared[0]))
    sharded, gathered = parts_given_back(own)
    look = _Look(parsed, device, records=device.type == "cuda" and not sharded, sharded=sharded)
    look.held_bytes = _held_bytes(own, (inputs, keywords), parsed, device) + gathered
    look.over(own, parts, (inputs, keywords), loss)
    seen = look.seen_step()
    _check_budget(seen, parsed)
    for index, graph in enumerate(look.graphs):
        session.STATE.seen[graph.signature] = seen, index
    for part, indices in look.graphs_of.items():
        if len(indices) == 1:
            session.STATE.seen_parts[part] = seen, min(indices)
    compile_parts(model, parts, backend="fxremat", options=given)
    return model


_SHARED = (
    "{} is a part of a tensor that ranks share, as in tensor parallel, and prepare cannot look at "
    "that; compile the blocks by fxremat without it: what they hold is counted then, too"
)


def _held_bytes(model: nn.Module, given: Any, options: Options, device: torch.device) -> int:
    """What lies beside the model and its inputs, by what is said, or what CUDA's allocator has."""
    if options.reserve is not None or device.type != "cuda":
        return options.reserve or 0
    allocate_cublas(device)  # it would come later
    return unseen_bytes(_tensors_of(model, given), device)


def _tensors_of(model: nn.Module, given: Any) -> list[torch.Tensor]:
    """Parameters, buffers and what the model is given."""
    found = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(given)]
    return [one for one in found if isinstance(one, torch.Tensor)]


def _loss_of(model: nn.Module, result: Any, loss: Callable[[Any], torch.Tensor] | None) -> Any:
    """What the backward begins with."""
    found = getattr(result, "loss", result) if loss is None else loss(result)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
        return found.sum()
    why = "gives no loss to go backward from; say how it is computed: prepare(..., loss=...)"
    raise NotTraceable(type(model).__name__, why)


def _check_budget(seen: StepDescription, options: Options) -> None:
    """Raise `InfeasibleBudget` where no choice of versions is within the budget."""
    step, budget, request = seen.step(), options.memory_budget, seen.request
    if budget is None or request is None:
        return
    unplanned = unplanned_bytes(request) if seen.outside is None else request.budget.autotune
    if planner.fastest(step, budget - unplanned) is None:
        least = step.peak_bytes(planner.lowest(step))
        raise InfeasibleBudget(budget, budget_for(least, request))
    outside = max(point.outside_bytes for point in step.points)
    log.info(
        "fxremat: %d graphs run %d times in a step; outside of them at most %s are live",
        len(seen.parts), len(seen.part_of), format_bytes(outside),
    )  # fmt: skip


@dataclass
class _SeenGraph:
    """A compiled part, as Dynamo gave it."""

    graph: Graph
    signature: str
    taken: set[int] = field(default_factory=set)
    """Places of runs that wait."""


@dataclass(frozen=True)
class _Storage:
    """Bytes that are live outside of the parts, by their name among the events."""

    nbytes: int
    is_gone: Callable[[], bool]
    name: str


@dataclass
class _Look:
    """One step on tensors without memory: what is live outside of the compiled parts, and when."""

    options: Options
    device: torch.device
    counts: bool = False
    records: bool = False
    """Whether events are kept: on CUDA."""
    held_bytes: int = 0
    """There all the time, beside the model and its inputs."""
    sharded: Mapping[str, int] = field(default_factory=dict)
    """Of parameters that FSDP2 gathers when their module runs: bytes of this rank's parts."""
    parts: dict[int, int] = field(default_factory=dict)
    """The same by their storages, which are whole."""
    makes_part: int | None = None
    """Bytes of what is made now, and will be reduced to this rank's part."""
    graphs: list[_SeenGraph] = field(default_factory=list)
    points: list[StepPoint] = field(default_factory=list)
    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    """By graph and place."""
    graphs_of: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The graphs of each part that ran."""
    waiting: list[int] = field(default_factory=list)
    live: dict[int, _Storage] = field(default_factory=dict)
    events: list[Outside] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    current: int = 0
    most: int = 0
    paused: bool = False

    def over(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        given: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        """Two steps of a model that is ``given`` arguments and keywords; the second one counts.

        What is traced of its graphs later is no part of it.
        """
        with self.at(model, parts, given) as (args, named):
            for self.counts in (False, True):  # compiled first, and then counted
                self.begin(model, args, named)
                result = model(*args, **named)
                _loss_of(model, result, loss).backward()
                self.between()
                model.zero_grad(set_to_none=True)
                del result
        self.counts = False

    @contextmanager
    def at(self, model: nn.Module, parts: Sequence[nn.Module], given: Any) -> Iterator[Any]:
        """Inside, tensors have no memory and parts are stood in for; all is undone at the end."""
        with (
            session.separate(),
            fresh_dynamo_caches(),
            fake_tensors(self.see),
            on_device_without_memory(model, given) as inside,
            compiled_in_place(model, parts, self.stand_in),
        ):
            yield inside

    def begin(self, model: nn.Module, args: Any, named: Any) -> None:
        """A step begins: parameters, buffers and inputs are there."""
        self.live.clear()
        self.current = self.most = self.held_bytes
        self.events = [Allocate("held", self.held_bytes)]
        for name, parameter in model.named_parameters():
            if name in self.sharded:
                self.parts[storage_key(parameter)] = self.sharded[name]
        self.add(iter(_tensors_of(model, (args, named))), "resident ")

    def add(self, tensors: Iterator[torch.Tensor], kind: str = "") -> None:
        """Count the storages that are not yet counted."""
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            if key not in self.live and is_on(tensor, self.device):
                size = self.parts.get(key, self.makes_part)
                size = tensor.untyped_storage().nbytes() if size is None else size
                self.live[key] = _Storage(size, is_gone, f"{kind}{next(self.numbers)}")
                self.events.append(Allocate(self.live[key].name, size))
                self.current += size
        self.most = max(self.most, self.current)

    def names(self, tensors: Iterable[Any]) -> tuple[str, ...]:
        """Of their storages among the events."""
        keys = (storage_key(x) for x in tensors if isinstance(x, torch.Tensor))
        return tuple(self.live[key].name for key in dict.fromkeys(keys) if key in self.live)

    @contextmanager
    def made_by(self, run: Callable[[tuple[Allocate, ...]], Outside]) -> Iterator[None]:
        """What is allocated inside comes from a run of a part; ``run`` makes its event."""
        begun = len(self.events)
        yield
        inside = self.events[begun:]
        made = tuple(event for event in inside if isinstance(event, Allocate))
        others = (event for event in inside if not isinstance(event, Allocate))
        self.events[begun:] = [*others, run(made)] if self.counts else inside

    def see(self, result: Any) -> None:
        """What an op has given."""
        if self.counts and not self.paused:
            self.sweep()
            leaves = pytree.tree_leaves(result)
            self.add(x for x in leaves if isinstance(x, torch.Tensor) and is_fake(x))

    def sweep(self) -> None:
        """Take off what is gone."""
        for key in [key for key, one in self.live.items() if one.is_gone()]:
            gone = self.live.pop(key)
            self.current -= gone.nbytes
            self.events.append(Free(gone.name))

    def between(self) -> None:
        """What was live at most since the last run of a part."""
        if self.counts:
            self.points.append(StepPoint(self.most, tuple(self.waiting)))
        self.sweep()
        self.most = self.current

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing that is made inside counts."""
        outer, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = outer

    def stand_in(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: notes the graph, and gives what stands in for it."""
        signature = session.signature(gm, inputs)
        known = [k for k, one in enumerate(self.graphs) if one.signature == signature]
        if not known:
            graph = Graph(None, copy_module(gm), inputs, self.options, None)
            self.graphs.append(_SeenGraph(graph, signature))
        index = known[0] if known else len(self.graphs) - 1

        def run(*args: Any) -> Any:
            return self.run(index, gm, args)

        return run

    def run(self, index: int, gm: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        """A forward of a graph."""
        with self.pause():
            shown = gm(*args)
        given = {storage_key(x) for x in args if isinstance(x, torch.Tensor)}
        flat, shape = pytree.tree_flatten(shown)
        made = [
            k for k, x in enumerate(flat)
            if isinstance(x, torch.Tensor) and storage_key(x) not in given
        ]  # fmt: skip
        waits = torch.is_grad_enabled() and any(flat[k].requires_grad for k in made)
        taken = self.graphs[index].taken
        place = next(p for p in range(len(taken) + 1) if p not in taken)
        if not waits:  # it saves nothing: as if it were not compiled
            self.see(shown)
            return shown
        run = self.runs.setdefault((index, place), len(self.runs))
        part = next(reversed(calling_modules()), None)
        if part is not None:
            self.graphs_of.setdefault(part, set()).add(index)
        self.between()
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        gathered = self.gathered_bytes(tensors)
        if self.counts:  # those of the next part are gathered ahead
            outside = self.current + 2 * gathered
            self.points.append(StepPoint(outside, tuple(self.waiting), run, "forward"))
        likes = [(flat[k].shape, flat[k].stride(), flat[k].dtype, flat[k].device,
                  flat[k].requires_grad) for k in made]  # fmt: skip
        del shown
        for k in made:
            flat[k] = None
        taken.add(place)
        inputs = self.names(tensors)
        with self.made_by(lambda made: Forward(run, inputs, made)):
            results = _StandIn.apply(self, index, place, likes, *tensors)  # type: ignore[no-untyped-call]
        self.waiting.append(run)
        for k, result in zip(made, results, strict=True):
            flat[k] = result
        self.most = self.current
        return pytree.tree_unflatten(flat, shape)

    def gathered_bytes(self, given: Iterable[torch.Tensor]) -> int:
        """Of what a part is given, the parameters that are gathered for it."""
        storages = {storage_key(x): x.untyped_storage().nbytes() for x in given}
        return sum(nbytes for key, nbytes in storages.items() if key in self.parts)

    def backward(self, index: int, place: int, gathered: int) -> int:
        """The backward of a run begins; so many bytes are gathered for it.

        Those of the next part are gathered ahead, and gradients of the last one are on their way.
        """
        run = self.runs[index, place]
        self.between()
        self.waiting.remove(run)
        self.graphs[index].taken.discard(place)
        if self.counts:
            ended = any(point.phase == "backward" for point in self.points)
            outside = self.current + (1 + bool(self.waiting) + ended) * gathered
            self.points.append(StepPoint(outside, tuple(self.waiting), run, "backward"))
        return run

    def seen_step(self) -> StepDescription:
        """The step, with what each graph offers; graphs that never wait are left out."""
        runs = sorted(self.runs, key=self.runs.__getitem__)
        used = sorted({index for index, _ in runs})
        self.graphs = [self.graphs[index] for index in used]
        for part, indices in self.graphs_of.items():
            self.graphs_of[part] = {used.index(index) for index in indices}
        parts, request = [], None
        for one in self.graphs:
            gm, inputs = one.graph.kept, one.graph.inputs
            request = request_for(gm, inputs, self.options)
            parts.append(one.graph.as_part(request, len(runs)))
        return StepDescription(
            tuple(self.points),
            tuple(used.index(index) for index, _ in runs),
            tuple(place for _, place in runs),
            parts,
            request,
            tuple(self.events) if self.records else None,
        )


class _StandIn(torch.autograd.Function):
    """Gives results, and then gradients, of the right sizes; saves nothing but what others hold."""

    @staticmethod
    def forward(
        ctx: Any, look: _Look, index: int, place: int, likes: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.look, ctx.run = look, (index, place, look.gathered_bytes(tensors))
        ctx.held = [x for x in tensors if not x.requires_grad]
        ctx.gradients = [
            (x.shape, x.stride(), x.dtype, x.device) if x.requires_grad else None for x in tensors
        ]
        ctx.parts = [look.parts.get(storage_key(x)) for x in tensors]
        made = tuple(_empty(like[:4]) for like in likes)
        ctx.mark_non_differentiable(
            *(x for x, like in zip(made, likes, strict=True) if not like[4])
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        look, run = ctx.look, ctx.look.backward(*ctx.run)
        incoming = look.names(gradients)
        with look.made_by(lambda made: Backward(run, incoming, made)):
            made = []
            for like, look.makes_part in zip(ctx.gradients, ctx.parts, strict=True):
                made.append(None if like is None else _empty(like))
            look.makes_part = None
        look.most = look.current
        return (None, None, None, None, *made)


def _empty(like: Any) -> torch.Tensor:
    shape, stride, dtype, device = like
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
