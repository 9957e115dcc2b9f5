"""The verdict before kernels are compiled: Inductor's own code, run on tensors without memory.

Inductor generates its code for the forward and the backward module, kernels left uncompiled. The
code then runs: what it allocates, what it hands to library calls and what it drops is counted as
it happens, on fake tensors. The peak is that of the real step, down to the byte, for as long as
the libraries' own scratch memory is known.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import runtime
from fxremat.compat.inductor.generated_code import Generated, generate, load_without_kernels
from fxremat.compat.inductor.kernels_ahead import begin_kernels
from fxremat.compat.inductor.lowered_ahead import hand_over as torch_hand_over
from fxremat.compat.partitioning import name_in_forward
from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import Watching, storage_key, storage_watch, without_memory
from fxremat.core.events import Allocate, Event, Free, Given, RunEvents
from fxremat.core.timeline import Lifetime
from fxremat.cost.call_times import call_key
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES, round_up
from fxremat.memory.measured_peak import uncollected
from fxremat.passes.joint_graph import is_fetch, is_tensor
from fxremat.passes.memory_estimation import TANGENTS, nbytes
from fxremat.runtime import accumulated, kernels

log = logging.getLogger(__name__)

Workspace = Callable[[Any, Any, Any], Sequence[int]]
"""Scratch memory of a library call (op, args, kwargs): bytes of blocks that live together."""


@dataclass(frozen=True)
class Dropped:
    """From this moment on nobody needs an input of the step of this name, or another storage: a
    result of the forward, or a gradient that came in."""

    name: str
    nbytes: int
    since: int


@dataclass(frozen=True)
class Rehearsal:
    """One training step of the generated code.

    ``live_bytes`` after each allocation and during each library call, ``making`` the FX node that
    is computed then, "" where it has none; ``at_peak`` the FX nodes whose storages are live at the
    peak, with their bytes. ``scratch`` gives the workspace of a library call by its FX node, in the
    layout that Inductor chose.
    """

    peak_bytes: int
    live_bytes: tuple[int, ...]
    at_peak: tuple[tuple[str, int], ...]
    scratch: dict[str, int]
    events: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    """What is asked of the allocator, first of all for what is resident; on CUDA only."""
    making: tuple[str, ...] = field(default=(), repr=False)
    halves: tuple[Generated, ...] = field(default=(), repr=False, compare=False)
    """The code that ran, the forward's and the backward's; none where the answer was known."""
    begun: bool = field(default=False, repr=False, compare=False)
    """Whether its kernels are being compiled."""
    forward_moments: int = 0
    """How many of ``live_bytes`` are in the forward."""
    saved_bytes: int = 0
    """Live between forward and backward, inputs among them."""
    left_bytes: int = 0
    """Live at the end of the step."""
    forward_events: int = 0
    """How many of ``events`` are in the forward, or before it."""
    as_run: RunEvents | None = field(default=None, repr=False, compare=False)
    """The events as those of a run beside others, its ``own`` inputs not told; on CUDA only."""
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    """When each storage is there, in moments; what is live at one adds up to its ``live_bytes``."""
    dropped: tuple[Dropped, ...] = ()
    """What others pass on to the step, or are given, and nobody needs any more if they drop it."""

    def live_where_dropped(self, inputs: Collection[str]) -> tuple[int, ...]:
        """Live bytes of the backward where others drop what they pass on, ``inputs`` among it."""
        gone = [one for one in self.dropped if not one.name or one.name in inputs]
        return tuple(
            nbytes - sum(one.nbytes for one in gone if one.since <= moment)
            for moment, nbytes in enumerate(self.live_bytes)
            if moment >= self.forward_moments
        )

    def with_between(self, nbytes: int) -> Rehearsal:
        """The same, with so many bytes that are live between forward and backward only."""
        if not nbytes:
            return self
        there, before = self.saved_bytes + nbytes, self.forward_events
        moments = self.forward_moments
        peak, at_peak = self.peak_bytes, self.at_peak
        if there > peak:
            peak, at_peak = there, ((TANGENTS, nbytes),)
        name = f"{len(self.events)}"
        other = (Allocate(name, nbytes), Free(name)) if self.events else ()
        return replace(
            self,
            peak_bytes=peak,
            at_peak=at_peak,
            live_bytes=(*self.live_bytes[:moments], there, *self.live_bytes[moments:]),
            making=(*self.making[:moments], TANGENTS, *self.making[moments:]),
            events=(*self.events[:before], *other, *self.events[before:]),
            forward_moments=moments + 1,
            lifetimes=(
                *(one.with_step_before(moments) for one in self.lifetimes),
                Lifetime(TANGENTS, nbytes, moments, moments + 1),
            ),
            dropped=tuple(replace(one, since=one.since + 1) for one in self.dropped),
        )

    def hand_over(self) -> None:
        """Have what ran compiled as it is; its kernels from now on, beside what Python does."""
        for half in self.halves:
            if not self.begun:
                begin_kernels(half)
            if half.lowered is not None:
                torch_hand_over(half.lowered)


class _Code:
    """The generated code of one graph, and which names its buffers have at which line."""

    def __init__(self, generated: Generated, filename: str) -> None:
        self.generated, self.filename = generated, filename
        self.named_at: dict[int, str] = {}
        self.renamed: dict[str, tuple[str, int]] = {}
        for statement in ast.walk(ast.parse(generated.source)):
            if isinstance(statement, (ast.Assign, ast.Expr)):
                self._read(statement)

    def _read(self, statement: ast.Assign | ast.Expr) -> None:
        name = _written(statement)
        if name is None:
            return
        if isinstance(statement.value, ast.Name):
            self.renamed[statement.value.id] = (name, statement.lineno)
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            self.named_at[line] = name

    def line(self) -> int | None:
        """The line of this code that is being run, None outside."""
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else None

    def origin(self, buffer: str, line: float) -> str:
        """The FX node of what a buffer holds at ``line``: its memory may have been handed on."""
        seen = {buffer}
        while buffer in self.renamed:
            newer, since = self.renamed[buffer]
            if since > line or newer in seen:
                break
            buffer = newer
            seen.add(buffer)
        return self.generated.origin_of.get(buffer, buffer)


def _written(statement: ast.Assign | ast.Expr) -> str | None:
    """The variable that a statement assigns, or that its call writes to."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    if not isinstance(statement.value, ast.Call):
        return None
    into = [k.value for k in statement.value.keywords if k.arg == "out"] or statement.value.args[:1]
    return into[0].id if into and isinstance(into[0], ast.Name) else None


@dataclass
class _Storage:
    """Live bytes, and where they came from: a buffer of ``code``."""

    nbytes: int
    is_gone: Callable[[], bool]
    buffer: str
    code: _Code | None
    name: str
    """Among the events."""
    since: int
    """The moment from which on it is there."""


@dataclass(frozen=True)
class _Inside:
    """What a call allocates and frees; ``results`` are names among the events, None if given."""

    events: tuple[Event, ...]
    results: tuple[str | None, ...]
    scratch_bytes: int


def _inside(meter: _Meter, op: Any, args: Any, kwargs: Any) -> _Inside | None:
    """An operator of ours, run without memory."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    meter.ignore(given)
    if op in kernels.WORKSPACES:  # kernels that it runs are written now, unseen
        kernels.WORKSPACES[op](*args, **kwargs, measure=kernels.unmeasured)
    try:
        with Watching(meter.call):
            made = kernels.IMPLEMENTATIONS[op](*args, **kwargs)
    except Exception as error:  # it may look at its data
        log.debug("%s is counted as one block: %s: %s", op, type(error).__name__, error)
        return None
    meter.sweep()
    leaves = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    found = [meter.live.get(storage_watch(t)[0]) for t in leaves]
    names = tuple(None if one is None else one.name for one in found)
    return _Inside(tuple(meter.events), names, meter.peak - meter.current)


@dataclass
class _Meter:
    """Counts the bytes of ``device`` as the code runs."""

    device: str
    workspace: Workspace
    live: dict[int, _Storage] = field(default_factory=dict)
    uncounted: dict[int, Callable[[], bool]] = field(default_factory=dict)
    code: _Code | None = None
    current: int = 0
    peak: int = 0
    at_peak: tuple[tuple[str, int], ...] = ()
    live_bytes: list[int] = field(default_factory=list)
    making: list[str] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    known: dict[str, _Inside | None] = field(default_factory=dict)
    lifetimes: list[Lifetime] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)
    """Storages that others are given, or pass on. They count to the end."""
    inputs: dict[int, tuple[str, int, Callable[[], bool]]] = field(default_factory=dict)
    """Those of inputs, which are not counted here: name, bytes, and whether it is gone."""
    dropped: list[Dropped] = field(default_factory=list)
    gone: list[_Storage] = field(default_factory=list)
    """What others were given, or have passed on, and is dropped."""

    def pass_on(self, tensors: Iterable[Any]) -> None:
        """Others may drop these."""
        tensors = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        self.passed.update(storage_key(tensor) for tensor in tensors)

    def watch(self, inputs: Mapping[str, Any]) -> None:
        """These live outside of the step, but others may drop them."""
        for name, tensor in inputs.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            self.ignore([tensor])
            if tensor.device.type == self.device:
                key, is_gone = storage_watch(tensor)
                self.inputs[key] = name, nbytes(tensor), is_gone

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These live outside of the step. Their numbers stay theirs, also when they are dropped."""
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            self.uncounted[key] = is_gone

    def add(self, tensors: Iterable[torch.Tensor], buffer: str) -> None:
        """Count the storages of ``tensors`` that are not yet counted."""
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            known = key in self.live or key in self.uncounted
            if tensor.device.type == self.device and not known:
                asked = tensor.untyped_storage().nbytes()
                nbytes = _rounded(asked, self.device)
                self.take(key, nbytes, is_gone, buffer, self.allocated(asked))

    def take(
        self, key: int, nbytes: int, is_gone: Callable[[], bool], buffer: str, name: str
    ) -> None:
        """Count a storage from now on."""
        since = len(self.live_bytes)
        self.live[key] = _Storage(nbytes, is_gone, buffer, self.code, name, since)
        self.current += nbytes
        self.record(self.current, buffer)

    def allocated(self, nbytes: int) -> str:
        """The name among the events of what is allocated now."""
        name = f"{len(self.events)}"
        self.events.append(Allocate(name, nbytes))
        return name

    def names(self, values: Iterable[Any]) -> list[str | None]:
        """Of their storages among the events; None where they have none."""
        keys = [storage_watch(x)[0] if isinstance(x, torch.Tensor) else None for x in values]
        found = [self.live.get(key) if key is not None else None for key in keys]
        return [None if one is None else one.name for one in found]

    def freed(self, storage: _Storage) -> None:
        """Its bytes are no longer there."""
        self.current -= storage.nbytes
        self.events.append(Free(storage.name))
        self.lifetimes.append(self.lifetime(storage))

    def lifetime(self, storage: _Storage) -> Lifetime:
        """It until now, by what it held first."""
        return Lifetime(self.label(storage, 0), storage.nbytes, storage.since, len(self.live_bytes))

    def call(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an op that has run: its new storages, and its scratch memory while it ran."""
        self.sweep()
        if op is accumulated:  # its first argument has no memory from here on
            self.drop(args[0])
            return
        if op is runtime.to_host:  # host memory is not what is counted
            self.ignore([result])
            return
        line = self.code.line() if self.code is not None else None
        name = self.code.named_at.get(line, "") if self.code is not None and line else ""
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        inside = self.inside(op, args, kwargs)
        blocks = self.workspace(op, args, kwargs) if inside is None else ()
        scratch = sum(_rounded(n, self.device) for n in blocks)
        if inside is not None:
            scratch = inside.scratch_bytes
        if scratch and self.code is not None:
            self.scratch[self.code.origin(name, 0)] = scratch
        if inside is not None:
            self.add_inside(inside, results, name)
        self.add(results, name)
        if scratch:
            now = len(self.live_bytes)
            self.record(self.current + scratch, name)
            self.lifetimes.append(Lifetime(self.making[-1] or name, scratch, now, now + 1, True))
        names = [self.allocated(nbytes) for nbytes in blocks]
        self.events += [Free(name) for name in reversed(names)]

    def inside(self, op: Any, args: Any, kwargs: Any) -> _Inside | None:
        """What a call of an operator of ours allocates one after the other, on CUDA.

        None where it does not run without memory, and for others: what these take is known as a
        number of bytes only.
        """
        if self.device != "cuda" or op not in kernels.IMPLEMENTATIONS:
            return None
        key = call_key(op, args, kwargs, size_bound)
        if key not in self.known:
            self.known[key] = _inside(_Meter(self.device, self.workspace), op, args, kwargs)
        return self.known[key]

    def add_inside(self, inside: _Inside, results: list[torch.Tensor], buffer: str) -> None:
        """Its events; ``results`` take the names of those that were counted there."""
        begin = len(self.events)

        def named(name: str) -> str:
            return f"{begin + int(name)}"

        for event in inside.events:
            if isinstance(event, Allocate):
                self.events.append(Allocate(named(event.name), event.nbytes))
            elif isinstance(event, Free):
                self.events.append(Free(named(event.name)))
        for tensor, name in zip(results, inside.results, strict=True):
            key, is_gone = storage_watch(tensor)
            if name is None or key in self.live:
                continue
            nbytes = _rounded(tensor.untyped_storage().nbytes(), self.device)
            self.take(key, nbytes, is_gone, buffer, named(name))

    def drop(self, tensor: torch.Tensor) -> None:
        """Take off what is freed, although something still refers to it."""
        gone = self.live.pop(storage_watch(tensor)[0], None)
        if gone is not None:
            self.freed(gone)
        self.ignore([tensor])

    def sweep(self) -> None:
        """Take off what has been dropped."""
        for key in [key for key, storage in self.live.items() if storage.is_gone()]:
            storage = self.live.pop(key)
            if key in self.passed:
                self.gone.append(storage)
                self.dropped.append(Dropped("", storage.nbytes, len(self.live_bytes)))
            else:
                self.freed(storage)
        for key in [key for key, (_, _, is_gone) in self.inputs.items() if is_gone()]:
            name, nbytes, _ = self.inputs.pop(key)
            self.dropped.append(Dropped(name, nbytes, len(self.live_bytes)))

    def record(self, nbytes: int, buffer: str) -> None:
        """So many bytes are live, while the buffer is made."""
        line = (self.code.line() if self.code is not None else None) or 0
        self.live_bytes.append(nbytes)
        origins = self.code.generated.origin_of if self.code is not None else {}
        self.making.append(origins.get(buffer, ""))
        if nbytes > self.peak:
            self.peak = nbytes
            there = (*self.live.values(), *self.gone)
            self.at_peak = tuple((self.label(s, line), s.nbytes) for s in there)

    def label(self, storage: _Storage, line: int) -> str:
        """The FX node whose value a storage holds."""
        if storage.code is None:
            return storage.buffer
        here = storage.code is self.code
        return storage.code.origin(storage.buffer, line if here else float("inf"))

    def run(self, generated: Generated, filename: str, args: list[Any], real: Any) -> Any:
        """Run generated code and count."""
        code = _Code(generated, filename)
        constants = {
            name: real(value) if isinstance(value, torch.Tensor) else value
            for name, value in generated.constants.items()
        }
        self.ignore(c for c in constants.values() if isinstance(c, torch.Tensor))
        call = load_without_kernels(generated, constants, filename)
        self.code = code
        with Watching(self.call):
            results = call(args)
        self.sweep()
        return results


def _rounded(nbytes: int, device: str) -> int:
    return round_up(nbytes, MIN_BLOCK_BYTES if device == "cuda" else 1)


def _input(node: fx.Node) -> Any:
    """What a graph gets for a placeholder: a tensor without memory, or the size planned for."""
    value = node.meta.get("val")
    size = size_bound
    if isinstance(value, torch.Tensor):
        shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return size(value) if isinstance(value, torch.SymInt) else value


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _is_on_host(node: fx.Node) -> bool:
    """Whether an input of the graph lives in host memory: it is fetched."""
    return any(user.target is runtime.to_device or is_fetch(user) for user in node.users)


@uncollected()  # a fifth of the time; what the code drops needs no collector
def rehearse(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    device: str,
    workspace: Workspace,
    with_kernels: bool = False,
    begin: bool = False,
) -> Rehearsal:
    """Generate the code of both graphs of a training step, run one after the other, and count.

    Arguments are those of `written` and of `run`.
    """
    scene = written(
        forward,
        backward,
        num_fwd_outputs=num_fwd_outputs,
        with_kernels=with_kernels,
        begin=begin,
    )
    return scene.run(device, workspace)


def written(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    with_kernels: bool = False,
    begin: bool = False,
) -> Scene:
    """The code of both graphs of a training step.

    Only code that comes ``with_kernels`` can be handed over; it takes longer. ``begin`` to compile
    them at once where the code will most likely be taken: the forward's while the backward's code
    is generated.
    """
    first = generate(
        forward, is_backward=False, seen_outputs=num_fwd_outputs, with_kernels=with_kernels
    )
    if begin:
        begin_kernels(first)
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    saved = {
        node.name: index
        for index, node in enumerate(results)
        if index >= num_fwd_outputs and isinstance(node, fx.Node)
    }
    strides = {name: s for name, i in saved.items() if (s := first.strides[i]) is not None}
    second = generate(
        backward, is_backward=True, input_strides=strides, with_kernels=with_kernels
    )
    if begin:
        begin_kernels(second)
    return Scene(forward, backward, num_fwd_outputs, saved, first, second, begin)


@dataclass(frozen=True)
class Scene:
    """The code of a training step; it can be rehearsed at several sizes (`compat.sizes_at`).

    ``saved`` are the forward's results that the backward reads, by their names.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    saved: dict[str, int]
    first: Generated
    second: Generated
    begun: bool = False

    @uncollected()
    def run(self, device: str, workspace: Workspace) -> Rehearsal:
        """One step, counted in bytes of ``device``.

        ``workspace`` gives the scratch memory of a library call. The inputs of
        the forward are there throughout, its first ``num_fwd_outputs`` results and the incoming
        gradients are the caller's, everything else is dropped when the code drops it.
        """
        return _run(self, _Meter(device, workspace))


def _run(scene: Scene, meter: _Meter) -> Rehearsal:
    forward, backward, saved = scene.forward, scene.backward, scene.saved
    first, second, device = scene.first, scene.second, meter.device
    num_fwd_outputs = scene.num_fwd_outputs
    with without_memory() as made:
        primals = {n.name: _input(n) for n in _placeholders(forward)}
        meter.watch(primals)
        returned = list(meter.run(first, "<rehearsed forward>", list(primals.values()), made))
        kept, given = returned[:num_fwd_outputs], dict(primals)
        meter.pass_on(kept)
        for name, index in saved.items():
            given[name] = returned[index]
        results, again = meter.names(kept), meter.names(given.values())
        del returned
        arguments = _pass_on(meter, backward, given, saved)
        forward_moments, saved_bytes = len(meter.live_bytes), meter.current
        forward_events = len(meter.events)
        tangents = [arguments[name] for name in arguments if name not in given]
        meter.pass_on(tangents)
        read_again, incoming = arguments.keys() & primals.keys(), meter.names(tangents)
        passed, names = list(arguments.values()), list(primals)
        del given, kept, tangents, arguments, primals
        gradients = list(meter.run(second, "<rehearsed backward>", passed, made))
        gradient_of = dict(zip(names, meter.names(gradients), strict=False))
    resident = [(n.name, nbytes(n.meta["val"])) for n in _placeholders(forward) if is_tensor(n)
                and n.meta["val"].device.type == device and not _is_on_host(n)]  # fmt: skip
    total = sum(size for _, size in resident)
    there = [Allocate(name, size) for name, size in resident]
    asked = {e.name: e.nbytes for e in meter.events if isinstance(e, Allocate)}
    ours = {name for name in incoming if name is not None}
    as_run = RunEvents(
        forward=tuple(e for e in meter.events[:forward_events]
                      if not isinstance(e, Allocate) or e.name not in ours),
        backward=tuple(meter.events[forward_events:]),
        inputs=tuple(Given(size, again=name in read_again, gradient=gradient_of.get(name))
                     for name, size in resident),
        results=tuple(name for name in results if name is not None),
        again=tuple(name for name in results if name is not None and name in again),
        incoming=tuple((name, asked[name]) for name in incoming if name is not None),
    )  # fmt: skip
    return Rehearsal(
        peak_bytes=meter.peak + total,
        live_bytes=tuple(total + n for n in meter.live_bytes),
        making=tuple(meter.making),
        at_peak=tuple(resident) + meter.at_peak,
        scratch=meter.scratch,
        events=(*there, *meter.events) if device == "cuda" else (),
        halves=(first, second),
        begun=scene.begun,
        forward_moments=forward_moments,
        saved_bytes=total + saved_bytes,
        left_bytes=total + meter.current,
        lifetimes=(
            *(Lifetime(name, size, 0, len(meter.live_bytes)) for name, size in resident),
            *meter.lifetimes,
            *map(meter.lifetime, (*meter.gone, *meter.live.values())),
        ),
        dropped=tuple(meter.dropped),
        forward_events=len(there) + forward_events if device == "cuda" else 0,
        as_run=as_run if device == "cuda" else None,
    )


def _pass_on(
    meter: _Meter, backward: fx.GraphModule, given: dict[str, Any], saved: Iterable[str]
) -> dict[str, Any]:
    """The backward's arguments: what the forward saved, under new names, and the gradients."""
    for name in saved:
        if isinstance(given[name], torch.Tensor):
            entry = meter.live.get(storage_watch(given[name])[0])
            if entry is not None:
                entry.buffer, entry.code = name, None
    meter.code = None
    arguments = {}
    for node in _placeholders(backward):
        name = name_in_forward(node)
        argument = given[name] if name in given else _input(node)
        if name not in given and isinstance(argument, torch.Tensor):
            meter.add([argument], name)
        arguments[name] = argument
    return arguments
