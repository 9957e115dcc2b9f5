"""Which memory a loop asks for, recorded while it runs on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from fxremat.compat.absent.pretending import CUDA
from fxremat.compat.absent.without_device import without_device
from fxremat.compat.tensors import is_fake, storage_watch
from fxremat.core.events import Allocate, Free

from ..allocator import EmptyCache, HeapEvent

Place = Literal["common", "graphs", "arena"]
"""Where a block lies: in the pool of everybody, in that of the graphs, or in the arena."""
Moment = Literal["forward", "backward", "optimizer", "other"]
"""What runs: a graph's forward or backward, an optimizer's step, or anything else."""
Holder = Literal["parameters", "states", "gradients", "graph", "libraries", "eager"]
"""Who holds a block."""
ARENA = "arena"
"""The name of the block that placed buffers lie in."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that is asked of the allocator: where, in which step, and what runs then."""

    event: HeapEvent
    place: Place
    step: int
    moment: Moment


@dataclass(frozen=True)
class LoopRecord:
    """All that a loop asked for, in order; ``holders`` say who holds each block, by its name."""

    happenings: tuple[Happening, ...]
    holders: dict[str, Holder]
    steps: int


Scratch = Callable[[Any, Any, Any], Sequence[int]]
"""Bytes of the blocks that a library call takes while it runs, of its op, arguments and keywords"""


@dataclass(frozen=True)
class Libraries:
    """What libraries take of the device, in bytes.

    Each of the threads that run forwards and backwards gets a ``workspace`` of cuBLAS with its
    first product of matrices, and holds it. While kernels run for the first time, ``tuning`` bytes
    are written over. ``scratch`` is that of other calls.
    """

    workspace: int = 0
    tuning: int = 0
    scratch: Scratch = lambda op, args, kwargs: ()


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm")
)
"""Ops that run in cuBLAS."""


@dataclass
class _Live:
    """A storage that is there until ``is_gone``, and the name of its block."""

    name: str
    is_gone: Callable[[], bool]


@dataclass
class LoopRecorder:
    """Records a loop that runs inside of `running`.

    A block has a name and as many holders as there are storages and runs of graphs that need it;
    with the last of them it is freed. ``step`` counts what `next_step` has begun.
    """

    libraries: Libraries = field(default_factory=Libraries)
    step: int = 0
    moment: Moment = "other"
    happenings: list[Happening] = field(default_factory=list)
    holders: dict[str, Holder] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)
    live: dict[int, _Live] = field(default_factory=dict)
    workspaces: set[Moment] = field(default_factory=set)
    tuned: set[Moment] = field(default_factory=set)
    paused: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, tensors have no memory, and what they would take on ``cuda:0`` is recorded."""
        hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        try:
            with without_device(self._seen, self._empty_cache):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def record(self) -> LoopRecord:
        """What has been recorded."""
        self.sweep()
        return LoopRecord(tuple(self.happenings), dict(self.holders), self.step + 1)

    def next_step(self) -> None:
        """A step begins."""
        self.sweep()
        self.step += 1

    @contextmanager
    def during(self, moment: Moment) -> Iterator[None]:
        """Inside, this is what runs."""
        self.sweep()
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.sweep()
            self.moment = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, tensors are made whose blocks are recorded by other means."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def allocate(self, nbytes: int, holder: Holder, place: Place = "common", name: str = "") -> str:
        """A block with one holder; its name."""
        name = name or f"{len(self.happenings)}"
        self._note(Allocate(name, nbytes), place)
        self.holders[name], self.places[name], self.held[name] = holder, place, 1
        return name

    def hold(self, name: str) -> str:
        """One holder more."""
        self.held[name] += 1
        return name

    def let_go(self, name: str) -> None:
        """One holder less."""
        self.held[name] -= 1
        if not self.held[name]:
            self._note(Free(name), self.places[name])

    def adopt(self, tensor: torch.Tensor, name: str) -> None:
        """The storage of a tensor is a holder of this block from now on."""
        key, is_gone = storage_watch(tensor)
        self.live[key] = _Live(self.hold(name), is_gone)

    def disown(self, tensor: torch.Tensor) -> None:
        """The storage of a tensor no longer holds its block."""
        gone = self.live.pop(storage_watch(tensor)[0], None)
        if gone is not None:
            self.let_go(gone.name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The block of a tensor; None where it has none on the device."""
        known = self.live.get(storage_watch(tensor)[0])
        return None if known is None else known.name

    def held_by(self, holder: Holder, tensors: Iterable[object]) -> None:
        """Say who holds the blocks of these tensors; the graphs' own stay theirs but gradients."""
        for tensor in tensors:
            name = self.name_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if name is not None:
                self.holders[name] = holder

    def sweep(self) -> None:
        """Free the blocks of storages that are gone."""
        for key in [key for key, one in self.live.items() if one.is_gone()]:
            self.let_go(self.live.pop(key).name)

    def use_workspace(self, thread: Moment | None = None) -> None:
        """A product of matrices runs in the thread of the forward, or of the backward.

        Without a ``thread``, in that of this moment.
        """
        if thread is None:
            thread = "backward" if self.moment == "backward" else "forward"
        if self.libraries.workspace and thread not in self.workspaces:
            self.workspaces.add(thread)
            self.allocate(self.libraries.workspace, "libraries")

    def _note(self, event: HeapEvent, place: Place) -> None:
        self.happenings.append(Happening(event, place, self.step, self.moment))

    def _empty_cache(self) -> None:
        self.sweep()
        self._note(EmptyCache(), "common")

    def empty_pool(self) -> None:
        """The pool of the graphs gives back what nobody holds."""
        self.sweep()
        self._note(EmptyCache(), "graphs")

    def _seen(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An op has run: what was dropped before is freed, and new storages are allocated."""
        if self.paused:
            return
        self.sweep()
        tensors = [one for one in pytree.tree_leaves(result) if _is_on_device(one)]
        if op in _PRODUCTS and tensors:
            self.use_workspace()
        if tensors:
            inside = self.libraries.scratch(op, args, kwargs)
            taken = [self.allocate(nbytes, "libraries") for nbytes in inside]
            for name in taken:
                self.let_go(name)
        for tensor in tensors:
            key, is_gone = storage_watch(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            if key not in self.live and nbytes:
                self.live[key] = _Live(self.allocate(nbytes, "eager"), is_gone)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.sweep()
        self.moment = "optimizer"
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.held_by("gradients", [one.grad for one in parameters])

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.sweep()
        self.moment = "other"
        self.held_by("states", pytree.tree_leaves(list(map(dict, optimizer.state.values()))))


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_fake(value) and value.device == CUDA
