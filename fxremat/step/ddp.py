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
from fxremat.compat.distributed.ddp_parts import parts_split_for_ddp
from fxremat.compile import session
from fxremat.compile.request import Request, for_inputs
from fxremat.passes.memory_estimation import nbytes
from fxremat.step.runs import NoBackward, SeenStep
from fxremat.step.versions import Unit, repeated

log = logging.getLogger(__name__)

A_NUMBER = 8
"""Bytes of it at most."""
LookAt = Callable[[fx.GraphModule, Sequence[Any], Request, int], Unit]


def see_parts(request: Request, left_bytes: int | None, look_at: LookAt) -> None:
    """Have the session know the step that parts of a split graph make, before one is compiled.

    The ``request`` is that of the first part. Of each part's gradients ``left_bytes`` stay beside
    DDP's buckets, None: all.
    """
    request = request.with_inputs(passed_on=backward_drops_gradients())
    try:
        parts = parts_split_for_ddp()
        if len(parts) < 2:
            return
        units = [
            look_at(gm, inputs, for_inputs(request, inputs), len(parts)) for gm, inputs in parts
        ]
    except NoBackward:
        return
    except Exception as error:  # whatever a part raises that runs without memory
        log.warning("parts of a graph that is split for DDP are planned one by one: %s", error)
        return
    if left_bytes is not None:
        owns = (unit.boundary for unit in units)
        owns = (replace(own, left=min(own.left, left_bytes)) for own in owns)
        units = [replace(unit, boundary=own) for unit, own in zip(units, owns, strict=True)]
    outside = request.budget.held - _shared_bytes([inputs for _, inputs in parts])
    outside += sum(unit.boundary.resident - unit.boundary.given for unit in units)
    last = units[-1].boundary
    if last.results <= A_NUMBER:  # a loss, which stays with its gradient to the end
        outside += last.results + last.incoming
    step = repeated(units, range(len(units)), outside)
    seen = SeenStep(step.moments, step.unit_of, (0,) * len(units), units, request)
    for index, (gm, inputs) in enumerate(parts):
        session.STATE.seen[session.signature(gm, inputs)] = seen, index


def _shared_bytes(inputs: Sequence[Sequence[Any]]) -> int:
    """Of inputs that several parts are given, and no part makes: all but one of each."""
    known, shared = set[int](), 0
    for one in (one for each in inputs for one in each if isinstance(one, torch.Tensor)):
        if isinstance(one, nn.Parameter) or not one.requires_grad:
            shared += nbytes(one) if id(one) in known else 0
            known.add(id(one))
    return shared
