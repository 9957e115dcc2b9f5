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
class _Way:
    """Leaves something out of a policy: ``what`` says it, ``without`` gives the policy."""

    what: str
    without: Callable[[Policy], Policy]


_FAULTY: list[_Way] = []
"""What failed in this process, which is not tried again."""


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
        policy = known.without(policy)
    asked, tried = replace(request, policy=policy), list[tuple[_Way, Exception, Request]]()
    while True:
        try:
            made = make(asked)
        except Exception as fault:
            ways = _ways(fault, asked.policy.solver) if _is_ours(fault) else ()
            helping = (one for one in ways if one.without(asked.policy) != asked.policy)
            way = next(helping, None)
            if way is not None:
                tried.append((way, fault, asked))
                asked = replace(asked, policy=way.without(asked.policy))
                continue
            if tried and not isinstance(fault, FxrematError):
                _, first, _ = tried[0]
                raise first from None
            _leave_out(tried, about)
            raise
        _leave_out(tried, about)
        return made


def _leave_out(tried: Iterable[tuple[_Way, Exception, Request]], about: Callable[[], str]) -> None:
    for way, fault, asked in tried:
        _FAULTY.append(way)
        _tell(way.what, fault, asked, about)


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


def _ways(fault: Exception, solver: str) -> Iterator[_Way]:
    """What is named first, then all of a kind, then everything but the simplest solver."""
    check = fault.check if isinstance(fault, VerificationFailed) else ""
    words = set(re.findall(r"\w+", check))
    every = tuple(rule.name for rule in table.RULES)
    named = tuple(name for name in every if name in words)
    if named:
        yield _Way(f"the variant {', '.join(named)}", partial(_without_rules, names=named))
    for name, option in PASSES_OF_CHECKS.items():
        if name in check:
            yield _Way(f"the pass {option}", partial(_without_passes, names=(option,)))
    yield _Way("every variant", partial(_without_rules, names=every))
    passes = tuple(PASSES_OF_CHECKS.values())
    yield _Way(f"the pass {', '.join(passes)}", partial(_without_passes, names=passes))
    yield _Way(f"the solver {solver!r}", lambda policy: replace(policy, solver="greedy"))


def _without_rules(policy: Policy, names: tuple[str, ...]) -> Policy:
    allowed = table.rules_named(policy.variants, allow_lossy=True)
    left = tuple(rule.name for rule in allowed if rule.name not in names)
    return replace(policy, variants=left) if len(left) < len(allowed) else policy


def _without_passes(policy: Policy, names: tuple[str, ...]) -> Policy:
    return replace(policy, disabled=tuple(dict.fromkeys((*policy.disabled, *names))))


def _tell(what: str, fault: Exception, asked: Request, about: Callable[[], str]) -> None:
    told = "".join(traceback.format_exception(fault))
    versions = f"fxremat {build()}, torch {torch.__version__}"
    text = "\n".join([versions, told, repr(asked), about()])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_directory() / "faults" / f"{name}.txt"
    write_whole(path, text)
    warning = LeftOut(what, f"{type(fault).__name__}: {fault}".split("\n")[0], str(path))
    log.info("%s", warning)
    forget_frames(fault)
    warnings.warn(warning, stacklevel=3)
