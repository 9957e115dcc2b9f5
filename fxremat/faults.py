"""Where something of ours fails, it is left out, and the user's run goes on without it.

A variant that a check refuses, a pass that raises, a plan that Inductor cannot lower: the graph is
planned again with less of what fxremat does, one warning names what was left out, and a file has
what a report needs. Only what is no fault ends a compilation: a budget that cannot be met, a wrong
option, and what fails without us, too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from fxremat.compat.configuration import cache_directory
from fxremat.compat.dynamo import is_for_dynamo
from fxremat.compile.request import Policy, Request
from fxremat.disk_cache import write_whole
from fxremat.errors import FxrematError, LeftOut, VerificationFailed, forget_frames
from fxremat.passes.variants import table
from fxremat.version import build

log = logging.getLogger(__name__)

Made = TypeVar("Made")
OURS = ("fxremat/passes/", "fxremat/planner/", "fxremat/verify/", "fxremat/cost/",
        "fxremat/compile/", "fxremat/runtime/")  # fmt: skip
"""Where a fault that is ours has a frame; graphs are handed over from ``compile``."""
PASSES_OF_CHECKS = {"in place": "inplace", "gradient sums": "sums"}
"""The option's name of a pass, by that of the pass."""


@dataclass(frozen=True)
class _Less:
    """What is left out: ``what`` says it, and ``policy`` is the one without."""

    what: str
    policy: Policy


Way = Callable[[Policy], _Less]
"""Leaves something out of a policy."""

_FAULTY: list[Way] = []
"""What failed in this process, which is not tried again."""


@dataclass(frozen=True)
class _Tried:
    """One fault, and what was left out for it."""

    way: Way
    less: _Less
    fault: Exception
    asked: Request


def reset() -> None:
    """Try everything again."""
    _FAULTY.clear()


def with_less_after_faults(
    request: Request, make: Callable[[Request], Made], about: Callable[[], str]
) -> Made:
    """What is made for the request, with less of ours each time that something of ours fails.

    ``about()`` describes the graph for the file to report. Raises what is no fault of ours, as a
    budget that cannot be met without it, and the first fault where nothing is left to leave out.
    """
    policy = request.policy
    for known in _FAULTY:
        policy = known(policy).policy
    asked, tried = replace(request, policy=policy), list[_Tried]()
    while True:
        try:
            made = make(asked)
        except Exception as fault:
            found = _first_that_helps(asked.policy, fault) if _is_ours(fault) else None
            if found is not None:
                tried.append(_Tried(*found, fault, asked))
                asked = replace(asked, policy=found[1].policy)
                continue
            if tried and not isinstance(fault, FxrematError):
                raise tried[0].fault from None
            _leave_out(tried, about)
            raise
        _leave_out(tried, about)
        return made


def _leave_out(tried: Iterable[_Tried], about: Callable[[], str]) -> None:
    for one in tried:
        _FAULTY.append(one.way)
        _tell(one, about)


def _is_ours(fault: Exception) -> bool:
    if isinstance(fault, (torch.OutOfMemoryError, MemoryError)) or is_for_dynamo(fault):
        return False
    if hasattr(fault, "is_no_fault"):
        return False
    if isinstance(fault, FxrematError):
        return isinstance(fault, VerificationFailed)
    frames = traceback.extract_tb(fault.__traceback__)
    files = [Path(frame.filename).as_posix() for frame in frames]
    return any(part in file for file in files for part in OURS)


def _first_that_helps(policy: Policy, fault: Exception) -> tuple[Way, _Less] | None:
    ways = ((way, way(policy)) for way in _ways(fault))
    return next((one for one in ways if one[1].policy != policy), None)


def _ways(fault: Exception) -> Iterator[Way]:
    """What is named first, then all of a kind, then everything but the simplest solver."""
    check = fault.check if isinstance(fault, VerificationFailed) else ""
    words = set(re.findall(r"\w+", check))
    named = tuple(rule.name for rule in table.RULES if rule.name in words)
    if named:
        yield partial(_without_rules, names=named, what=f"the variant {', '.join(named)}")
    for name, option in PASSES_OF_CHECKS.items():
        if name in check:
            yield partial(_without_passes, names=(option,))
    every = tuple(rule.name for rule in table.RULES)
    yield partial(_without_rules, names=every, what="every variant")
    yield partial(_without_passes, names=tuple(PASSES_OF_CHECKS.values()))
    yield _without_solver


def _without_rules(policy: Policy, names: tuple[str, ...], what: str) -> _Less:
    allowed = table.rules_named(policy.variants, allow_lossy=True)
    left = tuple(rule.name for rule in allowed if rule.name not in names)
    return _Less(what, replace(policy, variants=left) if len(left) < len(allowed) else policy)


def _without_passes(policy: Policy, names: tuple[str, ...]) -> _Less:
    disabled = tuple(dict.fromkeys((*policy.disabled, *names)))
    return _Less(f"the pass {', '.join(names)}", replace(policy, disabled=disabled))


def _without_solver(policy: Policy) -> _Less:
    return _Less(f"the solver {policy.solver!r}", replace(policy, solver="greedy"))


def _tell(tried: _Tried, about: Callable[[], str]) -> None:
    fault, told = tried.fault, "".join(traceback.format_exception(tried.fault))
    versions = f"fxremat {build()}, torch {torch.__version__}"
    text = "\n".join([versions, told, repr(tried.asked), about()])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = Path(cache_directory()) / "fxremat" / "faults" / f"{name}.txt"
    write_whole(path, text)
    warning = LeftOut(tried.less.what, f"{type(fault).__name__}: {fault}".split("\n")[0], str(path))
    log.warning("%s", warning)
    forget_frames(fault)
    warnings.warn(warning, stacklevel=3)
