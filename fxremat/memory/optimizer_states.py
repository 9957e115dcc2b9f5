"""What an optimizer holds between steps, and what its step takes at its peak, by its name.

Where there is no optimizer yet, `held_by` knows what these hold for each weight:

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

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
