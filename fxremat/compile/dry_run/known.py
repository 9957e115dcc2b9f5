"""Rehearsals kept on disk: a graph that has been rehearsed is not rehearsed again.

Who is told the least number that can be met asks for it next: the planner then comes to the plans
that it has been at before, and what they take is known already.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat.compat.inductor.generated_code import code_key
from fxremat.compile.dry_run.dry_run import Dropped, Rehearsal, Workspace, rehearse
from fxremat.core.events import (
    events_from_json,
    events_to_json,
    run_events_from_json,
    run_events_to_json,
)
from fxremat.core.timeline import Lifetime
from fxremat.disk_cache import Answers, Question


def rehearse_once(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    device: str,
    workspace: Workspace,
    directory: Path,
    with_kernels: bool = False,
    begin: bool = False,
    card: str | None = None,
) -> Rehearsal:
    """`rehearsal.rehearse`, or what it gave for the same graphs before.

    Equal are graphs that Inductor would take from its own cache, under the same configuration, in
    the same version of torch; ``workspace`` is taken to be that of the device. ``card`` is the name
    of one that is planned for although it is not here.
    """
    question = _question(forward, backward, num_fwd_outputs, card or device)
    answers = Answers(directory)
    known = _rehearsal_of(answers.read(question)) if question is not None else None
    if known is not None:
        return known
    shown = rehearse(
        forward,
        backward,
        num_fwd_outputs=num_fwd_outputs,
        device=device,
        workspace=workspace,
        with_kernels=with_kernels,
        begin=begin,
    )
    if question is not None:
        kept = asdict(replace(shown, halves=(), events=(), begun=False, as_run=None))
        run = None if shown.as_run is None else run_events_to_json(shown.as_run)
        answers.keep(question, {**kept, "events": events_to_json(shown.events), "as_run": run})
    return shown


def _question(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, device: str
) -> Question | None:
    """Everything that a rehearsal depends on; None where that cannot be named."""
    first = code_key(forward, is_backward=False)
    second = code_key(backward, is_backward=True)
    if first is None or second is None:
        return None
    return {
        "forward": first,
        "backward": second,
        "num_fwd_outputs": num_fwd_outputs,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _rehearsal_of(answer: Any) -> Rehearsal | None:
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return Rehearsal(
            peak_bytes=int(answer["peak_bytes"]),
            live_bytes=tuple(map(int, answer["live_bytes"])),
            making=tuple(map(str, answer["making"])),
            at_peak=tuple((str(name), int(size)) for name, size in answer["at_peak"]),
            scratch={str(name): int(size) for name, size in answer["scratch"].items()},
            events=tuple(events_from_json(answer["events"])),
            forward_moments=int(answer["forward_moments"]),
            saved_bytes=int(answer["saved_bytes"]),
            left_bytes=int(answer["left_bytes"]),
            forward_events=int(answer["forward_events"]),
            as_run=None if answer["as_run"] is None else run_events_from_json(answer["as_run"]),
            lifetimes=tuple(Lifetime(**one) for one in answer["lifetimes"]),
            dropped=tuple(Dropped(**one) for one in answer["dropped"]),
        )
    return None
