"""One architecture in this process: plain, checkpointed, at a part of plain's memory, at the least.

    python -m benchmarks.architectures.measuring NAME

Prints a line of JSON. Each way trains the same weights with AdamW for some iterations; every
iteration after the first is measured, and gradients are taken again at the first weights after
them, so that what is compared is what runs when steps are steady.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from fxremat.core.constants import MOST_WAITING, TIME_DOUBT
from fxremat.cost.timing import waiting_s
from fxremat.memory.measured_peak import measure_peak

from ..training import gradient_error, infeasible_budget
from .cases import Case, checkpoint_blocks
from .models import ARCHITECTURES

PART = 0.6
"""Of plain compile's peak: the budget."""
MEASURED, TIMED = 4, 3
SEEDS = (1, 2, 3)
IMPOSSIBLE_BYTES = 2**20
WRONG = 0.01
"""Relative error of a gradient that no rounding explains: in float32 it is 1e-4 at most."""


class Unlike(Exception):
    """A way has other gradients than plain compile."""


@dataclass
class Way:
    """How one way trained: bytes at most in each iteration after the first, and seconds.

    ``first_seconds`` is what the first iterations took beyond as many later ones. Seconds are None
    where other programs had the cores.
    """

    peaks: list[int] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    first_seconds: float | None = None
    step_seconds: float | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that an iteration took once its memory is in place."""
        return max(self.peaks)

    def as_json(self) -> dict[str, Any]:
        """Without gradients."""
        return {
            "peaks": self.peaks,
            "first_seconds": self.first_seconds and round(self.first_seconds, 2),
            "step_seconds": self.step_seconds and round(self.step_seconds, 5),
        }


def seed(number: int) -> None:
    """All generators that models draw from."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def made(name: str) -> Case:
    """The architecture with weights and batch that are the same at every call."""
    torch.compiler.reset()
    seed(SEEDS[0])
    case = ARCHITECTURES[name]()
    for model in case.models:
        model.train()
    return case


Compile = Callable[[nn.Module], Callable[..., Any]]


def train(case: Case, compiled: Compile) -> Way:
    """Train for some iterations, then take gradients at the first weights."""
    way, models = Way(), case.models
    before = [{name: each.clone() for name, each in m.state_dict().items()} for m in models]
    functions = [compiled(model) for model in models]
    weights = [w for model in models for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)

    def iteration() -> None:
        case.run(*functions)
        optimizer.step()
        optimizer.zero_grad()

    held = (*models, optimizer, *case.held)

    def first() -> None:
        iteration()
        for _ in range(MEASURED):
            way.peaks.append(measure_peak(iteration, held=held).peak_bytes)

    until_steady = _undisturbed(first, MOST_WAITING)
    found = (_undisturbed(iteration, TIME_DOUBT) for _ in range(TIMED))
    if steps := [one for one in found if one is not None]:
        way.step_seconds = median(steps)
        if until_steady is not None:
            way.first_seconds = until_steady - (1 + MEASURED) * way.step_seconds
    for model, state in zip(models, before, strict=True):
        model.load_state_dict(state)
    for number in SEEDS:
        seed(number)
        case.run(*functions)
        way.gradients.append(_gradients(weights))
        optimizer.zero_grad()
    return way


def _undisturbed(run: Callable[[], object], most: float) -> float | None:
    """Seconds of a run; None if our threads waited for a core for more than that part of it."""
    start, before = time.perf_counter(), waiting_s(torch.device("cpu"))
    run()
    took = time.perf_counter() - start
    return took if waiting_s(torch.device("cpu")) - before <= most * took else None


def _gradients(weights: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        str(index): (w.grad.to_dense() if w.grad.is_sparse else w.grad).clone()
        for index, w in enumerate(weights)
        if w.grad is not None
    }


def within(budget: int) -> Compile:
    """Compiled by fxremat for a budget of bytes."""
    options: dict[str, Any] = {"memory_budget": budget}

    def compiled(model: nn.Module) -> Callable[..., Any]:
        return torch.compile(model, backend="fxremat", options=options)

    return compiled


@dataclass
class Found:
    """What is written of an architecture; bytes, but for what says otherwise."""

    name: str
    status: str = "failed"
    budget: int | None = None
    least: int | None = None
    plain: dict[str, Any] | None = None
    checkpointed: dict[str, Any] | None = None
    at_budget: dict[str, Any] | None = None
    at_least: dict[str, Any] | None = None
    gradient_error: float | None = None
    graphs: int | None = None
    warned: list[str] = field(default_factory=list)
    error: str | None = None


def measured(name: str) -> Found:
    """Each way in turn; a way of ours that fails leaves those before it in the row."""
    found = Found(name)
    try:
        plain = train(made(name), lambda model: torch.compile(model))
    except Exception as error:
        found.status, found.error = "plain_fails", _said(error)
        return found
    found.plain = plain.as_json()
    found.checkpointed = _checkpointed(name)
    found.budget = int(PART * plain.peak_bytes)
    with _warnings(found.warned):
        try:
            _ours(found, plain)
        except Exception as error:
            found.status, found.error = "failed", _said(error)
        if any("LeftOut" in each for each in found.warned):
            found.status, found.error = "failed", found.error or "something was left out"
    return found


def _checkpointed(name: str) -> dict[str, Any] | None:
    """Plain compile with each repeated block under a checkpoint; None where there is none.

    Sizes are constants, for where a checkpoint breaks up the graph, stages of a pyramid would be
    one dynamic graph, and Inductor is busy with Swin's for more than ten minutes.
    """
    case = made(name)
    if not checkpoint_blocks(case.models):
        return None
    try:
        return train(case, lambda model: torch.compile(model, dynamic=False)).as_json()
    except Exception as error:
        return {"error": _said(error)}


def _ours(found: Found, plain: Way) -> None:
    """At the budget, and at the least that an impossible one names."""
    assert found.budget is not None
    way, found.least = _tried(found.name, found.budget)
    if way is not None:
        found.at_budget, found.graphs = way.as_json(), len(fxremat.reports())
        found.gradient_error = _error(found, way, found.budget, plain)
        found.status = "ok" if way.peak_bytes <= found.budget else "over"
        if not found.graphs:
            found.status = "inactive"
            return
        said = len(found.warned)
        with _warnings([]):
            _, found.least = _tried(found.name, IMPOSSIBLE_BYTES)
        del found.warned[said:]  # that it takes more is no news
    else:
        found.status = "refused"
    if found.least is None:
        return
    way, refused = _tried(found.name, found.least)
    if way is None:
        found.status, found.error = "failed", f"its least is refused, too: {refused} bytes"
        return
    found.at_least, found.graphs = way.as_json(), len(fxremat.reports())
    found.gradient_error = max(found.gradient_error or 0.0, _error(found, way, found.least, plain))
    if way.peak_bytes > found.least:
        found.status = "over"


def _tried(name: str, budget: int) -> tuple[Way, None] | tuple[None, int]:
    """How it trains within a budget, or the least that the refusal names."""
    try:
        return train(made(name), within(budget)), None
    except Exception as error:
        refused = infeasible_budget(error)
        if refused is None or refused.minimum_bytes is None:
            raise
        return None, refused.minimum_bytes


def _error(found: Found, way: Way, budget: int, plain: Way) -> float:
    """Of gradients, the median over seeds: where one rounds differently, a ReLU may flip.

    Where plain compile's are others, those that come without compiling decide. Where rounding flips
    ReLUs at every seed, gradients in float64 do, of a model compiled for twice the budget.
    """
    error = _apart(way, plain)
    if error <= WRONG:
        return error
    eager = train(made(found.name), lambda model: model)
    from_eager = _apart(way, eager)
    if from_eager > WRONG:
        exact = _apart_in_float64(found.name, 2 * budget)
        if exact > WRONG:
            raise Unlike(f"gradients are {error:.1e} away from plain compile's")
        found.warned.append(
            f"gradients are {error:.1e} away from plain compile's, and those are "
            f"{_apart(plain, eager):.1e} away from those without compiling: rounding flips ReLUs. "
            f"The row compares in float64, under twice the budget or the least that is named there"
        )
        return exact
    wrong = _apart(plain, eager)
    found.warned.append(
        f"plain compile's own gradients are {wrong:.1e} away from those without compiling; "
        f"the row compares with the latter"
    )
    return from_eager


def _apart(one: Way, other: Way) -> float:
    return median(map(gradient_error, one.gradients, other.gradients))


def _apart_in_float64(name: str, budget: int) -> float:
    """Of gradients from plain compile's, where all numbers are as wide as Python's.

    Under the budget, or the least that is named: convolutions take more than twice as much there.
    """
    torch.set_default_dtype(torch.float64)
    try:
        plain = train(made(name), lambda model: torch.compile(model))
        way, least = _tried(name, budget)
        if least is not None:
            way, _ = _tried(name, least)
        if way is None:
            raise Unlike("at no budget could gradients be compared in float64")
        return _apart(way, plain)
    finally:
        torch.set_default_dtype(torch.float32)


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"


@contextmanager
def _warnings(into: list[str]) -> Iterator[None]:
    """Inside, what fxremat warns of is written down, once each."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("fxremat")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        ours = (each for each in caught if each.category.__module__.startswith("fxremat"))
        into.extend(f"{each.category.__name__}: {each.message}" for each in ours)
    finally:
        log.removeHandler(handler)
        into[:] = list(dict.fromkeys(into))


def main() -> None:
    """Measure the architecture that the command line names."""
    print(json.dumps(vars(measured(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
