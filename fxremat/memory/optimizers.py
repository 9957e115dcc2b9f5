"""What the optimizers of a graph's loop take: their states, and what their steps make beside.

States come when an optimizer first steps, after its model was compiled, and stay. So an optimizer
that holds parameters of a graph is looked for when the graph is compiled, among all that live.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxremat.compat.absent.tracing import apart_from_tracing
from fxremat.compat.optimizers import live_optimizers, wrapped_by
from fxremat.compat.tensors import local_part, plain_tensors
from fxremat.errors import NotTraceable
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES, round_up
from fxremat.memory.optimizer_states import Held, held_by
from fxremat.memory.optimizer_step import held_after_a_step
from fxremat.memory.storages import storages_of
from fxremat.runtime.host_memory import is_on

log = logging.getLogger(__name__)

_SCALARS = 4 * torch.float64.itemsize
"""Python's numbers become tensors in an op, which a step without memory does not show."""

OptimizerLike = str | Callable[[Any], Optimizer] | ref[Optimizer]
"""A name (`fxremat.memory.optimizer_states.OPTIMIZERS`), what makes one of parameters, or one."""


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes that optimizers take of one device.

    ``states`` are there from their first step on; of these ``missing`` are not there yet. While
    they step they make ``step`` bytes beside, and ``trained`` bytes of weights and gradients are
    there.
    """

    states: int = 0
    missing: int = 0
    step: int = 0
    trained: int = 0

    @property
    def when_stepping(self) -> int:
        """All of it, in a step."""
        return self.trained + self.states + self.step + _SCALARS


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all states after the first step, on the device of the parameters.

    The step is made on tensors without memory; parameters, states and what is registered with the
    optimizer stay as they are. On CUDA each state takes whole blocks of the allocator. Of
    parameters that ranks share, this rank's parts count. What wraps others has their states.

    Raises `NotTraceable` where the step needs kernels that do not run without data.
    """
    inner = wrapped_by(optimizer) or [optimizer]
    return sum(held_after_a_step(one).states for one in inner)


def optimizer_memory(
    asked: OptimizerLike | None, weights: Iterable[torch.Tensor], device: torch.device
) -> OptimizerMemory:
    """Of the optimizer that is ``asked`` for, or else of those that hold some of the ``weights``.

    What lies on no ``device``, as in host memory, does not count.
    """
    if asked == "none":
        return OptimizerMemory()
    trained = [one for one in {id(x): x for x in weights}.values() if one.requires_grad]
    with apart_from_tracing():
        if not isinstance(asked, str):
            return _sum_of([_memory(one, device) for one in _optimizers(asked, trained)])
        own = _parts_on(device, trained)
        held = held_by(asked, own)
        return OptimizerMemory(held.states, held.states, held.step, 2 * sum(map(_size, own)))


def _optimizers(
    asked: Callable[[Any], Optimizer] | ref[Optimizer] | None, weights: Sequence[torch.Tensor]
) -> list[Optimizer]:
    """The one that is asked for, or those that hold some of the weights."""
    if asked is None:
        return list(_holding(weights))
    made: Any = asked() if isinstance(asked, ref) else asked(weights) if weights else None
    if made is None:
        return []
    return wrapped_by(made) or [made]


def _holding(weights: Iterable[torch.Tensor]) -> Iterator[Optimizer]:
    """The live optimizers that step for weights for which no newer one does."""
    left = {id(weight) for weight in weights}
    for one in live_optimizers():
        if not left:
            return
        own = {id(weight) for group in one.param_groups for weight in group["params"]}
        if own & left:
            left -= own
            yield one


_KNOWN: WeakKeyDictionary[Optimizer, tuple[Any, Held]] = WeakKeyDictionary()
"""What steps have shown, with the weights that these were made for."""


def _held(optimizer: Optimizer) -> Held:
    """As a step on tensors without memory shows it; else as its class says, or what is there."""
    weights = [w for group in optimizer.param_groups for w in group["params"] if w.requires_grad]
    key = tuple((id(weight), weight.device) for weight in weights)
    known = _KNOWN.get(optimizer)
    if known is not None and known[0] == key:
        return known[1]
    try:
        held = held_after_a_step(optimizer)
    except NotTraceable as error:
        held = _guessed(optimizer, weights, error)
    _KNOWN[optimizer] = key, held
    return held


def _guessed(optimizer: Optimizer, weights: Sequence[torch.Tensor], error: NotTraceable) -> Held:
    if "8bit" in type(optimizer).__name__.lower():
        return held_by("adamw-8bit", [local_part(one) for one in weights])
    log.warning(
        "%s\nIts states count only as far as they are there. What to do: name one that holds as "
        "much (optimizer='adamw'), or hold memory back for it (reserve).",
        error,
    )
    return Held(sum(_states_there(optimizer, weights[0].device).values()) if weights else 0)


def _memory(optimizer: Optimizer, device: torch.device) -> OptimizerMemory:
    own = _parts_on(device, (w for group in optimizer.param_groups for w in group["params"]))
    if not own:
        return OptimizerMemory()
    held = _held(optimizer)
    there = sum(_states_there(optimizer, device).values())
    sizes = list(map(_size, own))
    # A single weight may step in the backward, in which its gradient goes before others come.
    gradients = sum(sizes) if len(sizes) > 1 else 0
    step = held.step + (0 if gradients else sizes[0])
    missing = max(0, held.states - there)
    return OptimizerMemory(held.states, missing, step, sum(sizes) + gradients)


def _parts_on(device: torch.device, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of the weights that are trained, what lies on the device, and on this rank."""
    parts = [local_part(weight) for weight in weights if weight.requires_grad]
    return [part for part in parts if is_on(part, device)]


def _sum_of(each: Sequence[OptimizerMemory]) -> OptimizerMemory:
    """They hold their states together, and step one after the other."""
    return OptimizerMemory(
        sum(one.states for one in each),
        sum(one.missing for one in each),
        max((one.step for one in each), default=0),
        sum(one.trained for one in each),
    )


def _states_there(optimizer: Optimizer, device: torch.device) -> dict[int, int]:
    """Storages of states that there are already, with what an allocator takes for them."""
    leaves = pytree.tree_leaves([dict(one) for one in dict(optimizer.state).values()])
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and is_on(x, device)]
    parts = [part for tensor in tensors for part in plain_tensors(tensor)]
    block = MIN_BLOCK_BYTES if device.type == "cuda" else 1
    return {key: round_up(n, block) for key, n in storages_of(parts, device).items()}


def _size(weight: torch.Tensor) -> int:
    block = MIN_BLOCK_BYTES if weight.device.type == "cuda" else 1
    return round_up(weight.numel() * weight.element_size(), block)
