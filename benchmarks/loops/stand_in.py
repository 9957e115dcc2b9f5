"""A compiled model in a loop that is recorded: it asks for what its dry runs asked for.

Its forward plays the events of a graph's forward and gives results without memory. Their node of
autograd plays the events of the backward and gives gradients, which autograd adds to ``grad`` as it
always does. So what lives on, and for how long, is what the loop makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.core.events import Allocate, Event, Free, Given, RunEvents
from fxremat.core.layout import HalfLayout, RunLayout

from .recorder import ARENA, LoopRecorder, Place


@dataclass(frozen=True)
class LoopGraph:
    """A graph of the model: what it does, what it is given, and where its buffers lie.

    ``inputs`` has, for each of the inputs of its events, the name of a parameter or buffer of the
    model, or the place of an argument; the graphs of a model that has several are given theirs as
    it runs. ``results`` are like its results; there is no backward
    without gradients. With a ``layout`` what it places lies in the arena, and all else that the
    graph allocates in the pool of the graphs; without one, in that of everybody. So many graphs of
    the model that need no gradient come ``before`` it.
    """

    events: RunEvents
    inputs: tuple[str | int, ...]
    results: tuple[torch.Tensor, ...]
    layout: RunLayout | None = None
    arena_bytes: int = 0
    pool_bytes: int = 0
    before: int = 0


@dataclass
class Arena:
    """The block that placed buffers lie in, taken when a forward first needs it."""

    recorder: LoopRecorder
    nbytes: int
    pool_bytes: int = 0
    in_turn: bool = False
    """Each graph has it in its own size: together they would keep too much."""
    taken: bool = False
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First and last bytes of all that has been placed, by name; some may be gone."""

    def take(self) -> None:
        """Have it, from now on."""
        if not self.taken and self.nbytes:
            self.recorder.allocate(self.nbytes, "graph", "graphs", ARENA)
        if not self.taken and self.pool_bytes:
            first = self.recorder.allocate(self.pool_bytes, "graph", "graphs")
            self.recorder.let_go(first)
        self.taken = True

    def lend(self) -> None:
        """Give it back, if nothing lies there: a graph without a backward runs."""
        if self.taken and self.nbytes and self.is_free(0, self.nbytes):
            self.recorder.let_go(ARENA)
            self.taken = False

    def begin(self, graphs: Sequence[LoopGraph], weights: Iterable[torch.Tensor]) -> None:
        """A step of these graphs begins."""
        one = graphs[0]
        if one.layout is None:
            return
        renews = one.events.gradients_stay or self.in_turn
        if renews and (one.arena_bytes, one.pool_bytes) != (self.nbytes, self.pool_bytes):
            self._renew(graphs, weights)
        self.take()

    def _renew(self, graphs: Sequence[LoopGraph], weights: Iterable[torch.Tensor]) -> None:
        """Have the size for these graphs; gradients of the weights come where they have such.

        They wait in host memory until the arena is taken anew.
        """
        recorder, moved = self.recorder, list[torch.Tensor]()
        for one in weights:
            block = None if one.grad is None else recorder.name_of(one.grad)
            if block is not None and recorder.places[block] != "common":
                moved.append(one)
        for one in moved:
            with recorder.unseen():
                one.grad = torch.empty_like(one)
        recorder.sweep()
        self.lend()
        recorder.empty_pool()
        self.nbytes, self.pool_bytes = graphs[0].arena_bytes, graphs[0].pool_bytes
        self.take()
        free = [place for graph in graphs for place in _places_of_gradients(graph)]
        for one in moved:
            offset = next((at for nbytes, at in free if nbytes == one.nbytes), None)
            place: Place = "graphs" if offset is None else "arena"
            name = recorder.allocate(one.nbytes, "gradients", place)
            if offset is not None:
                free.remove((one.nbytes, offset))
                self.spans[name] = offset, offset + one.nbytes
            assert one.grad is not None
            recorder.adopt(one.grad, name)
            recorder.let_go(name)

    def is_free(self, start: int, nbytes: int) -> bool:
        """Whether nothing lives there."""
        held = self.recorder.held
        self.spans = {name: span for name, span in self.spans.items() if held[name]}
        return not any(a < start + nbytes and start < b for a, b in self.spans.values())


@dataclass
class _Run:
    """One run of a graph: the blocks that it holds, by their names in the graph's events."""

    graph: LoopGraph
    recorder: LoopRecorder
    arena: Arena
    own: dict[str, str] = field(default_factory=dict)

    def play(self, events: Iterable[Event], half: HalfLayout | None) -> None:
        """Ask for what one half asks for."""
        offsets = {} if half is None else _offsets(half)
        for event in events:
            if isinstance(event, Allocate):
                self.own[event.name] = self._allocate(event, offsets)
            elif isinstance(event, Free):
                self.recorder.let_go(self.own.pop(event.name))

    def _allocate(self, event: Allocate, offsets: Mapping[str, int]) -> str:
        recorder = self.recorder
        if self.graph.layout is None:
            return recorder.allocate(event.nbytes, "graph")
        place: Place = "graphs"
        offset = offsets.get(event.name)
        if offset is not None and self.arena.is_free(offset, event.nbytes):
            place = "arena"
        name = recorder.allocate(event.nbytes, "graph", place)
        if place == "arena" and offset is not None:
            self.arena.spans[name] = offset, offset + event.nbytes
        return name

    def end(self) -> None:
        """Let go of all that is left."""
        while self.own:
            self.recorder.let_go(self.own.popitem()[1])

    def __del__(self) -> None:
        """Its backward never ran."""
        self.end()


def _places_of_gradients(graph: LoopGraph) -> Iterator[tuple[int, int]]:
    """Bytes and offset of each gradient that lies in the arena."""
    offsets = {} if graph.layout is None else _offsets(graph.layout.backward)
    sizes, names = graph.events.sizes(), {one.gradient for one in graph.events.inputs}
    yield from ((sizes[name], at) for name, at in offsets.items() if name in names)


def _offsets(half: HalfLayout) -> dict[str, int]:
    pairs = zip(half.buffers, half.offsets, strict=True)
    return {b.block: at for b, at in pairs if b.block is not None and at is not None}


class _Graph(torch.autograd.Function):
    """The node of a graph that stands in for the compiled one."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *given: torch.Tensor) -> Any:
        events, recorder, layout = run.graph.events, run.recorder, run.graph.layout
        with recorder.during("forward"):
            if layout is not None:  # as a graph is compiled for a budget
                recorder.use_workspace("forward")
                recorder.use_workspace("backward")
            with _tuned(recorder):
                run.play(events.forward, None if layout is None else layout.forward)
            again = [x for x, one in zip(given, events.inputs, strict=True) if one.again]
            ctx.save_for_backward(*again)
            results = _results(run)
            for name in dict.fromkeys(events.results):
                if name not in events.again:
                    recorder.let_go(run.own.pop(name))
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.run = run
        ctx.like = [None if one.gradient is None else _size(x) for x, one in _given(given, events)]
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        run: _Run = ctx.run
        events, recorder, layout = run.graph.events, run.recorder, run.graph.layout
        if ctx.like is None:
            raise RuntimeError("a graph that stands in for a compiled one goes backward only once")
        with recorder.during("backward"):
            with _tuned(recorder):
                _receive(run, [one for one in incoming if isinstance(one, torch.Tensor)])
                run.play(events.backward, None if layout is None else layout.backward)
            made = _gradients(run, ctx.like)
            run.end()
        ctx.like = None
        return None, *made


def _given(
    given: Sequence[torch.Tensor], events: RunEvents
) -> Iterable[tuple[torch.Tensor, Given]]:
    return zip(given, events.inputs, strict=True)


_Size = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _size(tensor: torch.Tensor) -> _Size | None:
    if not tensor.requires_grad:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _tuned:
    """While kernels run for the first time, what tuning writes over is there."""

    def __init__(self, recorder: LoopRecorder) -> None:
        self.recorder, self.name = recorder, ""

    def __enter__(self) -> None:
        moment, tuning = self.recorder.moment, self.recorder.libraries.tuning
        if moment not in self.recorder.tuned and tuning:
            self.name = self.recorder.allocate(tuning, "libraries")
        self.recorder.tuned.add(moment)
        self.recorder.use_workspace()

    def __exit__(self, *_: object) -> None:
        if self.name:
            self.recorder.let_go(self.name)


def _results(run: _Run) -> tuple[torch.Tensor, ...]:
    """Results without memory; each holds its block."""
    names = run.graph.events.results
    if len(names) != len(run.graph.results):
        count = len(run.graph.results)
        raise ValueError(f"{count} results are to come from {len(names)} blocks on the device")
    made = []
    with run.recorder.unseen():
        for name, like in zip(names, run.graph.results, strict=True):
            made.append(torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device="cuda"
            ))  # fmt: skip
            run.recorder.adopt(made[-1], run.own[name])
    return tuple(made)


def _receive(run: _Run, incoming: Sequence[torch.Tensor]) -> None:
    """The run holds the gradients that come in; those that its code frees are gone by then.

    What autograd holds of them is let go, as the code that was compiled has it.
    """
    freed = {event.name for event in run.graph.events.backward if isinstance(event, Free)}
    for k, (name, nbytes) in enumerate(run.graph.events.incoming):
        block = run.recorder.name_of(incoming[k]) if k < len(incoming) else None
        if block is None:
            run.own[name] = run.recorder.allocate(nbytes, "graph")
            continue
        run.own[name] = run.recorder.hold(block)
        if name in freed:
            run.recorder.disown(incoming[k])


def _gradients(run: _Run, like: Sequence[_Size | None]) -> list[torch.Tensor | None]:
    """Gradients without memory; each holds its block."""
    made: list[torch.Tensor | None] = []
    bases: dict[str, tuple[torch.Tensor, int]] = {}
    sizes = run.graph.events.sizes()
    with run.recorder.unseen():
        for one, given in zip(like, run.graph.events.inputs, strict=True):
            name = given.gradient
            if one is None or name is None or name not in run.own:
                made.append(None)
                continue
            shape, stride, dtype, device = one
            if name not in bases:
                count = sizes[name] // dtype.itemsize
                base = torch.empty(count, dtype=dtype, device=device)
                run.recorder.adopt(base, run.own[name])
                run.recorder.holders[run.own[name]] = "gradients"
                bases[name] = base, 0
            base, offset = bases[name]
            made.append(base.as_strided(shape, stride, offset))
            bases[name] = base, offset + given.nbytes // dtype.itemsize
    return made


class StandIn(nn.Module):
    """The model of a loop. ``graph_of`` gives the graph for arguments, and with gradients or not.

    It is told, too, whether gradients live on where the forward begins: for a graph planned for
    that, they are moved out of the arena. One without gradients has the bytes of an empty arena.

    It has the parameters and buffers of ``model``, which lie on the device and have no memory. A
    graph's last result is its own: those before are buffers that it changes.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: LoopRecorder,
        graph_of: Callable[[tuple[torch.Tensor, ...], bool, bool], LoopGraph],
        arena: Arena | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._loop = _Loop(recorder, graph_of, arena or Arena(recorder, 0))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        loop = self._loop
        weights, training = list(self.model.parameters()), torch.is_grad_enabled()
        living = any(one.grad is not None for one in weights)
        graph = loop.graph_of(inputs, training, living)
        tensors: dict[str, torch.Tensor] = {}
        tensors.update(self.model.named_parameters(remove_duplicate=False))
        tensors.update(self.model.named_buffers(remove_duplicate=False))
        given = [tensors[x] if isinstance(x, str) else inputs[x] for x in graph.inputs]
        if training:
            loop.arena.begin([graph], weights)
        else:
            loop.arena.lend()
        run = _Run(graph, loop.recorder, loop.arena)
        last: torch.Tensor = _Graph.apply(run, *given)[-1]  # type: ignore[no-untyped-call]
        return last


def runs_as(
    graph_of: Callable[[], LoopGraph], outputs: int, recorder: LoopRecorder, arena: Arena
) -> Callable[..., list[torch.Tensor]]:
    """What stands for the compiled graph where Dynamo runs what lies between several of them.

    It is as ``graph_of`` says each time. Of its results the last ``outputs`` are its own.
    """

    def run(*args: Any) -> list[torch.Tensor]:
        graph = graph_of()
        given = [one for one in args if isinstance(one, torch.Tensor)]
        made = _Graph.apply(_Run(graph, recorder, arena), *given)  # type: ignore[no-untyped-call]
        return list(made[len(made) - outputs :])

    return run


@dataclass(frozen=True)
class _Loop:
    """What belongs to the loop, and is the same for copies of the model."""

    recorder: LoopRecorder
    graph_of: Callable[[tuple[torch.Tensor, ...], bool, bool], LoopGraph]
    arena: Arena

    def __deepcopy__(self, memo: Any) -> _Loop:
        return self


@contextmanager
def on_device(model: nn.Module, inputs: Any, recorder: LoopRecorder) -> Iterator[Any]:
    """Inside, the model lies on the device of the loop, moved parameter by parameter.

    Yields its inputs, moved as well. To be called inside of `LoopRecorder.running`.
    """
    moved: dict[int, torch.Tensor] = {}

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
            )
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            moved[id(tensor)] = made
        return moved[id(tensor)]

    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in tables:
                before.append((held, dict(held)))
                held.update({k: there(one) for k, one in held.items() if one is not None})
        recorder.held_by("parameters", [*model.parameters(), *model.buffers()])
        yield pytree.tree_map_only(torch.Tensor, there, inputs)
    finally:
        for held, own in before:
            held.update(own)
