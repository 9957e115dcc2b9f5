"""The interpreter's stack: whose forward calls us, and room for all that a compilation calls.

CPython keeps frames in chunks of memory. A call that does not fit into the chunk takes a new one
from the system, and returning gives it back. Compilers call deeply, so that a loop deep inside may
do that at every call: planning then takes three times as long, half of it in the system. A frame
that asks for many slots takes one large chunk, and what it calls finds the rest of it free.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import fx, nn

Given = ParamSpec("Given")
Result = TypeVar("Result")

SLOTS = 34_000
"""Of 8 bytes. A chunk of CPython is a power of two, and has room for 1,000 more slots: 512 KiB, of
which 31,000 slots stay free, some hundred frames."""


def _enter(function: Callable[..., Any], given: Any, named: Any) -> Any:
    return function(*given, **named)


_enter.__code__ = _enter.__code__.replace(co_stacksize=SLOTS)


def with_stack_room(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function; what it calls has room on the stack."""

    @wraps(function)
    def entered(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        result: Result = _enter(function, args, kwargs)
        return result

    return entered


def calling_modules() -> dict[nn.Module, tuple[Any, ...]]:
    """The modules whose call is running, the outermost first, with what each was given."""
    found: dict[nn.Module, tuple[Any, ...]] = {}
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals if frame.f_code.co_name in _CALLS else {}
        caller = names.get("self")
        if isinstance(caller, nn.Module) and not isinstance(caller, fx.GraphModule):
            given = *names.get("args", ()), *names.get("kwargs", {}).values()
            found.pop(caller, None)
            found[caller] = given
        frame = frame.f_back  # type: ignore[assignment]
    return dict(reversed(found.items()))


_CALLS = ("_call_impl", "_wrapped_call_impl")
