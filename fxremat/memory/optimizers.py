"""What the optimizers of a graph's loop take: their states, and what their steps make beside.

States come when an optimizer first steps, after its model was compiled, and stay. So an optimizer
that holds parameters of a graph is looked for when the graph is compiled, among all that live.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxremat.compat.optimizers import live_optimizers, steps_as_with, wrapped_by
from fxremat.compat.tensors import (
    apart_from_tracing,
    local_part,
    plain_tensors,
    storage_key,
    storage_watch,
    without_memory,
)
from fxremat.core.constants import STEPPED_ALIKE
from fxremat.errors import NotTraceable
from fxremat.memory.allocator_settings import in_blocks
from fxremat.memory.storages import Meter, MeteredStorage, storages_of
from fxremat.runtime.host_memory import is_on

_FLOAT = torch.float32.itemsize
_BLOCK, _SMALL = 256, 4096  # of 8-bit Adam (Dettmers et al.)


@dataclass(frozen=True)
class Held:
    """Bytes of the states of one weight, and of what the step makes on top of them."""

    states: int
    step: int = 0


def _adam(weight: torch.Tensor) -> Held:
    return Held(2 * weight.nbytes, weight.nbytes)


def _master(weight: torch.Tensor) -> Held:
    full = weight.numel() * _FLOAT
    copy = full if weight.dtype.itemsize < _FLOAT else 0
    return Held(copy + 2 * full, full + copy)


def _adafactor(weight: torch.Tensor) -> Held:
    full = weight.numel() * _FLOAT
    if weight.dim() < 2:
        return Held(full, full)
    *others, rows, columns = weight.shape
    return Held(prod(others) * (rows + columns) * _FLOAT, full)


def _eight_bits(weight: torch.Tensor) -> Held:
    count = weight.numel()
    if count < _SMALL:
        return Held(2 * count * _FLOAT)
    return Held(2 * (count + -(-count // _BLOCK) * _FLOAT))


OPTIMIZERS: Mapping[str, Callable[[torch.Tensor], Held]] = {
    "none": lambda weight: Held(0),
    "sgd": lambda weight: Held(0),
    "sgd-momentum": lambda weight: Held(weight.nbytes),
    "adam": _adam,
    "adamw": _adam,
    "adamw-master": _master,
    "adamw-8bit": _eight_bits,
    "adafactor": _adafactor,
}
"""By name: what one weight takes."""

ONE_BY_ONE = frozenset({"adafactor", "adamw-8bit"})
"""Optimizers whose step goes through the weights one after the other."""


def held_by(optimizer: str, weights: Iterable[torch.Tensor]) -> Held:
    """What the optimizer takes for all weights that are trained; tensors may be fake.

    * SGD holds nothing, with momentum one number for each weight.
    * Adam and AdamW hold two, of the weight's type (`torch/optim/adam.py`); the step as torch runs
      it by default makes one more for all weights at once (``_foreach_sqrt``).
    * With a master copy, weights of 16 bits have one in float32, and both moments beside it.
    * Adafactor holds a row and a column of each matrix in float32 (Shazeer, Stern: "Adafactor",
      2018, section 4), and of a vector all of it.
    * 8-bit Adam holds two bytes for each weight and two scales for each 256 of them; tensors below
      4,096 weights stay in float32 (Dettmers et al., "8-bit optimizers via block-wise
      quantization", 2022).

    Raises `KeyError` where the name is not one of `OPTIMIZERS`.
    """
    each = [OPTIMIZERS[optimizer](weight) for weight in weights if weight.requires_grad]
    steps = [one.step for one in each]
    at_once = max(steps, default=0) if optimizer in ONE_BY_ONE else sum(steps)
    return Held(sum(one.states for one in each), at_once)


def held_after_a_step(optimizer: Optimizer) -> Held:
    """Its states after the first step, and what each later step makes on top of all that is there.

    A model has many weights of few kinds. Of each kind some weights step here, on tensors without
    memory, and the rest is concluded: states are as many as weights. What a step makes beside grows
    with the weights where it goes through all of them at once, and does not where it goes through
    one after the other; whether it does is seen in a second step of fewer weights.

    What stays as it is, and what is raised, is that of `optimizer_state_bytes`.
    """
    try:
        try:
            return _after_a_step(optimizer)
        except KeyError:  # it made its states before its first step
            return _after_a_step(optimizer, from_states=True)
    except Exception as error:
        why = f"cannot step without data ({type(error).__name__}: {error})"
        raise NotTraceable(type(optimizer).__name__, why) from error


@dataclass
class _Weight:
    """A weight, which stands for so many; it is the ``number``-th of its kind."""

    real: torch.Tensor
    number: int
    state: Mapping[str, Any]
    stands_for: int = 1
    stand_in: Any = None


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
                last[kind] = _Weight(real, met[kind], optimizer.state.get(weight, {}))
                groups[-1].append(last[kind])
            else:
                last[kind].stands_for += 1
    return groups


def _after_a_step(optimizer: Optimizer, *, from_states: bool = False) -> Held:
    groups = _weights_of(optimizer)
    weights = [one for group in groups for one in group]
    kinds = [type(w) for group in optimizer.param_groups for w in group["params"]]
    stepping = _Stepping(_like(optimizer), optimizer.param_groups, groups)
    with without_memory() as made, steps_as_with(kinds, stepping.see):
        for one in weights:
            one.stand_in = made(one.real)
            one.stand_in.grad = torch.empty_like(one.stand_in)
            if from_states:
                copied = {name: _without_memory(each, made) for name, each in one.state.items()}
                stepping.optimizer.state[one.stand_in] = copied
        stepping.devices = {one.stand_in.device for one in weights}
        stepping.step(STEPPED_ALIKE)
        states = stepping.states()
        most, fewer = stepping.step(STEPPED_ALIKE), stepping.step(STEPPED_ALIKE - 1)
    added = sum(one.real.nbytes for one in weights if one.number == STEPPED_ALIKE)
    missing = sum((one.stands_for - 1) * one.real.nbytes for one in weights)
    return Held(states, most + ((most - fewer) * missing // added if added else 0))


def _without_memory(state: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A state of a weight; numbers on the host, such as counts of steps, are still known."""
    if not isinstance(state, torch.Tensor):
        return state
    if not state.dim() and state.device.type == "cpu":
        return torch.tensor(state.item(), dtype=state.dtype)
    return made(local_part(state.detach()))


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
                    nbytes = part.untyped_storage().nbytes()
                    found[storage_key(part)] = in_blocks(nbytes, part.device)
        return found


log = logging.getLogger(__name__)

_SCALARS = 4 * torch.float64.itemsize
"""Python's numbers become tensors in an op, which a step without memory does not show."""

OptimizerLike = str | Callable[[Any], Optimizer] | ref[Optimizer]
"""A name (`fxremat.memory.optimizers.OPTIMIZERS`), what makes one of parameters, or one."""


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
        if isinstance(asked, str):
            own = _parts_on(device, trained)
            held = held_by(asked, own)
            return OptimizerMemory(held.states, held.states, held.step, 2 * sum(map(_size, own)))
        each = [_memory(one, device) for one in _optimizers(asked, trained)]
        return OptimizerMemory(  # they step one after the other
            sum(one.states for one in each),
            sum(one.missing for one in each),
            max((one.step for one in each), default=0),
            sum(one.trained for one in each),
        )


def _optimizers(
    asked: Callable[[Any], Optimizer] | ref[Optimizer] | None, weights: Sequence[torch.Tensor]
) -> list[Optimizer]:
    """The one that is asked for, or those that step for weights for which no newer one does."""
    if asked is not None:
        made: Any = asked() if isinstance(asked, ref) else asked(weights) if weights else None
        return [] if made is None else wrapped_by(made) or [made]
    left, found = {id(weight) for weight in weights}, []
    for one in live_optimizers() if left else ():
        own = {id(weight) for group in one.param_groups for weight in group["params"]}
        if own & left:
            left -= own
            found.append(one)
        if not left:
            break
    return found


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
        "%s\nIts states count only as far as they exist. What to do: name an optimizer that holds "
        "as much (optimizer='adamw'), or set memory aside for it (reserve).",
        error,
    )
    return Held(_states_there(optimizer, weights[0].device) if weights else 0)


def _memory(optimizer: Optimizer, device: torch.device) -> OptimizerMemory:
    own = _parts_on(device, (w for group in optimizer.param_groups for w in group["params"]))
    if not own:
        return OptimizerMemory()
    held = _held(optimizer)
    sizes = list(map(_size, own))
    # A single weight may step in the backward, in which its gradient goes before others come.
    gradients = sum(sizes) if len(sizes) > 1 else 0
    step = held.step + (0 if gradients else sizes[0])
    missing = max(0, held.states - _states_there(optimizer, device))
    return OptimizerMemory(held.states, missing, step, sum(sizes) + gradients)


def _parts_on(device: torch.device, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of the weights that are trained, what lies on the device, and on this rank."""
    parts = [local_part(weight) for weight in weights if weight.requires_grad]
    return [part for part in parts if is_on(part, device)]


def _states_there(optimizer: Optimizer, device: torch.device) -> int:
    """What an allocator takes for states that there are already."""
    leaves = pytree.tree_leaves([dict(one) for one in dict(optimizer.state).values()])
    return sum(in_blocks(n, device) for n in storages_of(leaves, device).values())


def _size(weight: torch.Tensor) -> int:
    return in_blocks(weight.nbytes, weight.device)
