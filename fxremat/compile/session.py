"""What outlives one compilation: reports, and the bytes that graphs of one model share.

A model with graph breaks is several graphs, compiled one after another by the same
``torch.compile`` call. While one runs, the others' inputs and what they saved are there too:
the ledger tells each new graph how many bytes of the budget are taken. Where too few are left,
graphs whose runs wait are asked to leave more.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from fxremat.compat.configuration import cache_directory
from fxremat.compat.joint_graph import copy_module
from fxremat.core.places import Places
from fxremat.disk_cache import write_whole
from fxremat.report.report import Report, report_from_json, report_to_json

Study = Callable[[Any, Any], None]
"""Told what the search found, and its runner, where more than a report is asked for."""


@dataclass
class Session:
    """The graph being compiled: its number, and where its outcome is put."""

    graph: int
    started: float = field(default_factory=time.perf_counter)
    report: Report | None = None
    study: Study | None = None


class Waiting(Protocol):
    """The runs of a graph, between whose forwards and backwards others run."""

    @property
    def outside_bytes(self) -> int:
        """What lives around them, that no graph is given."""
        ...

    @property
    def all_wait(self) -> bool:
        """Whether as many wait now as were planned for."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """What all of them have saved, where all wait."""
        ...

    def least_bytes(self, needed: int) -> int:
        """The least budget, where others need so many bytes with what they hold now."""
        ...

    def leave(self, needed: int) -> None:
        """From the next step on they hold so much less that others need no more than the budget."""
        ...


@dataclass
class Ledger:
    """The peaks of the graphs of one model; together they share one budget.

    While one graph runs, no other can hold more than its own peak, so peaks that add up to
    the budget keep the whole step within it. Graphs are told apart by the frame that Dynamo
    compiles. Of the compilations of a frame only one runs in a step; the graphs of one
    compilation all do.
    """

    owner: object = None  # kept alive, so that its id names this ledger alone
    peaks: dict[int, dict[int | None, int]] = field(default_factory=dict)
    places: dict[int, Places] = field(default_factory=dict)
    """Of each frame: its runs that wait for their backward."""
    runs: dict[int, Waiting] = field(default_factory=dict)
    """Of each frame whose graph runs several times: those of the newest compilation."""
    unseen: int | None = None
    """The least that was allocated beside a graph, of all of them."""

    def held_by_others(self, frame: int, compilation: int | None = None) -> int:
        """Bytes that other graphs may hold while one of this compilation of the frame runs.

        Where all runs of another graph wait now, that is what they have saved.
        """
        waiting = {other: runs.waiting_bytes for other, runs in self._all_waiting(frame)}
        others = sum(
            waiting.get(other, max(each.values()))
            for other, each in self.peaks.items()
            if other != frame
        )
        own = 0 if compilation is None else self.peaks.get(frame, {}).get(compilation, 0)
        return others + own

    def _all_waiting(self, frame: int | None = None) -> list[tuple[int, Waiting]]:
        found = self.runs.items()
        return [(other, runs) for other, runs in found if other != frame and runs.all_wait]

    def held_beside(self, frame: int, compilation: int | None, unseen: int) -> int:
        """The same with what no graph sees; ``unseen`` bytes lie beside this graph now.

        Among these are tensors of the other graphs, but not all that they may hold.
        """
        self.unseen = unseen if self.unseen is None else min(unseen, self.unseen)
        return max(unseen, self.unseen + self.held_by_others(frame, compilation))

    def is_last(self, frame: int) -> bool:
        """Whether no graph of a later frame is known yet."""
        return all(other <= frame for other in self.peaks)

    def record(self, frame: int, own: int, compilation: int | None = None) -> None:
        """Add the peak of a graph to those of its compilation; outside of one, keep the largest.

        ``own`` bytes are without what is held beside the graph.
        """
        peaks = self.peaks.setdefault(frame, {})
        known = peaks.get(compilation, 0)
        peaks[compilation] = max(own, known) if compilation is None else own + known

    def outside_bytes(self) -> int:
        """What lives around runs that wait now: the model, for a loss outside of it."""
        return max((runs.outside_bytes for _, runs in self._all_waiting()), default=0)

    def least_bytes(self, needed: int) -> int | None:
        """The least budget where others need so many bytes while runs wait; None where none do."""
        least = [runs.least_bytes(needed) for _, runs in self._all_waiting()]
        return least[0] if len(least) == 1 else None

    def leave(self, needed: int) -> None:
        """Have runs that wait hold so much less that others need no more than the budget."""
        for _, runs in self._all_waiting():
            runs.leave(needed)


@dataclass
class State:
    """All that `torch._dynamo.reset()` forgets."""

    reports: list[Report] = field(default_factory=list)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    current: Session | None = None
    graphs: int = 0
    rank_timeout: float = 300.0
    """Seconds to wait for another rank; as the options of the last graph say."""
    seen: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Of graphs in steps that were looked at (`fxremat.prepare`): the step, and which unit it is.
    By their signature."""
    seen_parts: WeakKeyDictionary[nn.Module, tuple[Any, int]] = field(
        default_factory=WeakKeyDictionary
    )
    """The same by the module that the graph was made of, where it has no other one."""


STATE = State()


def reports() -> list[Report]:
    """The reports of all graphs compiled since the last reset, newest last."""
    return list(STATE.reports)


def note_step_peak(since: int, step_peak_bytes: int) -> list[Report]:
    """Say it in all reports but the first ``since``; gives those."""
    newest = [replace(one, step_peak_bytes=step_peak_bytes) for one in STATE.reports[since:]]
    STATE.reports[since:] = newest
    return newest


def reset() -> None:
    """Forget reports and ledgers; called by ``torch._dynamo.reset()``."""
    STATE.reports.clear()
    STATE.ledgers.clear()
    STATE.current = None
    STATE.graphs = 0
    STATE.seen.clear()
    STATE.seen_parts.clear()


def ledger(owner: object) -> Ledger:
    """The ledger of one torch.compile call, which is told by its options object."""
    return STATE.ledgers.setdefault(id(owner), Ledger(owner))


def begin() -> Session:
    """Start compiling one graph."""
    STATE.current = Session(STATE.graphs)
    STATE.graphs += 1
    return STATE.current


@contextmanager
def separate() -> Iterator[None]:
    """Plan without leaving a trace in the reports of what is really compiled."""
    global STATE
    outer, STATE = STATE, State()
    try:
        yield
    finally:
        STATE = outer


def store_path(key: str) -> Path:
    """Where the report of a graph is kept, beside Inductor's own cache."""
    return Path(cache_directory()) / "fxremat" / "reports" / f"{key}.json"


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


def seen_as(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, int]:
    """The step in which a graph was seen, and which unit it is there; None and 0 if in none."""
    if not STATE.seen:
        return None, 0
    return STATE.seen.get(signature(gm, inputs), (None, 0))


def seen_in(part: nn.Module | None) -> tuple[Any, int]:
    """The step in which another graph of this module was seen; None and 0 if in none.

    Code may look at what it is given, and a tensor without memory cannot show that.
    """
    return (None, 0) if part is None else STATE.seen_parts.get(part, (None, 0))


def store(key: str, report: Report) -> None:
    """Keep a report for the time when a cache answers instead of us; if there is room for it."""
    write_whole(store_path(key), json.dumps(report_to_json(report)))


def load(key: str, graph: int) -> Report | None:
    """The report kept under ``key``; None where there is none or it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(store_path(key).read_text(encoding="utf-8"))
        return replace(report_from_json(data), graph=graph, from_cache=True)
    return None
