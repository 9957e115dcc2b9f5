"""What is said where CUDA runs out of memory, and a cap for torch's allocator.

With ``enforce=True`` the budget is the most that the allocator takes from the device: what would
take more ends with torch's `OutOfMemoryError`, whoever asks for it. If a compiled graph does, with
or without a cap, the error says what was planned to be there when most is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxremat.compat.backward import (
    autograd_position,
    node_of_forward,
    when_backward_begins,
    when_backward_ends,
    when_backward_fails,
)
from fxremat.runtime.unsent_gradients import like
from fxremat.sizes import format_bytes

Call = Callable[..., Any]


CAPPED = "The allocator was held to the memory budget of %s, because of enforce=True."
NOT_CAPPED = "The memory budget is %s. Of it, this was planned:"
WHAT_TO_DO = (
    "What to do: code beside the compiled graphs may hold more than was counted: say so with the "
    "options reserve and optimizer; or set another memory_budget."
)


def explained(
    call: Call, device: torch.device, limit: int, planned: Callable[[], str], *, capped: bool
) -> Call:
    """The same as ``call``, which runs a compiled graph, with more in torch's `OutOfMemoryError`.

    It says what the graph's plan holds, as ``planned`` tells it, of a budget of ``limit`` bytes. If
    ``capped``, the allocator takes no more than these, as long as what is returned lives.
    """
    why = (CAPPED if capped else NOT_CAPPED) % format_bytes(limit)

    def explain(error: BaseException) -> None:
        error.args = (f"{error}\n{why} {planned()}\n{WHAT_TO_DO}",)

    def end() -> None:
        _IN_BACKWARD[:] = [one for one in _IN_BACKWARD if one is not explain]

    def run(*args: Any) -> Any:
        before = autograd_position()
        try:
            results = call(*args)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise
        node = node_of_forward(results, before)
        if node is not None:
            when_backward_begins(node, lambda: _IN_BACKWARD.append(explain))
            when_backward_ends(node, end)
        return results

    when_backward_fails(_explain)
    if capped:
        hold_cap(device, limit, run)
    return like(call, run)


_IN_BACKWARD: list[Callable[[BaseException], None]] = []
"""Of the graphs whose backward runs, what explains an error of it."""


def _explain(error: BaseException) -> None:
    """A backward has ended with this error."""
    running, _IN_BACKWARD[:] = _IN_BACKWARD[:], []
    if running and isinstance(error, torch.OutOfMemoryError):
        running[-1](error)


# --- the cap ---------------------------------------------------------------------------------


_CAPS: dict[torch.device, dict[int | None, float]] = {}
"""The parts of a device that are allowed: by who holds the cap, and (None) what was before."""


def hold_cap(device: torch.device, limit: int, holder: object) -> None:
    """Let the allocator take at most so many bytes of the device, as long as ``holder`` lives."""
    if device not in _CAPS:
        _CAPS[device] = {None: torch.cuda.get_per_process_memory_fraction(device)}
    _CAPS[device][id(holder)] = limit / torch.cuda.get_device_properties(device).total_memory
    _allow_the_least(device)
    weakref.finalize(holder, _release, device, id(holder)).atexit = False


def _release(device: torch.device, key: int) -> None:
    del _CAPS[device][key]
    _allow_the_least(device)
    if _CAPS[device].keys() == {None}:
        del _CAPS[device]


def _allow_the_least(device: torch.device) -> None:
    torch.cuda.set_per_process_memory_fraction(min(_CAPS[device].values()), device)
