"""The bytes of an optimizer's states, before it has any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import fxremat
from fxremat.errors import NotTraceable


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))


def states(optimizer: optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    "make",
    [
        optim.AdamW,
        partial(optim.AdamW, fused=True, amsgrad=True),
        partial(optim.Adam, foreach=True),
        partial(optim.SGD, lr=0.1),
        partial(optim.SGD, lr=0.1, momentum=0.9),
        partial(optim.Adadelta, capturable=False),
        optim.RMSprop,
        optim.Adafactor,  # it looks at the norm of each weight
    ],
)
def test_they_are_those_that_a_step_makes(make: Callable[..., optim.Optimizer]) -> None:
    net = model()
    optimizer = make(net.parameters())
    before = copy.deepcopy(net.state_dict())
    told = fxremat.optimizer_state_bytes(optimizer)
    assert states(optimizer) == 0
    torch.testing.assert_close(net.state_dict(), before)
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    assert told == states(optimizer)
    assert fxremat.optimizer_state_bytes(optimizer) == told


def test_a_scheduler_and_hooks_are_left_alone() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    assert fxremat.optimizer_state_bytes(optimizer) > 0
    assert not called


def test_frozen_weights_have_none() -> None:
    net = model()
    net[0].requires_grad_(False)
    assert fxremat.optimizer_state_bytes(optim.SGD(net.parameters(), momentum=0.9)) == 24 * 8 * 4


class NeedsData(optim.SGD):
    """Its step looks for what is in a gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["places"] = weight.grad.nonzero()


def test_a_step_whose_sizes_depend_on_data_is_refused() -> None:
    with pytest.raises(NotTraceable, match="NeedsData: cannot step without data"):
        fxremat.optimizer_state_bytes(NeedsData(model().parameters()))


def test_of_parameters_that_ranks_share_this_ranks_parts_count() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, part = init_device_mesh("cpu", (4,)), torch.ones(2, 3)
        shared = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))
        assert shared.shape == (8, 3)
        told = fxremat.optimizer_state_bytes(optim.AdamW([shared]))
        assert told == fxremat.optimizer_state_bytes(optim.AdamW([nn.Parameter(part)]))
    finally:
        distributed.destroy_process_group()
