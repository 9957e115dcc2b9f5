"""Pipelines of ``torch.distributed.pipelining``: the one whose step runs, and what it holds.

A schedule runs micro-batches through the stages of a rank. Which of them wait, and in what buffers
activations and gradients arrive, is in its attributes; it is found by the interpreter's stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxremat.compat.dynamo import unwrapped
from fxremat.compat.measuring import random_state_kept
from fxremat.compat.tensors import apart_from_tracing, on_device_without_memory, storage_key


@dataclass(frozen=True)
class RunningPipeline:
    """A schedule whose step runs; ``current`` is the stage whose forward does, of its ``stages``.

    ``given`` is what a micro-batch gives to this stage, ``first_given`` what it gives to the first,
    ``target`` what its loss is given, and ``batch`` what the step is given for all of them. In the
    ``order`` of a step each entry says whether it is a forward or a backward, and of which stage:
    those of a stage go backward in the order in which they came. With ``keeps_sent`` what is sent
    lives until the step ends, with ``keeps_outputs`` what the last stage gives.
    """

    stages: tuple[Any, ...]
    current: int
    micro_batches: int
    order: tuple[tuple[bool, int], ...]
    given: tuple[Any, ...]
    first_given: tuple[Any, ...]
    batch: tuple[torch.Tensor, ...]
    target: Any
    loss: Any
    keeps_sent: bool
    keeps_outputs: bool


def running_pipeline() -> RunningPipeline | None:
    """The innermost one that runs a stage forward with a backward to come; None without any."""
    stages_of_torch = sys.modules.get("torch.distributed.pipelining.stage")
    schedules_of_torch = sys.modules.get("torch.distributed.pipelining.schedules")
    if stages_of_torch is None or schedules_of_torch is None:
        return None
    # A frame that was asked for its locals keeps them alive: the user's are not asked.
    files = {stages_of_torch.__file__, schedules_of_torch.__file__}
    stage, given, micro = None, (), {}
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename not in files:
            continue
        caller, name = frame.f_locals.get("self"), frame.f_code.co_name
        if stage is None and isinstance(caller, stages_of_torch._PipelineStageBase):
            args = next((frame.f_locals[n] for n in _GIVEN if n in frame.f_locals), None)
            if args is not None:
                stage, given = caller, args
        elif stage is not None and isinstance(caller, schedules_of_torch._PipelineSchedule):
            if name == "_step_microbatches":
                micro = frame.f_locals
            elif name == "step":
                return _running(schedules_of_torch, caller, stage, given, micro, frame.f_locals)
    return None


_GIVEN = ("composite_args", "inference_args", "args")
"""Names of what a stage gives its module: in a step, and when sizes are looked for before."""


def _running(
    torchs: Any, schedule: Any, stage: Any, given: Any, micro: Any, step: Any
) -> RunningPipeline | None:
    several = isinstance(schedule, torchs.PipelineScheduleMulti)
    stages = tuple(schedule._stages) if several else (schedule._stage,)
    if not schedule._has_backward or stage not in stages:
        return None
    targets, args = micro.get("target_mbs"), micro.get("arg_mbs")
    batch = pytree.tree_leaves([step.get(name) for name in ("args", "kwargs", "target")])
    return RunningPipeline(
        stages,
        stages.index(stage),
        schedule._n_microbatches,
        tuple(_order(torchs, schedule, stages)),
        tuple(given),
        tuple(args[0]) if args else (),
        tuple(x for x in batch if isinstance(x, torch.Tensor)),
        targets[0] if targets else None,
        schedule._loss_fn,
        keeps_sent=not isinstance(schedule, torchs.Schedule1F1B),
        keeps_outputs=bool(step.get("return_outputs", True)),
    )


def _order(torchs: Any, schedule: Any, stages: tuple[Any, ...]) -> Iterator[tuple[bool, int]]:
    """What a rank runs; without an order all forwards come first, which holds the most.

    A backward in two halves holds what it needs until its second half. Numbers of micro-batches
    are not asked: torch counts those of Schedule1F1B's last stage from one.
    """
    orders = schedule.pipeline_order or {}
    several = isinstance(schedule, torchs.PipelineScheduleMulti)
    actions = orders.get(schedule.rank if several else stages[0].stage_index)
    if not actions:
        everything = [k for k in range(len(stages)) for _ in range(schedule._n_microbatches)]
        yield from [(True, k) for k in everything]
        yield from [(False, k) for k in reversed(everything)]
        return
    kinds = torchs._ComputationType
    forward, ends = kinds.FORWARD, (kinds.FULL_BACKWARD, kinds.BACKWARD_WEIGHT)
    numbers = {stage.stage_index: k for k, stage in enumerate(stages)}
    for action in actions:
        for one in () if action is None else getattr(action, "sub_actions", None) or (action,):
            if one.computation_type == forward or one.computation_type in ends:
                yield one.computation_type == forward, numbers[one.stage_index]


def received_by(stage: Any) -> list[torch.Tensor]:
    """The buffers in which a stage gets activations and gradients, of all micro-batches."""
    infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    buffers = [getattr(info, "buffer", None) for each in infos for info in each]
    return [one for one in buffers if isinstance(one, torch.Tensor)]


@dataclass(frozen=True)
class ShownStage:
    """Bytes of one micro-batch at a stage: what it is given and gives, and beside these what the
    loss saves until its backward, and what its value takes that the schedule keeps."""

    given: int
    result: int
    loss: int = 0
    value: int = 0


def shown_stages(pipeline: RunningPipeline) -> list[ShownStage]:
    """What a micro-batch takes at each stage of the rank, without what its module saves.

    Stages run uncompiled on tensors without memory, and nothing of them changes. The loss runs on
    zeros: its kernels may keep more than the sizes of their results say. Where it is not known what
    a stage is given, it is what the one before gives. Raises whatever a module raises that cannot
    run so.
    """
    found, force_eager = [], torch.compiler.set_stance("force_eager")
    with apart_from_tracing(), force_eager, random_state_kept(), torch.enable_grad():
        for stage, given, output in _shown(pipeline, FakeTensorMode(allow_non_fake_inputs=True)):
            loss = (0, 0)
            if stage.is_last and pipeline.target is not None:
                loss = _kept_by_loss(pipeline.loss, output, pipeline.target)
            found.append(ShownStage(_bytes(given), _bytes(output), *loss))
    return found


def _shown(pipeline: RunningPipeline, mode: Any) -> list[tuple[Any, Any, Any]]:
    """Each stage, what it is given and what it gives; these have no memory."""
    found, everything = [], nn.ModuleList(one.submod for one in pipeline.stages)
    with mode, on_device_without_memory(everything, (pipeline.given, pipeline.first_given)) as made:
        current, first = made
        given = first
        for k, stage in enumerate(pipeline.stages):
            if k == pipeline.current:
                given = current
            elif stage.is_first:
                given = first
            output = stage.submod(*given)
            found.append((stage, given, output))
            leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            given = tuple(x.detach().requires_grad_(x.requires_grad) for x in leaves)
    return found


def _kept_by_loss(loss: Any, shown: Any, target: Any) -> tuple[int, int]:
    """Bytes that a loss saves for its backward beside what it is given, and those of its value."""

    def zeros(like: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return made.requires_grad_(like.requires_grad)

    output, saved = pytree.tree_map_only(torch.Tensor, zeros, shown), list[torch.Tensor]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(output, target)
    there = [output, target, value]
    return _bytes([*saved, *there]) - _bytes(there), _bytes(value)


def _bytes(values: Any) -> int:
    """Of the storages of all tensors among some values."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    return sum({storage_key(x): x.untyped_storage().nbytes() for x in tensors}.values())


def is_stage(pipeline: RunningPipeline, module: nn.Module) -> bool:
    """Whether a module is the whole of the current stage, however that is wrapped."""
    submod = pipeline.stages[pipeline.current].submod
    return module in (submod, unwrapped(submod))
