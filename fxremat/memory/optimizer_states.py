"""What an optimizer holds between steps, and what its step takes at its peak.

`optimizer_state_bytes` asks an optimizer by letting it step on tensors without memory. By name,
where there is no optimizer yet, `held_by` knows what these hold for each weight:

* SGD holds nothing, with momentum one number for each weight.
* Adam and AdamW hold two, of the weight's type (`torch/optim/adam.py`); the step as torch runs it
  by default makes one more for all weights at once (``_foreach_sqrt``).
* With a master copy, weights of 16 bits have one in float32, and both moments beside it.
* Adafactor holds a row and a column of each matrix in float32 (Shazeer, Stern: "Adafactor", 2018,
  section 4), and of a vector all of it.
* 8-bit Adam holds two bytes for each weight and two scales for each 256 of them; tensors below
  4,096 weights stay in float32 (Dettmers et al., "8-bit optimizers via block-wise quantization",
  2022).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.compat.tensors import local_part, storage_key, without_memory
from fxremat.errors import NotTraceable
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES, round_up

_FLOAT = torch.float32.itemsize
_BLOCK, _SMALL = 256, 4096  # of 8-bit Adam (Dettmers et al.)


@dataclass(frozen=True)
class Held:
    """Bytes of the states of one weight, and of what the step makes on top of them."""

    states: int
    step: int = 0


def _nothing(weight: torch.Tensor) -> Held:
    return Held(0)


def _one(weight: torch.Tensor) -> Held:
    return Held(_bytes(weight))


def _adam(weight: torch.Tensor) -> Held:
    return Held(2 * _bytes(weight), _bytes(weight))


def _master(weight: torch.Tensor) -> Held:
    full = weight.numel() * _FLOAT
    copy = full if weight.dtype.itemsize < _FLOAT else 0
    return Held(copy + 2 * full, full + copy)


def _adafactor(weight: torch.Tensor) -> Held:
    shape = tuple(weight.shape)
    if len(shape) < 2:
        return Held(weight.numel() * _FLOAT, weight.numel() * _FLOAT)
    others = prod(shape[:-2])
    return Held(others * (shape[-2] + shape[-1]) * _FLOAT, weight.numel() * _FLOAT)


def _eight_bits(weight: torch.Tensor) -> Held:
    count = weight.numel()
    if count < _SMALL:
        return Held(2 * count * _FLOAT)
    return Held(2 * (count + -(-count // _BLOCK) * _FLOAT))


OPTIMIZERS: Mapping[str, Callable[[torch.Tensor], Held]] = {
    "none": _nothing,
    "sgd": _nothing,
    "sgd-momentum": _one,
    "adam": _adam,
    "adamw": _adam,
    "adamw-master": _master,
    "adamw-8bit": _eight_bits,
    "adafactor": _adafactor,
}
"""By name: what one weight takes."""

ONE_BY_ONE = frozenset({"adafactor", "adamw-8bit"})
"""Optimizers whose step goes through the weights one after the other."""


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.dtype.itemsize


def held_by(optimizer: str, weights: Iterable[torch.Tensor]) -> Held:
    """What the optimizer takes for all weights that are trained; tensors may be fake.

    Raises `KeyError` where the name is not one of `OPTIMIZERS`.
    """
    each = [OPTIMIZERS[optimizer](weight) for weight in weights if weight.requires_grad]
    steps = [one.step for one in each]
    at_once = max(steps, default=0) if optimizer in ONE_BY_ONE else sum(steps)
    return Held(sum(one.states for one in each), at_once)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states after the first step, on the device of the parameters.

    For the option ``reserve``: states come when the optimizer first steps, after the model was
    compiled. The step is made on tensors without memory; parameters, states and what is registered
    with the optimizer stay as they are. On CUDA each state takes whole blocks of the allocator. Of
    parameters that ranks share, this rank's parts count.

    Raises `NotTraceable` where the step needs data, or kernels that have no such form.
    """
    try:
        states = list(_states_after_a_step(optimizer))
    except Exception as error:
        why = f"cannot step without data ({type(error).__name__}: {error}); give reserve in bytes"
        raise NotTraceable(type(optimizer).__name__, why) from error
    return sum(states)


def _states_after_a_step(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """The bytes of each state that lies where the parameters do."""
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.__dict__ = {  # schedulers put a "step" of their own there
        name: OrderedDict() if name.endswith("_hooks") else own
        for name, own in vars(optimizer).items()
        if name != "step"
    }
    with without_memory() as made:
        devices = set()
        groups = []
        for group in optimizer.param_groups:
            own = [weight for weight in group["params"] if weight.requires_grad]
            weights = [made(local_part(weight.detach())) for weight in own]
            for weight in weights:
                weight.grad = torch.empty_like(weight)
                devices.add(weight.device)
            groups.append({**group, "params": weights})
        stand_in.param_groups = groups
        stand_in.state = defaultdict(dict)
        stand_in.step()
        seen: dict[int, int] = {}
        for value in pytree.tree_leaves([dict(one) for one in stand_in.state.values()]):
            if isinstance(value, torch.Tensor) and value.device in devices:
                nbytes = value.untyped_storage().nbytes()
                block = MIN_BLOCK_BYTES if value.device.type == "cuda" else 1
                seen[storage_key(value)] = round_up(nbytes, block)
    yield from seen.values()
