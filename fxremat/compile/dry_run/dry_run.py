"""The dry run: Inductor's own code, run on tensors without memory before kernels are compiled.

Inductor generates its code for the forward and the backward module, kernels left uncompiled. The
code then runs: what it allocates, what it hands to library calls and what it drops is counted as
it happens, on fake tensors. The peak is that of the real step, down to the byte, for as long as
the libraries' own scratch memory is known.

Results are kept on disk. Who is told the least number that can be met asks for it next: the
planner then comes to the plans that it has been at before, and what they take is known already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat import runtime
from fxremat.compat.inductor.generated_code import Generated, code_key, generate
from fxremat.compat.inductor.kernels import begin_kernels
from fxremat.compat.inductor.lowered_ahead import hand_over as torch_hand_over
from fxremat.compat.joint_graph import name_in_forward
from fxremat.compat.sizes import planned_input, planned_inputs
from fxremat.compat.tensors import storage_key, without_memory
from fxremat.compile.dry_run.meter import CodeMeter, Dropped, Workspace
from fxremat.core.events import Allocate, Event, Free, Given, RunEvents
from fxremat.core.json_data import InvalidData, from_data, to_data
from fxremat.core.timeline import Lifetime
from fxremat.disk_cache import Answers, Question
from fxremat.memory.measured_peak import uncollected
from fxremat.passes.joint_graph import is_fetch, is_tensor
from fxremat.passes.memory_estimation import TANGENTS, nbytes


@dataclass(frozen=True)
class AllocatorEvents:
    """What a step asks of the device's allocator, first of all for what is resident.

    The first ``forward_events`` come in the forward or before it. ``as_run`` has the events of a
    run beside others; its inputs do not say which of them are its own.
    """

    events: tuple[Event, ...] = ()
    forward_events: int = 0
    as_run: RunEvents | None = None

    def with_between(self, nbytes: int) -> AllocatorEvents:
        """The same with so many bytes that are allocated between forward and backward only."""
        if not self.events:
            return self
        before, name = self.forward_events, f"{len(self.events)}"
        other = (Allocate(name, nbytes), Free(name))
        return replace(self, events=(*self.events[:before], *other, *self.events[before:]))


@dataclass(frozen=True)
class DryRun:
    """One training step of the generated code.

    A step of ``live_bytes`` is an allocation or a library call; the first ``forward_steps`` are the
    forward's. ``computed`` is the FX node that is computed then, "" where it has none. ``at_peak``
    are the FX nodes whose storages are live at the peak, with their bytes. ``scratch`` gives the
    workspace of a library call by its FX node, in the layout that Inductor chose. ``saved_bytes``
    are live between forward and backward, inputs among them, and ``left_bytes`` at the end.
    ``lifetimes`` say when each storage is there: what is live at one step adds up to its
    ``live_bytes``. ``dropped`` is what others pass on to the step, or are given, and nobody needs
    any more if they drop it. ``code`` is the `GeneratedStep`, None where the answer was known.
    """

    peak_bytes: int
    live_bytes: tuple[int, ...]
    at_peak: tuple[tuple[str, int], ...]
    scratch: dict[str, int]
    computed: tuple[str, ...] = field(default=(), repr=False)
    forward_steps: int = 0
    saved_bytes: int = 0
    left_bytes: int = 0
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    dropped: tuple[Dropped, ...] = ()
    allocator: AllocatorEvents = field(default=AllocatorEvents(), repr=False, compare=False)
    code: Any = field(default=None, repr=False, compare=False)

    @property
    def events(self) -> tuple[Event, ...]:
        """What is asked of the device's allocator."""
        return self.allocator.events

    def live_where_dropped(self, inputs: Collection[str]) -> tuple[int, ...]:
        """Live bytes of the backward where others drop what they pass on, ``inputs`` among it."""
        gone = [one for one in self.dropped if not one.name or one.name in inputs]
        return tuple(
            nbytes - sum(one.nbytes for one in gone if one.since <= step)
            for step, nbytes in enumerate(self.live_bytes)
            if step >= self.forward_steps
        )

    def with_between(self, nbytes: int) -> DryRun:
        """The same, with so many bytes that are live between forward and backward only."""
        if not nbytes:
            return self
        there, steps = self.saved_bytes + nbytes, self.forward_steps
        peak, at_peak = self.peak_bytes, self.at_peak
        if there > peak:
            peak, at_peak = there, ((TANGENTS, nbytes),)
        return replace(
            self,
            peak_bytes=peak,
            at_peak=at_peak,
            live_bytes=(*self.live_bytes[:steps], there, *self.live_bytes[steps:]),
            computed=(*self.computed[:steps], TANGENTS, *self.computed[steps:]),
            allocator=self.allocator.with_between(nbytes),
            forward_steps=steps + 1,
            lifetimes=(
                *(one.with_step_before(steps) for one in self.lifetimes),
                Lifetime(TANGENTS, nbytes, steps, steps + 1),
            ),
            dropped=tuple(replace(one, since=one.since + 1) for one in self.dropped),
        )

    def hand_over(self) -> None:
        """Have the code compiled as it is, where it came with kernels."""
        halves = () if self.code is None else (self.code.forward_code, self.code.backward_code)
        for half in halves:
            if half.lowered is not None:
                torch_hand_over(half.lowered)


@dataclass(frozen=True)
class GeneratedStep:
    """The code of a training step; it can run at several sizes (`compat.sizes.sizes_at`).

    ``saved`` are the forward's results that the backward reads, by their names.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    saved: dict[str, int]
    forward_code: Generated
    backward_code: Generated

    @uncollected()
    def dry_run(self, device: str, workspace: Workspace) -> DryRun:
        """One step, counted in bytes of ``device``.

        ``workspace`` gives the scratch memory of a library call. The inputs of the forward are
        there throughout, its first ``num_fwd_outputs`` results and the incoming gradients are the
        caller's, everything else is dropped when the code drops it.
        """
        return _run(self, CodeMeter(device=device, workspace=workspace))


@uncollected()  # a fifth of the time; what the code drops needs no collector
def generate_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    with_kernels: bool = False,
) -> GeneratedStep:
    """The code of both graphs of a training step.

    Only code that comes ``with_kernels`` can be handed over; it takes longer. They begin to be
    compiled at once: the forward's while the backward's code is generated.
    """
    first = generate(
        forward, is_backward=False, seen_outputs=num_fwd_outputs, with_kernels=with_kernels
    )
    if with_kernels:
        begin_kernels(first)
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    saved = {
        node.name: index
        for index, node in enumerate(results)
        if index >= num_fwd_outputs and isinstance(node, fx.Node)
    }
    strides = {name: s for name, i in saved.items() if (s := first.strides[i]) is not None}
    second = generate(backward, is_backward=True, input_strides=strides, with_kernels=with_kernels)
    if with_kernels:
        begin_kernels(second)
    return GeneratedStep(forward, backward, num_fwd_outputs, saved, first, second)


def dry_run_once(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    directory: Path,
    num_fwd_outputs: int,
    device: str,
    workspace: Workspace,
    with_kernels: bool = False,
    card: str | None = None,
) -> DryRun:
    """The code generated and run, or what that gave for the same graphs before.

    Equal are graphs that Inductor would take from its own cache, under the same configuration, in
    the same version of torch; the workspace is taken to be that of the device. ``card`` is the name
    of one that is planned for although it is not here.
    """
    question = _question(forward, backward, num_fwd_outputs, card or device)
    answers = Answers(directory)
    with suppress(InvalidData):
        return from_data(DryRun, answers.read(question))
    step = generate_step(
        forward, backward, num_fwd_outputs=num_fwd_outputs, with_kernels=with_kernels
    )
    found = step.dry_run(device, workspace)
    answers.keep(question, to_data(replace(found, code=None)))
    return found


def _question(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, device: str
) -> Question | None:
    """Everything that a dry run depends on; None where that cannot be named."""
    keys = [code_key(forward, is_backward=False), code_key(backward, is_backward=True)]
    if None in keys:
        return None
    return {
        "halves": keys,
        "num_fwd_outputs": num_fwd_outputs,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _run(step: GeneratedStep, meter: CodeMeter) -> DryRun:
    forward, backward, outputs = step.forward, step.backward, step.num_fwd_outputs
    with without_memory() as fake:
        primals = planned_inputs(forward.graph)
        meter.watch(primals)
        arguments = list(primals.values())
        returned = list(meter.run(step.forward_code, "<forward>", arguments, fake, forward.graph))
        forward_buffers = tuple(meter.buffers)
        kept, given = returned[:outputs], dict(primals)
        meter.pass_on(kept)
        for name, index in step.saved.items():
            given[name] = returned[index]
        results, again = meter.names(kept), meter.names(given.values())
        del returned, arguments
        passed = _pass_on(meter, backward, given, step.saved)
        forward_steps, saved, events = len(meter.live_bytes), meter.current, len(meter.events)
        tangents = [passed[name] for name in passed if name not in given]
        meter.pass_on(tangents)
        read_again, incoming = passed.keys() & primals.keys(), meter.names(tangents)
        arguments, names = list(passed.values()), list(primals)
        del given, kept, tangents, passed, primals
        gradients = list(
            meter.run(step.backward_code, "<backward>", arguments, fake, backward.graph)
        )
        gradient_of = dict(zip(names, meter.names(gradients), strict=False))
    resident = resident_inputs(forward, meter.device)
    inputs = tuple(
        Given(size, again=name in read_again, gradient=gradient_of.get(name))
        for name, size in resident
    )
    run = _as_run(meter.events, events, inputs, results, again, incoming)
    run = replace(run, forward_buffers=forward_buffers, backward_buffers=tuple(meter.buffers))
    there = [Allocate(name, size) for name, size in resident]
    allocator = AllocatorEvents((*there, *meter.events), len(there) + events, run)
    total, end = sum(size for _, size in resident), len(meter.live_bytes)
    return DryRun(
        peak_bytes=meter.peak + total,
        live_bytes=tuple(total + n for n in meter.live_bytes),
        computed=tuple(meter.computed),
        at_peak=tuple(resident) + meter.at_peak,
        scratch=meter.scratch,
        forward_steps=forward_steps,
        saved_bytes=total + saved,
        left_bytes=total + meter.current,
        lifetimes=(
            *(Lifetime(name, size, 0, end) for name, size in resident),
            *meter.lifetimes,
            *map(meter.lifetime, (*meter.others.gone, *meter.live.values())),
        ),
        dropped=tuple(meter.others.dropped),
        allocator=allocator,
        code=step,
    )


def _as_run(
    events: list[Event],
    forward_events: int,
    inputs: tuple[Given, ...],
    results: list[str | None],
    again: list[str | None],
    incoming: list[str | None],
) -> RunEvents:
    """The events as those of a run; incoming gradients are allocated by others."""
    asked = {e.name: e.nbytes for e in events if isinstance(e, Allocate)}
    forward, backward = events[:forward_events], events[forward_events:]
    return RunEvents(
        forward=tuple(e for e in forward if not isinstance(e, Allocate) or e.name not in incoming),
        backward=tuple(backward),
        inputs=inputs,
        results=tuple(name for name in results if name is not None),
        again=tuple(name for name in results if name is not None and name in again),
        incoming=tuple((name, asked[name]) for name in incoming if name is not None),
    )


def resident_inputs(forward: fx.GraphModule, device: str) -> list[tuple[str, int]]:
    """The inputs that are there throughout, and their bytes; what is fetched lives on the host."""
    return [
        (node.name, nbytes(node.meta["val"]))
        for node in forward.graph.find_nodes(op="placeholder")
        if is_tensor(node)
        and node.meta["val"].device.type == device
        and not any(user.target is runtime.to_device or is_fetch(user) for user in node.users)
    ]


def _pass_on(
    meter: CodeMeter, backward: fx.GraphModule, given: dict[str, Any], saved: Iterable[str]
) -> dict[str, Any]:
    """The backward's arguments: what the forward saved, under new names, and the gradients."""
    for name in saved:
        if isinstance(given[name], torch.Tensor):
            entry = meter.live.get(storage_key(given[name]))
            if entry is not None:
                entry.buffer, entry.code = name, None
    meter.code = None
    arguments = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        name = name_in_forward(node)
        argument = given[name] if name in given else planned_input(node.meta.get("val"))
        if name not in given and isinstance(argument, torch.Tensor):
            meter.count([argument], name)
        arguments[name] = argument
    return arguments
