"""Where a graph is compiled, and the step as it is taken to be before it has run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from fxremat.compat.tensors import is_fake
from fxremat.passes.memory_estimation import nbytes
from fxremat.step.context import ModelContext
from fxremat.step.description import StepDescription, repeated_step
from fxremat.step.pipelines import Pipeline
from fxremat.step.scope import BudgetScope, Neighbours, Place, Tensors
from fxremat.step.versions import Part, followed_by


@dataclass(frozen=True)
class Surroundings:
    """Where a graph was compiled, and what was there.

    ``neighbours`` are what other graphs of the ``scope`` held. If others ``follow`` in the step,
    they are not known yet. Of what it was given, ``leaves`` live from step to step, and ``given``
    are the addresses of the storages. Of the inputs that need no gradient, and are no parameters,
    ``fixed_inputs`` are the bytes: where one is as large as the results, the blocks that follow are
    given what needs one.
    """

    device: torch.device
    context: ModelContext
    scope: BudgetScope
    place: Place
    neighbours: Neighbours = field(default_factory=Neighbours)
    follow: bool = False
    leaves: Tensors = ()
    given: frozenset[int] = frozenset()
    fixed_inputs: tuple[int, ...] = ()


def fixed_inputs(inputs: Iterable[Any]) -> tuple[int, ...]:
    """Bytes of each input of a graph that could have a gradient, and needs none."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)]
    return tuple(nbytes(x) for x in tensors if x.is_floating_point() and not x.requires_grad)


def leaves_of(inputs: Iterable[Any], context: ModelContext) -> Tensors:
    """The arguments of a graph that live from step to step, as far as nothing else counts them."""
    if context.sharded:  # gathered when the module runs
        return ()
    tensors = (x for x in inputs if isinstance(x, torch.Tensor) and not is_fake(x))
    return tuple(ref(x) for x in tensors if x.is_leaf)


def first_description(
    part: Part, count: int, where: Surroundings, held_bytes: int, *, compiled_before: bool
) -> StepDescription:
    """A step in which so many runs wait: the one of its pipeline, if that says as many.

    ``held_bytes`` are there all the time. The first block is another graph than those that follow
    unless one was ``compiled_before``.
    """
    pipeline, left = where.context.pipeline, where.context.left_bytes
    if pipeline is None or count != pipeline.runs:
        gathered = where.context.gathered
        places = range(count)
        if where.neighbours.first:
            first = where.neighbours.first
            before = [parts[place] for place, parts in enumerate(first)]
            left_over = range(len(first), count)
            return repeated_step(part, left_over, held_bytes, left, gathered, before)
        given = part.interface.results
        if given in where.fixed_inputs and count > 1 and not compiled_before:
            return repeated_step(part, places, held_bytes, left, gathered, followed_bytes=given)
        # More wait than modules are alike: these are micro-batches, which may go either way.
        either = count > where.context.runs
        return repeated_step(part, places, held_bytes, left, gathered, either_order=either)
    if left is not None:
        left = min(part.interface.left, left)
        part = replace(part, interface=replace(part.interface, left=left))
    return _of_pipeline(part, pipeline, where, held_bytes, compiled_before=compiled_before)


def _of_pipeline(
    part: Part, pipeline: Pipeline, where: Surroundings, held: int, *, compiled_before: bool
) -> StepDescription:
    """The step of its schedule; the first blocks of the first stage are another graph.

    Their input needs no gradient, and is a part of the batch, which lies around.
    """
    first = where.neighbours.first
    given, places = part.interface.results, range(pipeline.runs)
    blocks, parts, part_of = pipeline.blocks, [part], [0] * pipeline.runs
    followed = None
    if blocks is not None and 0 < len(first) < blocks:
        if all(len(known) >= pipeline.runs - blocks + 1 for known in first):
            for place in places:
                if place % blocks < len(first):
                    part_of[place] = len(parts)
                    parts.append(first[place % blocks][place])
    elif blocks is not None and blocks > 1 and given in where.fixed_inputs and not compiled_before:
        parts.append(followed_by(part, given))
        part_of = [int(place % blocks > 0) for place in places]
        held, followed = held - given, given
    step = pipeline.step(parts, held, part_of)
    found = StepDescription(step.points, step.part_of, tuple(places), parts)
    found.followed_bytes = followed
    return found
