"""Optimizer steps that begin inside a compiled backward, when a gradient is in host memory.

    arrived(gradient, weight, read, device)

stands in a backward where the copy of a gradient to the host has been waited for, and every copy
of its weight to the device too. If somebody asked for it (`Stepped`), the optimizer then steps on
a thread of its own, beside the rest of the backward. It takes the gradient's memory along, which
is free as soon as the step has ended; autograd is left with a stand-in of the same shape that
takes none. The backward ends with `finish`, where it waits for the steps.

A step never sees a part of a gradient, and nothing reads a weight while it is written:

* In the backward that is running, nothing but this graph has a gradient for the weight, and
  autograd will add it to ``weight.grad``, where there is none yet. That is known in a backward that
  Python began, if no other is running.
* Autograd runs in the thread that began the backward: no other node runs beside the graph.
* Nobody has a hook on the weight, who would see the stand-in.
* No other tensor that the rest of the graph reads shares memory with the weight.

Where any of it does not hold, nothing happens here, and the hook that autograd calls when it has
added up the whole gradient does the step.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any
from weakref import WeakValueDictionary

import torch

from fxremat.compat.backward import (
    GraphInBackward,
    accumulators_of,
    hooks_on,
    running_backward,
    running_node,
    runs_in_one_thread,
    watch_backwards,
)
from fxremat.core.constants import STEPS_AHEAD
from fxremat.runtime.host_memory import mapped_like, storage_address
from fxremat.runtime.kernels import WAITS, register


@dataclass(eq=False)
class Step:
    """One optimizer step of one parameter, on its way or over; it begins after ``ready()``."""

    parameter: torch.Tensor
    gradient: torch.Tensor | None
    step: Callable[[], object]
    ready: Callable[[], object]
    error: BaseException | None = None
    backward: int | None = field(default_factory=running_backward)
    threads: int = field(default_factory=torch.get_num_threads)
    ended: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.storage = storage_address(self.parameter)

    def run(self) -> None:
        """Step; for the thread. An error is kept for the hook of the parameter."""
        try:
            self.ready()
            if torch.get_num_threads() != self.threads:  # a number that each thread has for itself
                torch.set_num_threads(self.threads)
            with torch.no_grad():
                self.parameter.grad = self.gradient
                self.step()
            self.gradient = None
        except BaseException as error:
            self.error = error
        finally:
            self.parameter.grad = None
            _RUNNING.pop(self.storage, None)
            self.ended.set()


class Stepped:
    """A parameter that ``step`` is to update as soon as its gradient is whole.

    Steps begin early for as long as this object lives. ``started`` is the one that began in the
    backward and that autograd has not come to yet.
    """

    def __init__(self, parameter: torch.Tensor, step: Callable[[], object]) -> None:
        self.parameter = parameter
        self.started: Step | None = None
        self._stand_in = 0
        self._step = step
        watch_backwards()
        _STEPPED[id(parameter)] = self

    def start(self, gradient: torch.Tensor, ready: Callable[[], object]) -> Step:
        """Begin a step after ``ready()``; ``gradient`` becomes its stand-in."""
        taken = gradient.detach()
        # pages that nobody ever touches, so that they take no memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        gradient.set_(mapped_like(taken, flags=flags))  # type: ignore[call-overload]
        self._stand_in = storage_address(gradient)
        self.started = Step(self.parameter, taken, self._step, ready)
        _RUNNING[self.started.storage] = self.started
        _THREAD.submit(self.started.run)
        return self.started

    def gradient_is_whole(self) -> None:
        """For the hook that autograd calls when the gradient is in ``parameter.grad``.

        Step, or end the step that has begun: afterwards there is no gradient. The error of the
        step goes to the caller, and then the gradient is still there.
        """
        early, self.started = self.started, None
        if early is None or early.backward != running_backward():
            self._step()
            self.parameter.grad = None
            return
        early.ended.wait()
        found, self.parameter.grad = self.parameter.grad, early.gradient
        if early.error is not None:
            raise early.error
        if found is None or storage_address(found) != self._stand_in:
            raise RuntimeError(
                "a hook has changed a gradient after the optimizer had stepped with it: register "
                "it on the parameter, and then the optimizer waits for it"
            )


class _BackwardSteps(GraphInBackward):
    """What is known of the graph that runs in this thread's backward, and what began there."""

    def __init__(self) -> None:
        super().__init__()
        self.of_this_graph: frozenset[int] = frozenset()
        self.shared: frozenset[int] = frozenset()
        self.steps: list[Step] = []


_STEPPED: WeakValueDictionary[int, Stepped] = WeakValueDictionary()
_BACKWARD = _BackwardSteps()
_RUNNING: dict[int, Step] = {}
"""Steps on their way, by the addresses of what they write: one begins after it was read again."""
_THREAD = ThreadPoolExecutor(1, "fxremat steps")


def _begin_anew() -> None:
    """The thread stays behind in a fork, and so do its steps."""
    global _THREAD
    _THREAD = ThreadPoolExecutor(1, "fxremat steps")
    _RUNNING.clear()


os.register_at_fork(after_in_child=_begin_anew)


# --- in the backward ---------------------------------------------------------------------


@register("(Tensor(a!) gradient, Tensor(b!) weight, Tensor[] read, Device device) -> ()", WAITS)
def arrived(
    gradient: torch.Tensor, weight: torch.Tensor, read: list[torch.Tensor], device: torch.device
) -> None:
    """The optimizer of ``weight`` may step.

    ``gradient``, in host memory, is what the graph returns for its input ``weight``, and is
    complete when ``device`` comes here; so are all copies of ``weight``. Nothing uses either from
    here on. The first such call of a graph names what else of its inputs is read later.
    """
    if not _STEPPED:
        return
    if _BACKWARD.is_another():
        _begin([weight, *read])
    stepped = _STEPPED.get(id(weight))
    if stepped is not None and stepped.parameter is weight and _may_step(weight, gradient):
        _BACKWARD.steps.append(stepped.start(gradient, now_on(device)))
        finish(but=STEPS_AHEAD)


def _begin(host: Sequence[torch.Tensor]) -> None:
    """Find out about the graph that runs now."""
    finish()
    own = (id(adder.variable) for adder in accumulators_of(running_node()))
    _BACKWARD.of_this_graph = frozenset(own) if runs_in_one_thread() else frozenset()
    uses = Counter(map(storage_address, {id(tensor): tensor for tensor in host}.values()))
    _BACKWARD.shared = frozenset(address for address, count in uses.items() if count > 1)


def _may_step(weight: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` is the whole one, and nobody reads it or the weight from here on."""
    known = _BACKWARD
    return (
        id(weight) in known.of_one_edge
        and id(weight) in known.of_this_graph
        and weight.grad is None
        and hooks_on(weight) == 1
        and storage_address(weight) not in known.shared
        # and autograd would keep this gradient as it is
        and (weight.size(), weight.stride()) == (gradient.size(), gradient.stride())
        and (weight.dtype, weight.device) == (gradient.dtype, gradient.device)
    )


def finish(but: int = 0) -> None:
    """The backward goes on when the steps that began in it have ended, ``but`` for the last ones.

    Errors are for the hooks.
    """
    end = max(0, len(_BACKWARD.steps) - but)
    steps, _BACKWARD.steps = _BACKWARD.steps[:end], _BACKWARD.steps[end:]
    for step in steps:
        step.ended.wait()


def before_reading(host: torch.Tensor) -> None:
    """Wait for a step that still writes ``host``: the backward in which it began has failed."""
    if step := _RUNNING.get(storage_address(host)):
        step.ended.wait()


def now_on(device: torch.device) -> Callable[[], object]:
    """What blocks until ``device`` has come as far as it has been asked to until now.

    The thread sleeps: one that spins would take a core from optimizer steps.
    """
    if device.type != "cuda":
        return bool
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).record_event(event)
    wait: Callable[[], object] = event.synchronize
    return wait
