"""How many bytes of states an optimizer holds once it has made its first step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.compat.tensors import local_part, storage_key, without_memory
from fxremat.errors import NotTraceable
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES, round_up


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
