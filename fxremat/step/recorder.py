"""One step run on tensors without memory: what lives outside of the compiled parts, and when.

Each compiled part is stood in for: it gives results of the right sizes, saves nothing, and notes
when its forward and its backward run. What is live then, outside of all parts, is counted. On CUDA
what is allocated and freed outside is kept in order, too, for the model of torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxremat.compat.dynamo import (
    calling_modules,
    compiled_in_place,
    current_compilation,
    fresh_dynamo_caches,
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
from fxremat.core.events import Allocate, Backward, Forward, Outside
from fxremat.core.step import StepPoint
from fxremat.errors import NotTraceable
from fxremat.memory.storages import Meter, MeteredStorage
from fxremat.options import Options
from fxremat.runtime.host_memory import is_on
from fxremat.step.description import StepDescription
from fxremat.step.graph import Graph

Loss = Callable[[Any], torch.Tensor]


@dataclass
class RecordedGraph:
    """A compiled part, as Dynamo gave it. Graphs of one frame share the places of their runs."""

    graph: Graph
    signature: str
    frame: int


@dataclass
class _Shards:
    """Parameters that FSDP2 gathers when their module runs: bytes of this rank's parts.

    They are known by their storages, which are whole. ``made`` are bytes of what is made now, and
    will be reduced to this rank's part.
    """

    by_storage: dict[int, int] = field(default_factory=dict)
    made: int | None = None


@dataclass
class _Course:
    """The runs of the step so far: by graph and place, which of them wait, and its points."""

    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    points: list[StepPoint] = field(default_factory=list)

    def note(self, outside_bytes: int, run: int | None = None, phase: Any = "forward") -> None:
        """One more point of the step."""
        self.points.append(StepPoint(outside_bytes, tuple(self.waiting), run, phase))


@dataclass
class StepRecorder:
    """One step on tensors without memory. It is recorded while it ``counts``.

    ``held_bytes`` are there all the time, beside the model and its inputs. With ``keeps_events``
    what is allocated and freed outside is kept.
    """

    options: Options
    device: torch.device
    keeps_events: bool = False
    held_bytes: int = 0
    sharded: Mapping[str, int] = field(default_factory=dict)
    counts: bool = False
    graphs: list[RecordedGraph] = field(default_factory=list)
    graphs_of: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The graphs of each part that ran."""
    course: _Course = field(default_factory=_Course)
    meter: Meter[MeteredStorage] = field(default_factory=Meter)
    shards: _Shards = field(default_factory=_Shards)

    def record(
        self, model: nn.Module, parts: Sequence[nn.Module], given: Any, loss: Loss | None = None
    ) -> None:
        """Run two steps of a model that is ``given`` arguments and keywords; the second counts.

        Tensors have no memory and parts are stood in for; all is undone at the end. What is traced
        of its graphs later is no part of it. Raises `NotTraceable` where the model gives no loss.
        """
        with (
            session.separate(),
            fresh_dynamo_caches(),
            fake_tensors(self.see),
            on_device_without_memory(model, given) as (args, named),
            compiled_in_place(model, parts, self._stand_in),
        ):
            for self.counts in (False, True):  # compiled first, and then counted
                self._begin(model, args, named)
                result = model(*args, **named)
                loss_of(model, result, loss).backward()
                self._between()
                model.zero_grad(set_to_none=True)
                del result
        self.counts = False

    def _begin(self, model: nn.Module, args: Any, named: Any) -> None:
        """A step begins: parameters, buffers and inputs are there."""
        held = self.held_bytes
        self.meter = Meter(events=[Allocate("held", held)], current=held, peak=held)
        for name, parameter in model.named_parameters():
            if name in self.sharded:
                self.shards.by_storage[storage_key(parameter)] = self.sharded[name]
        self._add(tensors_of(model, (args, named)), "resident ")

    def _add(self, tensors: Iterable[torch.Tensor], kind: str = "") -> None:
        """Count the storages that are not yet counted."""
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            if key not in self.meter.live and is_on(tensor, self.device):
                size = self.shards.by_storage.get(key, self.shards.made)
                size = tensor.untyped_storage().nbytes() if size is None else size
                name = self.meter.allocate(size, kind)
                self.meter.add(key, MeteredStorage(size, is_gone, name))

    def _names(self, tensors: Iterable[Any]) -> tuple[str, ...]:
        """Of their storages among the events."""
        found = dict.fromkeys(self.meter.names(tensors))
        return tuple(name for name in found if name is not None)

    @contextmanager
    def _made_by(self, run: Callable[[tuple[Allocate, ...]], Outside]) -> Iterator[None]:
        """What is allocated inside comes from a run of a part; ``run`` makes its event."""
        events = self.meter.events
        begun = len(events)
        yield
        inside = events[begun:]
        made = tuple(event for event in inside if isinstance(event, Allocate))
        others = (event for event in inside if not isinstance(event, Allocate))
        events[begun:] = [*others, run(made)] if self.counts else inside

    def see(self, result: Any) -> None:
        """Count what an op has given."""
        if self.counts:
            self.meter.sweep()
            leaves = pytree.tree_leaves(result)
            self._add(x for x in leaves if isinstance(x, torch.Tensor) and is_fake(x))

    def _between(self) -> None:
        """Note what was live at most since the last run of a part."""
        if self.counts:
            self.course.note(self.meter.peak)
        self.meter.sweep()
        self.meter.peak = self.meter.current

    def _stand_in(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: notes the graph, and gives what stands in for it."""
        signatures = [one.signature for one in self.graphs]
        if (signature := session.signature(gm, inputs)) not in signatures:
            graph = Graph(copy_module(gm), inputs, self.options, None)
            self.graphs.append(RecordedGraph(graph, signature, current_compilation()[0]))
            signatures.append(signature)
        index = signatures.index(signature)
        return lambda *args: self._forward(index, gm, args)

    def _forward(self, index: int, gm: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        """Run the forward of a graph; the results stand in for its own."""
        outer, self.counts = self.counts, False  # nothing that is made here counts
        try:
            shown = gm(*args)
        finally:
            self.counts = outer
        given = {storage_key(x) for x in args if isinstance(x, torch.Tensor)}
        flat, shape = pytree.tree_flatten(shown)
        tensors = [(k, x) for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        made = [k for k, x in tensors if storage_key(x) not in given]
        if not torch.is_grad_enabled() or not any(flat[k].requires_grad for k in made):
            self.see(shown)  # it saves nothing: as if it were not compiled
            return shown
        place, run = self._run_of(index)
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        self._between()
        if self.counts:  # the parameters of the next part are gathered ahead
            self.course.note(self.meter.current + 2 * self.gathered_bytes(inputs), run)
        likes = [(*_like(flat[k]), flat[k].requires_grad) for k in made]
        del shown, tensors
        for k in made:
            flat[k] = None
        names = self._names(inputs)
        with self._made_by(lambda made: Forward(run, names, made)):
            results = _StandIn.apply(self, index, place, likes, *inputs)  # type: ignore[no-untyped-call]
        self.course.waiting.append(run)
        for k, result in zip(made, results, strict=True):
            flat[k] = result
        self.meter.peak = self.meter.current
        return pytree.tree_unflatten(flat, shape)

    def _run_of(self, index: int) -> tuple[int, int]:
        """The place that a run of the graph takes now, and the number of that run."""
        runs, frame = list(self.course.runs), self.graphs[index].frame
        waiting = [runs[run] for run in self.course.waiting]
        taken = {place for own, place in waiting if self.graphs[own].frame == frame}
        place = next(p for p in range(len(taken) + 1) if p not in taken)
        part = next(reversed(calling_modules()), None)
        if part is not None:
            self.graphs_of.setdefault(part, set()).add(index)
        return place, self.course.runs.setdefault((index, place), len(self.course.runs))

    def gathered_bytes(self, given: Iterable[torch.Tensor]) -> int:
        """Of what a part is given, the parameters that are gathered for it."""
        storages = {storage_key(x): x.untyped_storage().nbytes() for x in given}
        known = self.shards.by_storage
        return sum(nbytes for key, nbytes in storages.items() if key in known)

    def backward(self, index: int, place: int, gathered: int) -> int:
        """The backward of a run begins; so many bytes are gathered for it.

        Those of the next part are gathered ahead, and gradients of the last one are on their way.
        Returns the number of the run.
        """
        course = self.course
        run = course.runs[index, place]
        self._between()
        course.waiting.remove(run)
        if self.counts:
            ended = any(point.phase == "backward" for point in course.points)
            outside = self.meter.current + (1 + bool(course.waiting) + ended) * gathered
            course.note(outside, run, "backward")
        return run

    def description(self) -> StepDescription:
        """The step, with what each graph offers; graphs that never wait are left out."""
        runs = list(self.course.runs)
        used = sorted({index for index, _ in runs})
        self.graphs = [self.graphs[index] for index in used]
        for part, indices in self.graphs_of.items():
            self.graphs_of[part] = {used.index(index) for index in indices}
        parts, request = [], None
        for one in self.graphs:
            request = one.graph.request()
            parts.append(one.graph.as_part(request, len(runs)))
        events = tuple(self.meter.events)
        return StepDescription(
            tuple(self.course.points),
            tuple(used.index(index) for index, _ in runs),
            tuple(place for _, place in runs),
            parts,
            request,
            (lambda runs: events) if self.keeps_events else None,
        )


def tensors_of(model: nn.Module, given: Any) -> list[torch.Tensor]:
    """Parameters, buffers and what the model is given."""
    found = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(given)]
    return [one for one in found if isinstance(one, torch.Tensor)]


def loss_of(model: nn.Module, result: Any, loss: Loss | None) -> Any:
    """What the backward begins with; raises `NotTraceable` where there is no such number."""
    found = getattr(result, "loss", result) if loss is None else loss(result)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
        return found.sum()
    why = "gives no loss to go backward from; say how it is computed: prepare(..., loss=...)"
    raise NotTraceable(type(model).__name__, why)


class _StandIn(torch.autograd.Function):
    """Gives results, and then gradients, of the right sizes; saves nothing but what others hold."""

    @staticmethod
    def forward(
        ctx: Any, recorder: StepRecorder, index: int, place: int, likes: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.recorder, ctx.run = recorder, (index, place, recorder.gathered_bytes(tensors))
        ctx.held = [x for x in tensors if not x.requires_grad]
        ctx.gradients = [_like(x) if x.requires_grad else None for x in tensors]
        ctx.parts = [recorder.shards.by_storage.get(storage_key(x)) for x in tensors]
        made = tuple(_empty(like[:4]) for like in likes)
        ctx.mark_non_differentiable(
            *(x for x, like in zip(made, likes, strict=True) if not like[4])
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recorder, run = ctx.recorder, ctx.recorder.backward(*ctx.run)
        incoming, shards = recorder._names(gradients), recorder.shards
        with recorder._made_by(lambda made: Backward(run, incoming, made)):
            made = []
            for like, shards.made in zip(ctx.gradients, ctx.parts, strict=True):
                made.append(None if like is None else _empty(like))
            shards.made = None
        recorder.meter.peak = recorder.meter.current
        return (None, None, None, None, *made)


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What `_empty` makes another one of."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _empty(like: Any) -> torch.Tensor:
    shape, stride, dtype, device = like
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
