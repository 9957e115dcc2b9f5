"""Steps of an optimizer on tensors without memory: what it holds then, and makes meanwhile.

A model has many weights of few kinds. Of each kind some weights step here, and the rest is
concluded: states are as many as weights. What a step makes beside grows with the weights where it
goes through all of them at once, and does not where it goes through one after the other; whether
it does is seen in a second step of fewer weights.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxremat.compat.optimizers import steps_as_with
from fxremat.compat.tensors import (
    local_part,
    plain_tensors,
    storage_key,
    storage_watch,
    without_memory,
)
from fxremat.core.constants import STEPPED_ALIKE
from fxremat.errors import NotTraceable
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES, round_up
from fxremat.memory.optimizer_states import Held
from fxremat.memory.storages import Meter, MeteredStorage


def held_after_a_step(optimizer: Optimizer) -> Held:
    """Its states after the first step, and what each later step makes on top of all that is there.

    Parameters, states and what is registered with the optimizer stay as they are. Of parameters
    that ranks share, this rank's parts count. Raises `NotTraceable` where the step needs kernels
    that do not run without data.
    """
    try:
        return _after_a_step(optimizer)
    except Exception as error:
        why = f"cannot step without data ({type(error).__name__}: {error})"
        raise NotTraceable(type(optimizer).__name__, why) from error


@dataclass
class _Weight:
    """A weight, which stands for so many; it is the ``number``-th of its kind."""

    real: torch.Tensor
    number: int
    stands_for: int = 1
    stand_in: Any = None

    @property
    def nbytes(self) -> int:
        return self.real.numel() * self.real.element_size()


def _weights_of(optimizer: Optimizer) -> list[list[_Weight]]:
    """By group, the weights that step here."""
    groups, last, met = [], dict[Any, _Weight](), Counter[Any]()
    for number, group in enumerate(optimizer.param_groups):
        groups.append(list[_Weight]())
        for weight in group["params"]:
            if not weight.requires_grad:
                continue
            real = local_part(weight.detach())
            kind = (number, real.shape, real.stride(), real.dtype, real.device)
            met[kind] += 1
            if met[kind] <= STEPPED_ALIKE:
                last[kind] = _Weight(real, met[kind])
                groups[-1].append(last[kind])
            else:
                last[kind].stands_for += 1
    return groups


def _after_a_step(optimizer: Optimizer) -> Held:
    groups = _weights_of(optimizer)
    weights = [one for group in groups for one in group]
    kinds = [type(w) for group in optimizer.param_groups for w in group["params"]]
    stepping = _Stepping(_like(optimizer), optimizer.param_groups, groups)
    with without_memory() as made, steps_as_with(kinds, stepping.see):
        for one in weights:
            one.stand_in = made(one.real)
            one.stand_in.grad = torch.empty_like(one.stand_in)
        stepping.devices = {one.stand_in.device for one in weights}
        stepping.step(STEPPED_ALIKE)
        states = stepping.states()
        most, fewer = stepping.step(STEPPED_ALIKE), stepping.step(STEPPED_ALIKE - 1)
    added = sum(one.nbytes for one in weights if one.number == STEPPED_ALIKE)
    missing = sum((one.stands_for - 1) * one.nbytes for one in weights)
    return Held(states, most + ((most - fewer) * missing // added if added else 0))


def _like(optimizer: Optimizer) -> Any:
    """One of the same kind, without what is registered with it."""
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.__dict__ = {  # schedulers put a "step" of their own there
        name: OrderedDict() if name.endswith("_hooks") else own
        for name, own in vars(optimizer).items()
        if name != "step"
    }
    stand_in.state = defaultdict(dict)
    return stand_in


@dataclass
class _Stepping:
    """A stand-in for an optimizer, and what its steps make."""

    optimizer: Any
    options: Sequence[dict[str, Any]]
    groups: list[list[_Weight]]
    devices: set[torch.device] = field(default_factory=set)
    _known: set[int] = field(default_factory=set)
    _meter: Meter[MeteredStorage] = field(default_factory=Meter)

    def step(self, most_alike: int) -> int:
        """Step for so many weights of a kind; the bytes that were there at most beside."""
        self.optimizer.param_groups = [
            {**options, "params": [one.stand_in for one in group if one.number <= most_alike]}
            for options, group in zip(self.options, self.groups, strict=True)
        ]
        self._meter, self._known = Meter(), set(self._storages(self._all()))
        self.optimizer.step()
        return self._meter.peak

    def states(self) -> int:
        """Bytes of the states of all weights that the ones here stand for."""
        alike = {id(one.stand_in): one.stands_for for group in self.groups for one in group}
        sizes: dict[int, int] = {}
        for weight, state in self.optimizer.state.items():
            times = alike.get(id(weight), 1)
            sizes |= {key: times * size for key, size in self._storages(dict(state)).items()}
        return sum(sizes.values())

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an op gives."""
        self._meter.sweep()
        for tensor in pytree.tree_leaves(result):
            for key, size in self._storages(tensor).items():
                if key not in self._known and key not in self._meter.live:
                    is_gone, name = storage_watch(tensor)[1], self._meter.allocate(size)
                    self._meter.add(key, MeteredStorage(size, is_gone, name))

    def _all(self) -> list[Any]:
        weights = [one.stand_in for group in self.groups for one in group]
        states = [dict(state) for state in self.optimizer.state.values()]
        return [*weights, *(weight.grad for weight in weights), *states]

    def _storages(self, values: Any) -> dict[int, int]:
        """Those on the devices of weights, with their bytes in an allocator's blocks."""
        found = {}
        for leaf in pytree.tree_leaves(values):
            for part in plain_tensors(leaf):
                if part.device in self.devices:
                    block = MIN_BLOCK_BYTES if part.device.type == "cuda" else 1
                    nbytes = part.untyped_storage().nbytes()
                    found[storage_key(part)] = round_up(nbytes, block)
        return found
