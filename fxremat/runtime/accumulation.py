"""Gradients that are added to ``weight.grad`` inside of a compiled backward, and then freed.

    accumulated(gradient, weight, read)

stands in a backward where the gradient of a weight is complete. If somebody asked for it (`ask`)
and there is a ``weight.grad``, the gradient is added to that, and its memory is given back: what
the graph returns for the weight is a tensor without memory, which autograd is kept from looking at.

It is done only where nobody can see a difference:

* In the backward that is running, nothing but this graph has a gradient for the weight, and
  autograd will add it to ``weight.grad``. That is known in a backward that Python began, if no
  other is running.
* Nobody has a hook on the weight, on what adds its gradient, or on the graph.
* Neither the rest of the graph (``read``) nor another gradient shares memory with ``weight.grad``.
* The gradient is a plain tensor like ``weight.grad``, and all of its memory.

Elsewhere autograd adds the gradient as ever, and a warning says why: its memory was not planned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fxremat.compat.backward import (
    GraphInBackward,
    accumulators_of,
    at_end_of_backward,
    hooks_on,
    hooks_on_node,
    no_other_backward,
    running_backward,
    running_node,
    watch_backwards,
)
from fxremat.core.layout import extent
from fxremat.runtime.host_memory import is_host, is_on, size_of_extent, storage_address
from fxremat.runtime.kernels import WAITS, register

log = logging.getLogger(__name__)


class _BackwardSums(GraphInBackward):
    """What is known of the graph that runs in this thread's backward.

    ``adders`` has what adds the gradient of each weight that the graph gives one to, by id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adders: dict[int, Any] = {}
        self.apart: frozenset[int] = frozenset()
        self.is_watched = False


_ASKED: Any = WeakIdKeyDictionary()
"""The parameters whose gradients are to be added early, and how often that was asked for."""
_BACKWARD = _BackwardSums()
_TOLD: set[str] = set()


def ask(parameters: Iterable[torch.Tensor]) -> None:
    """From now on the gradients of these are added early, until as many `withdraw`."""
    watch_backwards()
    for parameter in parameters:
        _ASKED[parameter] = _ASKED.get(parameter, 0) + 1


def withdraw(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in list(parameters):
        count = _ASKED.pop(parameter, 0) - 1
        if count > 0:
            _ASKED[parameter] = count


def will_be_added(tensor: object) -> bool:
    """Whether the gradient of an input of a graph is to be added early, as far as can be seen."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor in _ASKED
        and tensor.requires_grad
        and _is_plain(tensor)
        and not is_host(tensor)
        and hooks_on(tensor) == 0
    )


def living_gradients(weights: Iterable[object]) -> list[torch.Tensor]:
    """Of parameters, but those whose gradients are added while a backward runs."""
    own = (x for x in weights if isinstance(x, nn.Parameter) and not will_be_added(x))
    return [one.grad for one in own if one.grad is not None]


def expected_bytes(device: torch.device, *, missing_only: bool = False) -> int:
    """Bytes of all ``grad`` that there will be on ``device``, or of those that are missing yet."""
    alive = [one for asked in _ASKED.keyrefs() if (one := asked()) is not None]
    return sum(
        one.numel() * one.element_size()
        for one in alive
        if one.requires_grad and is_on(one, device) and (one.grad is None or not missing_only)
    )


# --- in the backward ---------------------------------------------------------------------


@register("(Tensor(a!) gradient, Tensor weight, Tensor[] read) -> ()", WAITS)
def accumulated(gradient: torch.Tensor, weight: torch.Tensor, read: Sequence[torch.Tensor]) -> None:
    """The gradient of ``weight`` may be added to its grad.

    ``gradient`` is what the graph returns for its input ``weight``. Nothing uses it from here on.
    ``read`` is what else of the graph's inputs is read later.
    """
    if not _ASKED:
        return
    if _BACKWARD.is_another():
        _begin()
    if weight not in _ASKED and _BACKWARD.adders:
        _tell("the graph was given a copy of it, as in checkpoint()", gradient)
    adder = _BACKWARD.adders.pop(id(weight), None)
    if adder is None or weight.grad is None:
        return
    reason = _reason_against(gradient, weight, weight.grad, read, adder)
    with no_other_backward() as alone:
        if alone and reason is None:
            weight.grad.add_(gradient)
            gradient.untyped_storage().resize_(0)
            _keep_from(adder)
            return
    _tell(reason or "another backward is running", gradient)


def _begin() -> None:
    """Find out about the graph that runs now."""
    known, node = _BACKWARD, running_node()
    if node is None:
        known.adders = {}
        return
    adders = [one for one in accumulators_of(node) if one.variable in _ASKED]
    known.adders = {id(one.variable): one for one in adders}
    at_end_of_backward(known.adders.clear)  # they keep their weights alive
    known.apart = _apart([one.variable for one in adders])
    known.is_watched = torch.is_anomaly_enabled() or hooks_on_node(node) > 0


def _apart(weights: Sequence[torch.Tensor]) -> frozenset[int]:
    """The ids of weights whose ``grad`` shares memory with no other, and with no weight."""
    runs = [(*_run(weight), 0) for weight in weights]
    runs += [(*_run(w.grad), id(w)) for w in weights if w.grad is not None]
    runs.sort()
    found, end = {key for _, _, key in runs}, 0
    for index, (start, stop, key) in enumerate(runs):
        if start < end or (index + 1 < len(runs) and runs[index + 1][0] < stop):
            found.discard(key)
        end = max(end, stop)
    return frozenset(found)


def _run(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided:
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + size_of_extent(tensor)


def _reason_against(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    sum_: torch.Tensor,
    read: Sequence[torch.Tensor],
    adder: Any,
) -> str | None:
    """Why autograd has to add the gradient itself; None if it need not."""
    known = _BACKWARD
    if id(weight) not in known.of_one_edge:
        return "it is not known that this graph alone has a gradient for it in this backward"
    if hooks_on(weight) or hooks_on_node(adder) or known.is_watched:
        return "a hook, or anomaly mode, looks at gradients"
    if not (_is_plain(weight) and _is_plain(gradient) and _is_plain(sum_)):
        return "it is no plain tensor"
    if sum_.requires_grad or not _alike(gradient, weight) or not _alike(gradient, sum_):
        return "the gradient, the parameter and its .grad differ in dtype, size or device"
    shared = id(weight) not in known.apart or extent(sum_.size(), sum_.stride()) < sum_.numel()
    if shared or any(storage_address(one) == storage_address(sum_) for one in read):
        return "its .grad shares memory with something else"
    storage = gradient.untyped_storage()
    is_whole = storage.nbytes() == size_of_extent(gradient) > 0
    if not is_whole or gradient.storage_offset() != 0 or not storage.resizable():
        return "the gradient is a part of a larger tensor"
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return own and tensor.layout is torch.strided and tensor.is_leaf


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device, one.size()) == (other.dtype, other.device, other.size())


def _keep_from(adder: Any) -> None:
    """Let autograd add nothing in this backward: it comes to ``adder`` with no memory to read."""
    number = running_backward()

    def nothing(gradients: tuple[torch.Tensor, ...]) -> tuple[None, ...] | None:
        handle.remove()
        return (None,) if running_backward() == number else None

    handle = adder.register_prehook(nothing)


def _tell(reason: str, gradient: torch.Tensor) -> None:
    if reason not in _TOLD:
        _TOLD.add(reason)
        log.warning(
            "fxremat: the gradient of a parameter of size %s is added to its .grad after the "
            "backward, as without accumulate_in_backward: %s; until then its bytes come on top of "
            "what was planned. Other gradients to which this happens are not reported",
            tuple(gradient.size()),
            reason,
        )
