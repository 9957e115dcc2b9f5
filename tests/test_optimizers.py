"""What the optimizers of a loop take: which are found, and how many bytes."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn, optim
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.compat.optimizers import note_optimizers
from fxremat.errors import NotTraceable
from fxremat.memory.optimizers import OptimizerMemory, held_after_a_step, optimizer_memory
from fxremat.runtime.host_memory import HOST_MEMORY
from tests.ranks import least_named

CPU = torch.device("cpu")
NUMBER = 4


@pytest.fixture(autouse=True)
def noted() -> None:
    gc.collect()
    note_optimizers()


def model(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)), nn.Linear(64, 200))


def size(net: nn.Module) -> int:
    return sum(weight.nbytes for weight in net.parameters())


def found(net: nn.Module, asked: Any = None) -> OptimizerMemory:
    return optimizer_memory(asked, net.parameters(), CPU)


def stepped(net: nn.Module, optimizer: optim.Optimizer) -> None:
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


class Early(optim.Optimizer):
    """It makes its states before its first step, and needs them there, as Adagrad once did."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(weight)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for weight in (each for group in self.param_groups for each in group["params"]):
                own = self.state[weight]
                own["step"] += 1
                own["sum"] += weight.grad * (1 / own["step"].item())
                weight -= own["sum"]


MAKE = [
    partial(optim.SGD, lr=0.1),
    partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    optim.AdamW,
    partial(optim.AdamW, foreach=True, amsgrad=True),
    partial(optim.AdamW, fused=True),
    partial(optim.Adadelta, capturable=False),
    partial(optim.RMSprop, centered=True, foreach=True),
    optim.Adafactor,  # it looks at the norm of each weight
    optim.Adagrad,
    Early,
    optim.NAdam,
    optim.Rprop,
]


@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("make", MAKE, ids=lambda make: str(getattr(make, "keywords", make)))
def test_they_are_what_a_real_step_takes(make: Callable[..., Any], layers: int) -> None:
    """But for single numbers. Few of many weights that are alike show it."""
    net = model(layers)
    optimizer = make(net.parameters())
    before, states = copy.deepcopy(net.state_dict()), len(optimizer.state)
    told = held_after_a_step(optimizer)
    assert len(optimizer.state) == states
    torch.testing.assert_close(net.state_dict(), before)
    stepped(net, optimizer)
    taken = fxremat.measure_peak(optimizer.step, held=(net, optimizer))
    assert told.states == taken.start_bytes - 2 * size(net)
    assert abs(told.step - taken.above_start_bytes) <= 64 * NUMBER
    assert fxremat.optimizer_state_bytes(optimizer) == told.states


def test_the_one_that_holds_the_weights_is_found() -> None:
    net, other = model(), model()
    assert found(net) == OptimizerMemory()
    optimizer = optim.SGD(net.parameters(), momentum=0.9)
    optim.AdamW(other.parameters())
    nbytes = size(net)
    assert found(net) == OptimizerMemory(nbytes, nbytes, 0, 2 * nbytes)
    stepped(net, optimizer)
    assert found(net) == OptimizerMemory(nbytes, 0, 0, 2 * nbytes)
    del optimizer
    assert found(net) == OptimizerMemory()


def test_the_newest_counts() -> None:
    """An older one may live on a while, as where a scheduler has made a cycle of it."""
    net = model()
    old = optim.AdamW(net.parameters())
    optim.lr_scheduler.StepLR(old, 1)
    new = optim.SGD(net.parameters(), momentum=0.9)
    assert found(net).states == size(net)
    del new
    assert found(net).states > 2 * size(net)


def test_several_hold_their_states_together_and_step_in_turn() -> None:
    net = model()
    first = optim.AdamW(net[0].parameters(), foreach=True)
    last = optim.AdamW(net[2].parameters(), foreach=True)
    both, steps = found(net), [held_after_a_step(one).step for one in (first, last)]
    assert both.states == sum(map(fxremat.optimizer_state_bytes, (first, last)))
    assert both.step == max(steps)
    assert both.trained == 2 * (size(net[0]) + size(net[2]))


def test_an_optimizer_for_each_weight_steps_in_the_backward() -> None:
    """Gradients are not there together: the largest counts."""
    net = model()
    fxremat.step_in_backward(net, lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    largest = max(weight.nbytes for weight in net.parameters())
    assert found(net) == OptimizerMemory(size(net), size(net), largest, size(net))


def test_states_of_weights_in_host_memory_are_there() -> None:
    net = nn.Linear(8, 8, bias=False)
    net.weight = nn.Parameter(HOST_MEMORY.allocate(256, lambda: torch.ones(8, 8)))
    optimizer = optim.AdamW(net.parameters())
    assert found(net) == OptimizerMemory()
    assert optimizer.param_groups


@pytest.mark.parametrize("asked", ["adamw", optim.AdamW, partial(optim.AdamW, fused=True)])
def test_one_that_comes_later_is_said(asked: Any) -> None:
    net = model()
    told = found(net, asked)
    numbers = 0 if asked == "adamw" else NUMBER * len(list(net.parameters()))
    assert told.states == told.missing == 2 * size(net) + numbers
    assert told.trained == 2 * size(net)


def test_one_that_is_said_counts_and_no_other() -> None:
    net = model()
    optimizer, said = optim.AdamW(net.parameters()), optim.SGD(net[0].parameters(), momentum=0.9)
    assert found(net, ref(said)).states == size(net[0])
    assert found(net, "none") == OptimizerMemory()
    assert optimizer.param_groups


class EightBits(optim.SGD):
    """As one whose kernels need data."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("no data")


AdamW8bit = type("AdamW8bit", (EightBits,), {})


def test_without_a_step_the_class_says_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(128, 64, bias=False)
    eight: Any = AdamW8bit(net.parameters())
    blocks = 128 * 64 // 256
    assert found(net).states == 2 * (128 * 64 + blocks * NUMBER)
    assert not caplog.messages
    del eight
    unknown = EightBits(net.parameters())
    unknown.state[net.weight]["moment"] = torch.zeros(10)
    assert found(net).states == 40
    assert found(net).states == 40
    assert len(caplog.messages) == 1
    assert "optimizer='adamw'" in caplog.messages[0]


def test_a_look_is_quick() -> None:
    """At thousand weights; the best of several, for other programs run beside."""
    net = model(500)
    optimizer = optim.AdamW(net.parameters())
    assert found(net).states

    def seconds() -> float:
        begin = time.perf_counter()
        found(net)
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(5)) < 0.05
    assert optimizer.param_groups


def loop(net: nn.Module, optimizer: optim.Optimizer, rows: int, **options: Any) -> Any:
    """A step of a compiled model and its optimizer, which has run, and what it holds."""
    torch._dynamo.reset()
    quick = {"executor": "aot_eager", "solver": "greedy", "variants": "none", **options}
    x = torch.ones(rows, 64)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = net(x)
        return result.square().sum()

    compiled: Any = torch.compile(loss_of, backend="fxremat", options=quick)

    def step() -> None:
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, (net, optimizer, x)


def test_a_loop_stays_within_a_budget_that_counts_its_optimizer() -> None:
    """Nobody says what the optimizer holds."""
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    optimizer = optim.AdamW(net.parameters())
    step, held = loop(net, optimizer, 2048, memory_budget="1GiB")
    plain = fxremat.measure_peak(step, held=held).peak_bytes
    states = fxremat.optimizer_state_bytes(optimizer)
    assert fxremat.reports()[-1].held_bytes == states
    predicted = fxremat.reports()[-1].predicted_peak_bytes
    assert plain == pytest.approx(predicted, abs=16 * NUMBER)  # eager ops make tensors of numbers
    for fraction in (0.8, 0.7):
        budget = int(fraction * plain)
        step, held = loop(net, optimizer, 2048, memory_budget=budget)
        assert fxremat.measure_peak(step, held=held).peak_bytes <= budget


def test_no_budget_is_less_than_the_step_of_the_optimizer() -> None:
    """Of a small batch that step is the peak, and the least that works is what it takes."""
    net = model(layers=20)
    optimizer = optim.AdamW(net.parameters(), foreach=True)
    with pytest.raises(BackendCompilerFailed, match="when the optimizer steps") as refused:
        loop(net, optimizer, 2, memory_budget="1MiB")
    least = least_named(refused.value)
    step, held = loop(net, optimizer, 2, memory_budget=least)
    peak = fxremat.measure_peak(step, held=held).peak_bytes
    assert peak == pytest.approx(least, abs=100 * NUMBER)
    assert peak <= least


# --- optimizer bytes ----------------------------------------------------------------------


def test_a_scheduler_and_hooks_are_left_alone() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    assert fxremat.optimizer_state_bytes(optimizer) > 0
    assert not called


def test_frozen_weights_have_none() -> None:
    net = model(1)
    net[0].requires_grad_(False)
    assert fxremat.optimizer_state_bytes(optim.SGD(net.parameters(), momentum=0.9)) == size(net[1])


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
