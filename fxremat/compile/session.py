"""What outlives one compilation: the reports of graphs, and steps that were looked at before."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from fxremat import inactive
from fxremat.compat.configuration import cache_directory
from fxremat.compat.joint_graph import copy_module
from fxremat.core.json_data import InvalidData, from_data, to_data
from fxremat.disk_cache import Answers
from fxremat.report.report import Report

Study = Callable[[Any, Any], None]
"""Told what the search found, and its runner, where more than a report is asked for."""


@dataclass
class Session:
    """The graph being compiled: its number, and where its outcome is put."""

    graph: int
    started: float = field(default_factory=time.perf_counter)
    report: Report | None = None


@dataclass
class State:
    """All that `torch._dynamo.reset()` forgets."""

    reports: list[Report] = field(default_factory=list)
    current: Session | None = None
    graphs: int = 0
    rank_timeout: float = 300.0
    """Seconds to wait for another rank; as the options of the last graph say."""
    seen: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Of graphs in steps that were looked at (`fxremat.prepare`): the step, and which part it is.
    By their signature."""
    seen_parts: WeakKeyDictionary[nn.Module, tuple[Any, int]] = field(
        default_factory=WeakKeyDictionary
    )
    """The same by the module that the graph was made of, where it has no other one."""
    study: Study | None = None
    busy: bool = False
    """Whether it was said that ops cannot be timed."""


STATE = State()


def reports() -> list[Report]:
    """The reports of all graphs compiled since the last reset, newest last.

    It warns if something is trained outside of a budget that was asked for.
    """
    inactive.look()
    return list(STATE.reports)


def note_step_peak(since: int, step_peak_bytes: int, graphs: set[int]) -> list[Report]:
    """Say it in the reports of these ``graphs`` of a step; gives those.

    All but the first ``since`` reports are of the step, too: their graphs are added.
    """
    graphs.update(one.graph for one in STATE.reports[since:])
    of_step = {k: one for k, one in enumerate(STATE.reports) if one.graph in graphs}
    for k, one in of_step.items():
        STATE.reports[k] = replace(one, step_peak_bytes=step_peak_bytes)
    return [STATE.reports[k] for k in of_step]


def reset() -> None:
    """Forget reports and steps; called by ``torch._dynamo.reset()``."""
    STATE.reports.clear()
    STATE.current = None
    STATE.graphs = 0
    STATE.seen.clear()
    STATE.seen_parts.clear()
    STATE.busy = False


def begin() -> Session:
    """Start compiling one graph."""
    STATE.current = Session(STATE.graphs)
    STATE.graphs += 1
    return STATE.current


@contextmanager
def separate(study: Study | None = None) -> Iterator[None]:
    """Plan without leaving a trace in the reports of what is really compiled."""
    global STATE
    outer, STATE = STATE, State(study=study)
    try:
        yield
    finally:
        STATE = outer


def digest(*parts: Any) -> str:
    """A name for everything that a report depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def sizes_of(inputs: Sequence[Any]) -> list[Any]:
    """What a compiled graph depends on of its inputs."""
    return [
        (tuple(map(str, x.shape)), tuple(map(str, x.stride())), str(x.dtype), str(x.device),
         x.requires_grad)
        if isinstance(x, torch.Tensor) else str(x)
        for x in inputs
    ]  # fmt: skip


def signature(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Names a graph and its inputs, whatever class of tensors these are."""
    gm = copy_module(gm)
    for node in gm.graph.nodes:
        node.type = None
    gm.recompile()
    return digest(gm.code, sizes_of(inputs))


def store(key: str, report: Report) -> None:
    """Keep a report for the time when a cache answers instead of us; if there is room for it."""
    _kept().keep({"report": key}, to_data(report))


def load(key: str, graph: int) -> Report | None:
    """The report kept under ``key``; None where there is none or it cannot be read."""
    with suppress(InvalidData):
        report = from_data(Report, _kept().read({"report": key}))
        return replace(report, graph=graph, from_cache=True)
    return None


def _kept() -> Answers:
    return Answers(cache_directory() / "reports")
