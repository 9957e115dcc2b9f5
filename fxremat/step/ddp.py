"""Graphs that Dynamo splits for DDP: all parts are looked at before the first is compiled.

Parts run forward one after the other, and backward in the opposite order. So the step is known, and
the versions of all parts are chosen together, as those of blocks are that `fxremat.prepare` has
seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.backward import backward_drops_gradients
from fxremat.compat.ranks import parts_split_for_ddp
from fxremat.compile import session
from fxremat.compile.request import Request, for_inputs
from fxremat.passes.memory_estimation import nbytes
from fxremat.step.description import StepDescription, repeated
from fxremat.step.graph import NoBackward
from fxremat.step.versions import Part

log = logging.getLogger(__name__)

LookAt = Callable[[fx.GraphModule, Sequence[Any], Request, int], Part]


def see_parts(request: Request, left_bytes: int | None, look_at: LookAt) -> None:
    """Have the session know the step that parts of a split graph make, before one is compiled.

    The ``request`` is that of the first part. Of each part's gradients ``left_bytes`` stay beside
    DDP's buckets, None: all.
    """
    request = request.with_inputs(passed_on=backward_drops_gradients())
    try:
        graphs = parts_split_for_ddp()
        if len(graphs) < 2:
            return
        parts = [
            look_at(gm, inputs, for_inputs(request, inputs), len(graphs)) for gm, inputs in graphs
        ]
    except NoBackward:
        return
    except Exception as error:  # whatever a part raises that runs without memory
        log.warning("parts of a graph that is split for DDP are planned one by one: %s", error)
        return
    if left_bytes is not None:
        owns = (part.interface for part in parts)
        owns = (replace(own, left=min(own.left, left_bytes)) for own in owns)
        parts = [replace(part, interface=own) for part, own in zip(parts, owns, strict=True)]
    outside = request.budget.held - _shared_bytes([inputs for _, inputs in graphs])
    outside += sum(part.interface.resident - part.interface.given for part in parts)
    last = parts[-1].interface
    if last.results <= torch.float64.itemsize:  # a loss, which stays with its gradient to the end
        outside += last.results + last.incoming
    part_of = tuple(range(len(parts)))
    points = repeated([part.interface for part in parts], part_of, outside)
    seen = StepDescription(points, part_of, part_of, parts, request)  # they share the places
    for index, (gm, inputs) in enumerate(graphs):
        session.STATE.seen[session.signature(gm, inputs)] = seen, index


def _shared_bytes(inputs: Sequence[Sequence[Any]]) -> int:
    """Of inputs that several parts are given, and no part makes: all but one of each."""
    known, shared = set[int](), 0
    for one in (one for each in inputs for one in each if isinstance(one, torch.Tensor)):
        if isinstance(one, nn.Parameter) or not one.requires_grad:
            shared += nbytes(one) if id(one) in known else 0
            known.add(id(one))
    return shared
