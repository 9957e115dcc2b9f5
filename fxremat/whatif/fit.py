"""`fit`: the largest batch, or the longest sequence, that trains within a number of bytes.

The step is traced once, with what varies as symbols (`fxremat.whatif.symbolic_step`); what it
takes is then asked at one size after the other, for torch's own compile, for checkpointing of every
block, and for fxremat. No byte of the model is in memory, and the device need not be here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.dynamo import checkpointed_regions, mark_dynamic, with_stack_room
from fxremat.compat.joint_graph import torch_partition
from fxremat.compat.tensors import (
    apart_from_tracing,
    fake_mode_of,
    fake_tensors,
    on_host_without_memory,
)
from fxremat.compile import session
from fxremat.compile.draft import Draft
from fxremat.compile.driver import generating, patches_for, total_bytes, traced
from fxremat.compile.request import request_for
from fxremat.compile.tracing import Ended, compile_until_ended
from fxremat.cost.device import DeviceSpec, absent_card, device_spec
from fxremat.errors import CannotVary, InvalidOption, NotTraceable
from fxremat.memory.measured_peak import uncollected
from fxremat.memory.optimizers import OPTIMIZERS, Held, held_by
from fxremat.options import parse_options
from fxremat.report.front import Dot, draw_fit
from fxremat.sizes import format_bytes
from fxremat.training.blocks import are_alike, checkpointed, repeated_blocks, shortened
from fxremat.whatif.device import absent
from fxremat.whatif.extrapolation import Line, PlannedSteps, TorchSteps
from fxremat.whatif.largest_size import WAYS, Point, Way, points_by_torch, points_by_us
from fxremat.whatif.symbolic_step import Sizes, SymbolicStep, symbolic_step

log = logging.getLogger(__name__)

Places = Sequence[tuple[int, int]]
"""What a size is of: an input, by its position, and a dimension of it."""


@dataclass(frozen=True)
class Fit:
    """What fits: ``rows`` are the largest sizes, ``points`` all that were looked at and fit.

    ``held_bytes`` are the optimizer's states and what no graph sees; ``tuning_bytes`` are left to
    the first step, in which kernels are tuned. ``plain_bytes`` is the peak of torch's own compile
    at the sizes that were given, with what is held; None where it was not looked for: nothing
    varies, or the weights alone exceed the budget. ``blocks`` are what the model repeats; where
    ``studied_blocks`` are fewer, peaks and times are those of steps with so many, continued.
    """

    device: str
    budget_bytes: int
    weights_bytes: int
    optimizer: Held
    held_bytes: int
    tuning_bytes: int
    plain_bytes: int | None
    traced: Sizes
    blocks: int
    studied_blocks: tuple[int, ...]
    rows: tuple[Point, ...]
    points: tuple[Point, ...]

    def largest(self, what: str, way: Way = "fxremat") -> Point:
        """The largest size that fits with one way to train."""
        return next(row for row in self.rows if row.what == what and row.way == way)

    def at(self, what: str, size: int, way: Way = "fxremat") -> Point | None:
        """What one way takes at a size; None where that was not looked at, or does not fit."""
        asked = what, way, size
        return next((one for one in self.points if (one.what, one.way, one.size) == asked), None)

    def fastest(self, what: str, way: Way = "fxremat") -> Point:
        """The size with the most of them a second, of those that were looked at."""
        seen = [one for one in (*self.points, *self.rows) if (one.what, one.way) == (what, way)]
        return max(seen, key=lambda one: one.per_second)

    def picture(self) -> str:
        """SVG text: peak and throughput over each size, a line for each way to train."""
        found: dict[str, dict[str, list[Dot]]] = {}
        for one in sorted(self.points, key=lambda one: (WAYS.index(one.way), one.size)):
            dot = Dot(one.size, one.peak_bytes + self.held_bytes, one.per_second)
            found.setdefault(one.what, {}).setdefault(one.way, []).append(dot)
        return draw_fit(
            f"{self.device}, {format_bytes(self.budget_bytes)}", found, self.budget_bytes
        )


def fit(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    vary: Mapping[str, Places],
    memory_budget: int | str | None = None,
    device: str | None = None,
    optimizer: str = "none",
    options: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> Fit:
    """The largest sizes at which ``model(*inputs)`` trains within ``memory_budget``.

    Each name in ``vary`` is one size: the dimensions of the inputs it gives, as ``{"batch":
    [(0, 0), (1, 0)]}``. It is looked for with the others as they are. ``device`` names a card,
    which need not be here; by default it is that of `fxremat.device.absent`, else the CPU. The loss
    is what the model returns, its ``loss``, or the sum of its results.

    Of a model that repeats many alike blocks, few are studied, and what they take is continued in a
    straight line; ``whole`` studies all of them, which may take many minutes.

    Raises `CannotVary` where an input has no such dimension, or the model fixes it, `NotTraceable`
    where the step is not one graph, and `InvalidOption`.
    """
    if optimizer not in OPTIMIZERS:
        raise InvalidOption("optimizer", optimizer, "a known optimizer", tuple(OPTIMIZERS))
    given = dict(options or {})
    if memory_budget is not None:
        given["memory_budget"] = memory_budget
    with _tensors_for(device):
        return _Fitting(model, tuple(inputs), dict(vary), optimizer, given, whole).run()


_HOST = torch.device("cpu")


def optimizer_us(held: Held) -> float:
    """Microseconds of the optimizer's step: it reads and writes all it holds."""
    card = absent_card()
    spec: DeviceSpec = card.spec if card is not None else device_spec(_HOST)
    return 1e6 * 2 * (held.states + held.step) / spec.bytes_per_s


def _tensors_for(device: str | None) -> AbstractContextManager[Any]:
    """Tensors without memory, for a card or for the CPU; for a card they may be there already."""
    if device is not None:
        return absent(device)
    return fake_tensors() if absent_card() is None else nullcontext()


@dataclass
class _Fitting:
    """One call of `fit`."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    vary: Mapping[str, Places]
    optimizer: str
    options: Mapping[str, Any]
    whole: bool

    @with_stack_room
    def run(self) -> Fit:
        """Find the largest sizes."""
        weights = list(self.model.parameters()) if isinstance(self.model, nn.Module) else []
        held = held_by(self.optimizer, weights)
        weights_bytes = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
        inputs, sizes = _resized(self.inputs, self.vary)
        with session.separate(), uncollected():
            line, steps = self._steps(inputs, sizes, held)
            request = steps["torch.compile"][0].costs.request
            assert request.budget.own is not None
            budget = request.budget.own
            plain_bytes = None
            if self.vary and weights_bytes <= budget:
                plain = self._plain_bytes(line, steps["torch.compile"])
                plain_bytes = max(plain + request.budget.held, _when_stepping(weights, held))
            found = [
                point
                for what in self.vary
                for points in self._looked_at(line, steps, sizes, what, budget, weights_bytes)
                for point in points
            ]
        after_us = optimizer_us(held)
        points = [
            replace(one, time_us=one.time_us + after_us) if one.size else one for one in found
        ]
        largest = {(one.what, one.way): one for one in points}  # the last of each
        return Fit(
            request.device.card or "here",
            budget + request.budget.beside,
            weights_bytes,
            held,
            request.budget.held,
            request.budget.autotune,
            plain_bytes,
            sizes,
            line.whole,
            line.studied,
            tuple(largest.values()),
            tuple(one for one in points if one.size),
        )

    def _plain_bytes(self, line: Line, steps: Sequence[SymbolicStep]) -> int:
        """The peak of torch's own compile at the sizes that were given, by a dry run."""
        given = {
            what: self.inputs[argument].shape[dimension]
            for what, [(argument, dimension), *_] in self.vary.items()
        }
        what = next(iter(given))
        return TorchSteps(line, steps, given, what).peak_bytes(given[what])

    def _looked_at(
        self, line: Line, steps: Mapping[Way, Sequence[SymbolicStep]], sizes: Sizes, what: str,
        budget: int, weights_bytes: int,
    ) -> Iterator[Sequence[Point]]:  # fmt: skip
        """The points of each way, as one size varies; the last of each way is the largest."""
        if weights_bytes > budget:  # whatever else a step takes
            yield [Point(what, way, 0, 0, 0.0) for way in WAYS if way in steps or way == "fxremat"]
            return
        by_torch = {way: TorchSteps(line, few, sizes, what) for way, few in steps.items()}
        of_way = {way: points_by_torch(few, way, budget) for way, few in by_torch.items()}
        planned = PlannedSteps(by_torch["torch.compile"], by_torch.get("checkpointed blocks"))
        of_way["fxremat"] = points_by_us(planned, of_way, budget, weights_bytes)
        yield from (of_way[way] for way in WAYS if way in of_way)

    def _steps(
        self, inputs: tuple[Any, ...], sizes: Sizes, held: Held
    ) -> tuple[Line, dict[Way, list[SymbolicStep]]]:
        """The steps to study, and the line through them: few of the blocks, or the whole."""
        blocks = repeated_blocks(self.model)
        count = len(blocks)
        few = (2, 3)  # the fewest with a first and a last one; two numbers make a line
        if not self.whole and count >= 2 * few[-1] and are_alike(blocks):
            try:
                return Line(few, count), self._traced(few, inputs, sizes, held)
            except NotTraceable as error:  # such as of a model that names its blocks by number
                log.info("the whole model is studied: with few of its blocks, %s", error)
        return Line((count,), count), self._traced((count,), inputs, sizes, held)

    def _traced(
        self, counts: Sequence[int], inputs: tuple[Any, ...], sizes: Sizes, held: Held
    ) -> dict[Way, list[SymbolicStep]]:
        """A step for each number of blocks, as it is and with every block checkpointed.

        Checkpoints add tags to the graph of a step and nothing else, so it is traced once. A model
        that has some by itself, which are to stay, is traced without ours too.
        """
        steps: dict[Way, list[SymbolicStep]] = {}
        for count in counts:
            few = partial(shortened, self.model, count) if count else nullcontext
            with checkpointed(self.model) as blocks, few():
                step, regions = self._trace(inputs, sizes, held)
            if blocks:
                steps.setdefault("checkpointed blocks", []).append(step)
                if regions == blocks - len(repeated_blocks(self.model)) + count:
                    step = step.untagged()
                else:
                    with few():
                        step, _ = self._trace(inputs, sizes, held)
            steps.setdefault("torch.compile", []).append(step)
        return steps

    def _trace(self, inputs: tuple[Any, ...], sizes: Sizes, held: Held) -> tuple[SymbolicStep, int]:
        """The step with its sizes as symbols, and how many regions of it are checkpointed.

        The states of the optimizer are held beside it.
        """
        options = {**self.options, "optimizer": "none"}  # those of ``held`` count
        parsed = parse_options(options, device_total_bytes=total_bytes(_HOST))

        def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            regions = checkpointed_regions(gm)
            request = request_for(given, parsed)
            if request.budget.limit is None:
                raise InvalidOption("memory_budget", None, "a number of bytes to fit into")
            held_bytes = request.budget.held + held.states
            # Nothing of it will run: whoever compiles the step has it verified then.
            request = request.with_budget(held=held_bytes).with_policy(verify=False)

            def partition(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
                static = tuple(kwargs.pop("static_lifetime_input_indices", None) or ())

                def as_torch_does(one: fx.GraphModule) -> Any:
                    with fake_mode_of(one.graph):  # random states of checkpointed ops are made
                        return torch_partition(one, joint_inputs, **kwargs)

                draft = Draft(module, kwargs["num_fwd_outputs"], static, as_torch_does, True)
                there = partial(generating, module, patches)
                with apart_from_tracing():
                    try:
                        step = symbolic_step(draft, request, sizes, "step", there)
                    except KeyError as error:
                        raise CannotVary(str(error.args[0]), "the model fixes it") from error
                raise Ended((step, regions))

            patches = patches_for(parsed, request)
            return traced(gm, given, patches, partition)

        with on_host_without_memory(self.model, inputs) as there:
            for argument, dimension in chain(*self.vary.values()):
                mark_dynamic(there[argument], dimension)
            name = type(self.model).__name__
            step: tuple[SymbolicStep, int] = compile_until_ended(name, self.model, there, backend)
            return step


def _when_stepping(weights: Sequence[torch.Tensor], held: Held) -> int:
    """Bytes that are live when the optimizer steps, all that graphs compute being gone."""
    trained = [weight for weight in weights if weight.requires_grad]
    both = sum(weight.numel() * weight.dtype.itemsize for weight in (*weights, *trained))
    return both + held.states + held.step


def _resized(
    inputs: tuple[Any, ...], vary: Mapping[str, Places]
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Inputs without memory in sizes that tell by themselves what they are of, and the sizes."""
    shapes = {k: list(x.shape) for k, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    for what, places in vary.items():
        for argument, dimension in places:
            if not 0 <= dimension < len(shapes.get(argument, ())):
                raise CannotVary(what, f"there is no dimension {dimension} of input {argument}")
    varied = {*chain(*vary.values())}
    taken = {
        size
        for argument, shape in shapes.items()
        for dimension, size in enumerate(shape)
        if (argument, dimension) not in varied
    }
    sizes: dict[str, int] = {}
    for what, [(argument, dimension), *_] in vary.items():
        size = max(2, shapes[argument][dimension])
        while size in taken:
            size += 1
        sizes[what] = size
        taken.add(size)
    for what, places in vary.items():
        for argument, dimension in places:
            shapes[argument][dimension] = sizes[what]
    resized = tuple(
        torch.empty(shapes[k], dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        if k in shapes
        else x
        for k, x in enumerate(inputs)
    )
    return resized, sizes
