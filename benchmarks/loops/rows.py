"""The rows of `benchmarks.loops`: what was promised and reserved for each model in each loop."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxremat.compat.absent.without_device import READ
from fxremat.compat.tensors import outside_fake_mode
from fxremat.errors import InfeasibleBudget
from fxremat.sizes import parse_bytes
from fxremat.whatif.device import absent

from ..rows import mib
from .judge import Judge, Outcome
from .models import MODELS

HEAD = ["model", "loop", "status", "plain", "budget", "least", "promised", "blocks",
        "reserved", "unused", "peak", "seconds"]  # fmt: skip


@dataclass(frozen=True)
class LoopRow:
    """What was found of one model in one loop. Bytes; None where a row ended before it.

    A budget that is refused says what compiled ``checkpointing`` of each block reserves.
    """

    model: str
    loop: str
    device: str
    status: str
    seconds: float
    plain: int | None = None
    budget: int | None = None
    least: int | None = None
    promised: int | None = None
    checkpointing: int | None = None
    outcome: Outcome | None = None
    error: str | None = None

    def cells(self) -> list[str]:
        """A line of the table, in MiB."""
        found = self.outcome
        return [
            self.model,
            self.loop,
            self.status,
            mib(self.plain),
            mib(self.budget),
            mib(self.least),
            mib(self.promised),
            mib(self.checkpointing),
            mib(None if found is None else found.reserved),
            mib(None if found is None else found.unused),
            "" if found is None else f"step {found.peak_step}, {found.moment}",
            f"{self.seconds:.0f}",
        ]

    def as_json(self) -> dict[str, Any]:
        """One level, with the figures of the replay among the others."""
        row = asdict(self)
        outcome = row.pop("outcome") or dict.fromkeys(Outcome.__dataclass_fields__)
        return {**row, **outcome}


def judged(name: str, asked: argparse.Namespace) -> Iterator[LoopRow]:
    """A row for each loop; the model is traced once."""
    begin = time.perf_counter()
    with absent(asked.device) as card:
        judge: Judge | None = None
        for loop in asked.loops:
            row: dict[str, Any] = {"model": name, "loop": loop, "device": card.name}
            try:
                judge = judge or Judge(*_made_without_memory(model_named(name)))
                row |= _judged(judge, loop, asked.budget)
            except InfeasibleBudget as refused:
                row |= {"status": "refused", "budget": refused.budget_bytes}
                row |= {"least": refused.minimum_bytes}
                if judge is not None:
                    row |= {"plain": judge.plain_of(loop)}
                    try:
                        row |= {"checkpointing": judge.checkpointing_of(loop)}
                    except Exception as error:  # Dynamo knows not all that checkpoints may have
                        row |= {"error": _said(error)}
            except Exception as error:
                row |= {"status": "failed", "error": _said(error)}
            yield LoopRow(seconds=round(time.perf_counter() - begin, 1), **row)
            begin = time.perf_counter()


def _said(error: Exception) -> str:
    logging.getLogger(__name__).debug("failed", exc_info=True)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _judged(judge: Judge, loop: str, budget: str) -> dict[str, Any]:
    """What is promised under the budget, and what the loop then reserves."""
    plain = judge.plain_of(loop)
    allowed = budget_of(budget, plain)
    promise = judge.planned(loop, allowed)
    outcome = judge.outcome(loop, promise)
    return {
        "status": "ok" if outcome.reserved <= allowed else "over",
        "plain": plain,
        "budget": allowed,
        "least": promise.least,
        "promised": promise.promised,
        "outcome": outcome,
    }


def budget_of(text: str, plain: int) -> int:
    """Bytes of a budget such as "60%", which is of what plain compile reserves, or "8GiB"."""
    if text.endswith("%"):
        return int(float(text[:-1]) / 100 * plain)
    return parse_bytes(text)


class ByName(nn.Module):
    """A model that is given its arguments by their names."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def made(make: Callable[[], Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model in training mode, and its inputs by position."""
    model, inputs = make()
    if isinstance(inputs, Mapping):
        model, inputs = ByName(model, tuple(inputs)), inputs.values()
    return model.train(), (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)


def _made_without_memory(make: Callable[[], Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The same, where tensors have no memory; a model that reads some gets its own."""
    try:
        return made(make)
    except READ:
        with outside_fake_mode():
            return made(make)


def function_named(text: str) -> Callable[[], Any]:
    """``package.module:function``, or ``folder/file.py:function``."""
    where, _, name = text.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Callable[[], Any] = getattr(module, name)
    return function


def models_asked(texts: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """All models where none is named; ends with the parser's error where one is not known."""
    unknown = [text for text in texts if ":" not in text and text not in MODELS]
    if unknown:
        parser.error(f"no models {unknown}; give MODULE:FUNCTION, or {', '.join(MODELS)}")
    return list(texts or MODELS)


def model_named(text: str) -> Callable[[], Any]:
    """One of `benchmarks.loops.models`, or a function elsewhere."""
    return function_named(text) if ":" in text else MODELS[text]


def _judge_into(rows: Any, text: str, asked: argparse.Namespace) -> None:
    """Put the rows of a model into a queue, and None at the end."""
    try:
        for row in judged(text, asked):
            rows.put(row)
    finally:
        rows.put(None)


def all_rows(asked: argparse.Namespace) -> Iterator[LoopRow]:
    """The rows of all models as they end; some models are judged at the same time."""
    if asked.together == 1:
        for text in asked.models:
            yield from judged(text, asked)
        return
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(asked.together, maxtasksperchild=1) as pool:
        rows: Any = manager.Queue()
        for text in asked.models:
            pool.apply_async(_judge_into, (rows, text, asked))
        for _ in asked.models:
            yield from iter(rows.get, None)
