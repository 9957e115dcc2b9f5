"""Counts the bytes of code that Inductor generated, as it runs on tensors without memory."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import runtime
from fxremat.compat.inductor.generated_code import Generated, load_without_kernels
from fxremat.compat.sizes import values_of_data
from fxremat.compat.tensors import Watching, storage_key, storage_watch
from fxremat.core.events import Allocate, Event, Free
from fxremat.core.layout import CodeBuffer
from fxremat.core.timeline import Lifetime
from fxremat.cost.call_times import call_key
from fxremat.memory.allocator_settings import in_blocks
from fxremat.memory.storages import Meter, MeteredStorage
from fxremat.passes.memory_estimation import nbytes
from fxremat.runtime import accumulated, kernels

log = logging.getLogger(__name__)

Workspace = Callable[[Any, Any, Any], Sequence[int]]
"""Scratch memory of a library call (op, args, kwargs): bytes of blocks that live together."""


class RunningCode:
    """The generated code of one graph, and which names its buffers have at which line."""

    def __init__(self, generated: Generated, filename: str) -> None:
        self.generated, self.filename = generated, filename
        self.named_at: dict[int, str] = {}
        self.renamed: dict[str, tuple[str, int]] = {}
        for statement in ast.walk(ast.parse(generated.source)):
            if isinstance(statement, (ast.Assign, ast.Expr)):
                self._read(statement)

    def _read(self, statement: ast.Assign | ast.Expr) -> None:
        name = written_name(statement)
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


def written_name(statement: ast.Assign | ast.Expr) -> str | None:
    """The variable that a statement assigns, or that its call writes to."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    if not isinstance(statement.value, ast.Call):
        return None
    into = [k.value for k in statement.value.keywords if k.arg == "out"] or statement.value.args[:1]
    return into[0].id if into and isinstance(into[0], ast.Name) else None


@dataclass(frozen=True)
class Dropped:
    """From step ``since`` on nobody needs an input of this name, or, without a name, a result of
    the forward or a gradient that came in."""

    name: str
    nbytes: int
    since: int


@dataclass
class _Buffer(MeteredStorage):
    """A live storage that was made at step ``since`` as a buffer of ``code``."""

    buffer: str
    code: RunningCode | None
    since: int


@dataclass(frozen=True)
class InsideCall:
    """What a call allocates and frees; ``results`` are names among the events, None if given."""

    events: tuple[Event, ...]
    results: tuple[str | None, ...]
    scratch: int


@dataclass
class _HeldByOthers:
    """Storages that others hold while the code runs.

    ``uncounted`` live outside of the step; ``inputs`` are those of them that others may drop, with
    their name and bytes. ``passed`` are given to others by the step, or by others to it: they count
    to the end, also those ``gone`` before. ``dropped`` says since when nobody needs what is gone.
    """

    uncounted: dict[int, Callable[[], bool]] = field(default_factory=dict)
    inputs: dict[int, tuple[str, int, Callable[[], bool]]] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    gone: list[_Buffer] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


@dataclass
class CodeMeter(Meter[_Buffer]):
    """Counts the bytes of ``device`` as generated code runs.

    A step ends with each allocation and each library call. For each, ``live_bytes`` says how much
    is live and ``computed`` which FX node is computed, "" where none is known. ``buffers`` are what
    the code has asked for itself since it began to run.
    """

    device: str = "cpu"
    workspace: Workspace = lambda op, args, kwargs: ()
    code: RunningCode | None = None
    live_bytes: list[int] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    at_peak: tuple[tuple[str, int], ...] = ()
    lifetimes: list[Lifetime] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    known_calls: dict[str, InsideCall | None] = field(default_factory=dict)
    buffers: list[CodeBuffer] = field(default_factory=list)
    others: _HeldByOthers = field(default_factory=_HeldByOthers)

    def pass_on(self, tensors: Iterable[Any]) -> None:
        """Others may drop these."""
        tensors = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        self.others.passed.update(storage_key(tensor) for tensor in tensors)

    def watch(self, inputs: Mapping[str, Any]) -> None:
        """These live outside of the step, but others may drop them."""
        for name, tensor in inputs.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            self.ignore([tensor])
            if tensor.device.type == self.device:
                key, is_gone = storage_watch(tensor)
                self.others.inputs[key] = name, nbytes(tensor), is_gone

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These live outside of the step. Their keys stay theirs, also when they are dropped."""
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            self.others.uncounted[key] = is_gone

    def count(self, tensors: Iterable[torch.Tensor], buffer: str) -> None:
        """Count the storages of ``tensors`` that are not yet counted."""
        for tensor in tensors:
            key = storage_key(tensor)
            known = key in self.live or key in self.others.uncounted
            if tensor.device.type == self.device and not known:
                name = self.allocate(tensor.untyped_storage().nbytes())
                self._add_tensor(tensor, buffer, name)

    def _add_tensor(self, tensor: torch.Tensor, buffer: str, name: str) -> None:
        key, is_gone = storage_watch(tensor)
        size = in_blocks(tensor.untyped_storage().nbytes(), tensor.device)
        self.add(key, _Buffer(size, is_gone, name, buffer, self.code, len(self.live_bytes)))

    def add(self, key: int, storage: _Buffer) -> None:
        """Count a storage from now on; it is a step of its own."""
        self.live[key] = storage
        self.current += storage.nbytes
        self.record(self.current, storage.buffer)

    def free(self, storage: _Buffer) -> None:
        """Count a storage no longer, and note when it was there."""
        super().free(storage)
        self.lifetimes.append(self.lifetime(storage))

    def lifetime(self, storage: _Buffer) -> Lifetime:
        """The storage until now, named after what it held first."""
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
        inside, blocks = self._inside_known(op, args, kwargs), tuple[int, ...]()
        if inside is None:
            blocks = tuple(self.workspace(op, args, kwargs))
            scratch = sum(in_blocks(n, torch.device(self.device)) for n in blocks)
        else:
            scratch = inside.scratch
            self._add_inside(inside, results, name)
        if scratch and self.code is not None:
            self.scratch[self.code.origin(name, 0)] = scratch
        self.count(results, name)
        if scratch:
            now = len(self.live_bytes)
            self.record(self.current + scratch, name)
            self.lifetimes.append(Lifetime(self.computed[-1] or name, scratch, now, now + 1, True))
        names = [self.allocate(nbytes) for nbytes in blocks]
        self.events += [Free(name) for name in reversed(names)]

    def _inside_known(self, op: Any, args: Any, kwargs: Any) -> InsideCall | None:
        """What a call of an operator of ours allocates one after the other, on CUDA.

        None where it does not run without memory, and for others: what these take is known as a
        number of bytes only.
        """
        if self.device != "cuda" or op not in kernels.IMPLEMENTATIONS:
            return None
        key = call_key(op, args, kwargs)
        if key not in self.known_calls:
            meter = CodeMeter(device=self.device, workspace=self.workspace)
            self.known_calls[key] = meter.inside(op, args, kwargs)
        return self.known_calls[key]

    def inside(self, op: Any, args: Any, kwargs: Any) -> InsideCall | None:
        """What an operator of ours does without memory, counted by this meter alone."""
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.ignore(given)
        if op in kernels.WORKSPACES:  # kernels that it runs are written now, unseen
            kernels.WORKSPACES[op](*args, **kwargs, measure=kernels.unmeasured)
        try:
            with Watching(self.call):
                made = kernels.IMPLEMENTATIONS[op](*args, **kwargs)
        except Exception as error:  # it may look at its data
            log.debug("%s is counted as one block: %s: %s", op, type(error).__name__, error)
            return None
        self.sweep()
        leaves = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        return InsideCall(tuple(self.events), tuple(self.names(leaves)), self.peak - self.current)

    def _add_inside(self, inside: InsideCall, results: list[torch.Tensor], buffer: str) -> None:
        """Its events; ``results`` take the names of those that were counted there."""
        named: dict[str, str] = {}
        for event in inside.events:
            if isinstance(event, Allocate):
                named[event.name] = self.allocate(event.nbytes)
            else:
                self.events.append(Free(named[event.name]))
        for tensor, name in zip(results, inside.results, strict=True):
            if name is not None and storage_key(tensor) not in self.live:
                self._add_tensor(tensor, buffer, named[name])

    def _asked(self, tensor: torch.Tensor) -> None:
        """Note a buffer that the code itself allocates."""
        storage = self.live.get(storage_key(tensor))
        name = None if storage is None else storage.name
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), str(tensor.dtype)
        self.buffers.append(CodeBuffer(name, size, stride, dtype, tensor.itemsize))

    def drop(self, tensor: torch.Tensor) -> None:
        """Take off what is freed, although something still refers to it."""
        gone = self.live.pop(storage_key(tensor), None)
        if gone is not None:
            self.free(gone)
        self.ignore([tensor])

    def sweep(self) -> None:
        """Take off what is gone; what others were given, or have passed on, counts to the end."""
        others, now = self.others, len(self.live_bytes)
        for key in [key for key, storage in self.live.items() if storage.is_gone()]:
            storage = self.live.pop(key)
            if key in others.passed:
                others.gone.append(storage)
                others.dropped.append(Dropped("", storage.nbytes, now))
            else:
                self.free(storage)
        for key in [key for key, (_, _, is_gone) in others.inputs.items() if is_gone()]:
            name, size, _ = others.inputs.pop(key)
            others.dropped.append(Dropped(name, size, now))

    def record(self, nbytes: int, buffer: str) -> None:
        """So many bytes are live, while the buffer is made, or what comes is given its name."""
        line = (self.code.line() if self.code is not None else None) or 0
        self.live_bytes.append(nbytes)
        origins = self.code.generated.origin_of if self.code is not None else {buffer: buffer}
        self.computed.append(origins.get(buffer, ""))
        if nbytes > self.peak:
            self.peak = nbytes
            there = (*self.live.values(), *self.others.gone)
            self.at_peak = tuple((self.label(s, line), s.nbytes) for s in there)

    def label(self, storage: _Buffer, line: int) -> str:
        """The FX node whose value a storage holds."""
        if storage.code is None:
            return storage.buffer
        here = storage.code is self.code
        return storage.code.origin(storage.buffer, line if here else float("inf"))

    def run(
        self,
        generated: Generated,
        filename: str,
        args: list[Any],
        fake: Any,
        graph: fx.Graph,
    ) -> Any:
        """Run the code generated for a graph and count.

        ``fake`` makes tensors without memory of its constants. What only data tells the size of is
        as large as it may be.
        """
        unknown = values_of_data(graph)
        code = RunningCode(generated, filename)
        constants = {
            name: fake(value) if isinstance(value, torch.Tensor) else value
            for name, value in generated.constants.items()
        }
        self.ignore(c for c in constants.values() if isinstance(c, torch.Tensor))
        self.buffers.clear()
        call = load_without_kernels(generated, constants, filename, self._asked)
        self.code = code

        def expected() -> Any:
            name = code.named_at.get(code.line() or 0, "")
            return unknown.get(generated.origin_of.get(name, name), lambda: None)()

        with Watching(self.call, expected):
            results = call(args)
        self.sweep()
        return results
