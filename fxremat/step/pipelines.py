"""A rank's part of a pipeline: which micro-batches wait at once, and what lives around them.

A schedule of ``torch.distributed.pipelining`` says in which order a rank runs micro-batches forward
and backward. So the points of its step are known when a part of a stage is compiled, and with them
how many runs of it wait. Around them live the buffers that activations and gradients arrive in, one
for each micro-batch, what a stage has given and keeps, what the loss saves, and what is being sent.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.compat.pipelining import (
    ShownStage,
    is_stage,
    received_by,
    running_pipeline,
    shown_stages,
)
from fxremat.core.step import StepPoint
from fxremat.memory.storages import storage_bytes
from fxremat.step.versions import Part

log = logging.getLogger(__name__)

SENT_AT_ONCE = 1
"""Gradients on their way where torch's schedule waits for each: its list of sends holds one."""


@dataclass(frozen=True)
class StageOfRank:
    """A stage of this rank: how often a micro-batch runs the part in it, and bytes of each.

    What a micro-batch is given arrives from the stage before, and as many bytes go back. What it
    gives goes to the next one, or to the loss.
    """

    blocks: int
    first: bool
    last: bool
    shown: ShownStage


@dataclass(frozen=True)
class Pipeline:
    """What a rank runs in a step of a schedule, seen from one part; ``whole`` if it is the stage.

    ``order`` and the rest are as in `compat.RunningPipeline`. ``buffers`` give the tensors in which
    things arrive, once they exist. ``gathered_bytes`` are the parameters of a part that FSDP2
    shards, whole; 0 where it does not shard the stage. Where it ``gives_back``, they are gathered
    for each forward anew.
    """

    stages: tuple[StageOfRank, ...]
    order: tuple[tuple[bool, int], ...]
    micro_batches: int
    whole: bool
    current: int
    keeps_sent: bool
    keeps_outputs: bool
    batch: tuple[torch.Tensor, ...] = field(compare=False)
    modules: tuple[nn.Module, ...] = field(compare=False)
    buffers: Callable[[], list[torch.Tensor]] = field(compare=False)
    gathered_bytes: int = 0
    gives_back: bool = True

    @property
    def runs(self) -> int:
        """How many runs of the part wait at once, of all micro-batches."""
        waiting = most = 0
        for forward, stage in self.order:
            waiting += self.stages[stage].blocks * (1 if forward else -1)
            most = max(most, waiting)
        return most

    @property
    def buffers_size(self) -> int:
        """Of all buffers in which activations and gradients arrive, without what the part is given.

        Negative where that is no buffer, but a part of the batch.
        """
        given = sum(one.shown.given for one in self.stages if not one.first)
        results = sum(one.shown.result for one in self.stages if not one.last)
        own = self.stages[self.current].shown.given if self.whole else 0
        return self.micro_batches * (given + results) - own

    def first_sent(self, stage: int, ended: int) -> int:
        """Results that are sent, and stay beyond their backward, once so many have ``ended``.

        1F1B keeps what it sent last before its first backward, until it has no forward left.
        """
        if self.keeps_sent or self.stages[stage].last:
            return 0
        first_backward = self.order.index((False, stage))
        sent = self.order[:first_backward].count((True, stage)) - 2  # the last one is sent later
        return int(0 <= sent < ended < self.micro_batches - sent - 1)

    def arriving(self, incoming: int) -> int:
        """Of the gradients of a run's results, those that lie in buffers where it is the first that
        goes backward."""
        return 0 if self.stages[self.current].last else incoming

    @property
    def blocks(self) -> int | None:
        """How many runs of a micro-batch wait, if each has places of its own; None if they do not.

        A run has the lowest place that is free. With one stage on the rank, part k of a micro-batch
        is at place k, or so many times ``blocks`` behind it.
        """
        return self.stages[0].blocks if len(self.stages) == 1 else None

    def points(
        self, parts: Sequence[Part], held_bytes: int, part_of: Sequence[int]
    ) -> tuple[StepPoint, ...]:
        """The points of a step; ``held_bytes`` are live all the time beside a part's inputs.

        ``part_of`` says of which of the ``parts`` the run at each place is.
        """
        walk = _Walk(self, parts, part_of, held_bytes)
        for forward, stage in self.order:
            (walk.forward if forward else walk.backward)(stage)
        walk.end()
        return tuple(walk.points)


@dataclass
class _StageSoFar:
    """What a stage holds at some point of the step; ``runs`` are those of its micro-batches that
    wait, the oldest first. ``ended`` counts its backward passes."""

    runs: deque[list[int]] = field(default_factory=deque)
    outputs: int = 0
    losses: int = 0
    sent: int = 0
    ended: int = 0


@dataclass
class _Walk:
    """A step of a rank, from its beginning on."""

    pipeline: Pipeline
    parts: Sequence[Part]
    part_of: Sequence[int]
    held_bytes: int
    points: list[StepPoint] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    so_far: defaultdict[int, _StageSoFar] = field(default_factory=lambda: defaultdict(_StageSoFar))
    """Of each stage."""
    left: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of the gradients of each part that has gone backward."""
    gathered: set[tuple[int, int]] = field(default_factory=set)
    """Parts whose parameters FSDP2 has gathered: in a stage they stay so from their first backward
    on, until they next go forward, and gradients are not reduced before the step ends."""

    def beside(self, *parts: tuple[int, int]) -> int:
        """Of gathered parameters: those of others than the first of the ``parts``, which runs."""
        return len((self.gathered | {*parts}) - {parts[0]}) * self.pipeline.gathered_bytes

    def outside(self) -> int:
        """Live now beside what runs have saved."""
        own = self.parts[0].interface
        total = self.held_bytes + own.resident - own.given
        for k, one in enumerate(self.pipeline.stages):
            now = self.so_far[k]
            outputs = now.outputs + self.pipeline.first_sent(k, now.ended)
            total += outputs * one.shown.result
            total += len(now.runs) * one.shown.loss
            total += now.losses * one.shown.value
            total += now.sent * one.shown.given
        return total - self.in_buffers() + sum(self.left.values())

    def in_buffers(self) -> int:
        """Of what runs are given, and hold while they wait, what arrived in a buffer."""
        if self.pipeline.whole or self.pipeline.blocks is None or self.pipeline.stages[0].first:
            return 0
        given = self.pipeline.stages[0].shown.given
        return given * sum(run % self.pipeline.blocks == 0 for run in self.waiting)

    def stays(self, stage: int, run: int) -> int:
        """Bytes of the gradients of a run that stay."""
        left, one = self.parts[self.part_of[run]].interface.left, self.pipeline.stages[stage]
        if self.pipeline.whole and not one.first:  # the gradient of its input is sent
            left -= one.shown.given
        return max(0, left)

    def forward(self, stage: int) -> None:
        """A micro-batch goes forward through a stage."""
        runs = list[int]()
        for part in range(self.pipeline.stages[stage].blocks):
            run = next(k for k in range(len(self.waiting) + 1) if k not in self.waiting)
            given = self.parts[self.part_of[run]].interface.given
            outside = self.outside() + given + self.beside((stage, part))
            self.points.append(StepPoint(outside, tuple(self.waiting), run, "forward"))
            gather = self.gathered.discard if self.pipeline.gives_back else self.gathered.add
            gather((stage, part))
            self.waiting.append(run)
            runs.append(run)
        now = self.so_far[stage]
        now.runs.append(runs)
        now.outputs += 1
        now.losses += 1
        self.points.append(StepPoint(self.outside(), tuple(self.waiting)))

    def backward(self, stage: int) -> None:
        """The micro-batch that came first of those that wait goes backward."""
        one, now = self.pipeline.stages[stage], self.so_far[stage]
        runs = now.runs.popleft()
        value = one.shown.value if one.last else 0  # as much is the loss's own gradient
        if one.last:  # the loss goes first
            incoming = self.parts[self.part_of[runs[-1]]].interface.incoming
            self.points.append(StepPoint(self.outside() + value + incoming, tuple(self.waiting)))
        for part, run in reversed(list(enumerate(runs))):
            arrives = part == one.blocks - 1 and not one.last  # in a buffer
            incoming = 0 if arrives else self.parts[self.part_of[run]].interface.incoming
            in_buffers = self.in_buffers()
            self.waiting.remove(run)
            outside = self.outside() + value + incoming - in_buffers + self.in_buffers()
            outside += self.beside((stage, part), (stage, max(0, part - 1)))  # gathered ahead
            self.gathered.add((stage, part))
            self.points.append(StepPoint(outside, tuple(self.waiting), run, "backward"))
            self.left[stage, part] = self.stays(stage, run)
        kept = self.pipeline.keeps_outputs if one.last else self.pipeline.keeps_sent
        now.outputs -= 0 if kept else 1
        now.ended += 1
        if not one.first:
            most = len(self.pipeline.order) if self.pipeline.keeps_sent else SENT_AT_ONCE
            now.sent = min(most, now.sent + 1)

    def end(self) -> None:
        """What the last stage has given is put together."""
        last = [one for one in self.pipeline.stages if one.last and self.pipeline.keeps_outputs]
        merged = self.pipeline.micro_batches * sum(one.shown.result for one in last)
        # A part's gradients are copied, and reduced to a part.
        gathered = (len(self.gathered) + 2) * self.pipeline.gathered_bytes
        outside = self.outside() + gathered + merged
        self.points.append(StepPoint(outside, tuple(self.waiting)))


def pipeline_of(
    part: nn.Module, device: torch.device, alike: Callable[[nn.Module], int]
) -> Pipeline | None:
    """The pipeline in whose step ``part`` is compiled now; None where there is none.

    ``alike`` counts the modules like the part in the module of a stage.
    """
    found = running_pipeline()
    if found is None:
        return None
    try:
        shown = shown_stages(found)
    except Exception as error:  # whatever a module raises that runs without memory
        log.warning("fxremat: pipeline stages are taken to give as much as they get: %s", error)
        leaves = [x for x in pytree.tree_leaves(found.given) if isinstance(x, torch.Tensor)]
        given = sum(x.nbytes for x in leaves if storage_bytes([x], device))
        shown = [ShownStage(given, given, given, given) for _ in found.stages]
    stages = tuple(
        StageOfRank(alike(one.submod), one.is_first, one.is_last, figures)
        for one, figures in zip(found.stages, shown, strict=True)
    )
    return Pipeline(
        stages,
        found.order,
        found.micro_batches,
        is_stage(found, part),
        found.current,
        found.keeps_sent,
        found.keeps_outputs,
        found.batch,
        tuple(one.submod for one in found.stages),
        partial(_buffers, tuple(map(ref, found.stages))),
    )


def _buffers(stages: Iterable[ref[Any]]) -> list[torch.Tensor]:
    known = (one() for one in stages)
    return [tensor for one in known if one is not None for tensor in received_by(one)]
