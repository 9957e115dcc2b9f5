"""Who trains outside of a budget that was asked for is told so, once, and why."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat import inactive
from fxremat.compat.dynamo import frames_given_up
from fxremat.sizes import MIB
from tests.end_to_end import measured, step
from tests.graphs import Net
from tests.small import Block

OPTIONS: dict[str, Any] = {
    "executor": "aot_eager",
    "solver": "greedy",
    "variants": "none",
    "memory_budget": 64 * MIB,
}
WORDS = 100

pytestmark = pytest.mark.usefixtures("fresh")


class Recurrent(nn.Module):
    """Dynamo leaves nn.LSTM to eager mode unless it is asked not to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 32), nn.Linear(64, WORDS)
        self.recurrent = nn.LSTM(32, 64, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(words))
        return F.cross_entropy(self.head(states).flatten(0, 1), words.flatten())


class BreakInLoop(nn.Module):
    """Dynamo runs a function as it is where a graph would break in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is said here, as in a new process."""
    gc.collect()
    torch._dynamo.utils.clear_compilation_metrics()
    inactive.reset()
    for watching in inactive._WATCHES:
        watching.told.clear()
    with caplog.at_level(logging.WARNING, logger=inactive.__name__):
        yield caplog


def train(model: nn.Module, call: Any, given: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        call(given).backward()
        optimizer.step()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fxremat", options={**OPTIONS, **options})


def said(told: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in told.records if one.name == inactive.__name__]


def test_a_recurrent_net_is_named_with_what_to_set(told: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    train(model, compiled(model), torch.randint(WORDS, (4, 8)))
    (message,) = said(told)
    assert "which has no effect so far" in message
    assert "forward, test_inactive.py:" in message
    assert "allow_rnn = True" in message


def test_a_recurrent_net_is_planned_where_dynamo_may_trace_it() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.manual_seed(0)
        model, words = Recurrent(), torch.randint(WORDS, (64, 6))

        def peak(call: Any) -> int:
            step(model, call, (words,))
            return measured(model, call, (words,))

        plain = peak(torch.compile(model, backend="aot_eager"))
        expected = [p.grad for p in model.parameters()]
        torch._dynamo.reset()
        budget = plain * 7 // 10
        assert peak(compiled(model, memory_budget=budget)) <= budget
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_a_break_in_a_loop_is_named(told: pytest.LogCaptureFixture) -> None:
    """Where no optimizer steps, when reports are asked for."""
    model = BreakInLoop()
    compiled(model)(torch.randn(4, 16)).backward()
    assert said(told) == []
    fxremat.reports()
    (message,) = said(told)
    assert "graph_break()" in message
    (one,) = frames_given_up()
    assert one.where.startswith("forward, test_inactive.py:")
    assert "graph_break()" in one.reason


def test_what_dynamo_gives_up_beside_a_planned_graph_is_named(
    told: pytest.LogCaptureFixture,
) -> None:
    first, second = Block(16), BreakInLoop()
    model = nn.ModuleList([first, second])
    one, two = compiled(first), compiled(second)
    train(model, lambda x: two(one(x)), torch.randn(4, 16))
    (message,) = said(told)
    assert "outside of it" in message


def test_a_module_that_dynamo_never_sees_is_named(told: pytest.LogCaptureFixture) -> None:
    """As `torch.utils.checkpoint` calls what was compiled in place as it is, before torch 2.14."""
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    block.compile(backend="fxremat", options=OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        train(block, lambda x: block(x).sum(), torch.randn(4, 16))
    (message,) = said(told)
    assert "no training graph was seen" in message


@pytest.mark.parametrize("budget", [64 * MIB, None])
def test_nothing_is_said_of_what_is_planned_or_has_no_budget(
    told: pytest.LogCaptureFixture, budget: int | None
) -> None:
    one_block = Net(lambda net, x: net.block(x).square().mean(), block=Block(16))
    model: nn.Module = one_block if budget is not None else BreakInLoop()
    train(model, compiled(model, memory_budget=budget), torch.randn(4, 16))
    fxremat.reports()
    assert said(told) == []


AT_EXIT = """
import torch
block = torch.nn.Sequential(torch.nn.Linear(16, 16))
block.compile(backend="fxremat", options={"memory_budget": "1GiB"})
with torch.compiler.set_stance("force_eager"):
    block(torch.randn(4, 16)).sum().backward()
"""


def test_it_is_told_when_the_process_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert "no training graph was seen" in ended.stderr
    assert ended.returncode == 0


def test_a_compiled_optimizer_step_is_as_without_it(told: pytest.LogCaptureFixture) -> None:
    """What looks after each step is in no graph, and breaks none."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    counted = CompileCounter()
    step: Any = torch.compile(optimizer.step, backend=counted)
    for _ in range(2):
        step()
    assert counted.frame_count == 1
    assert said(told) == []


def test_whether_a_budget_was_asked_for_is_looked_up_once(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look takes a while, and an optimizer steps often."""
    looked: list[object] = []

    def look(backend: object) -> list[Any]:
        looked.append(backend)
        return []

    monkeypatch.setattr(inactive, "options_given_to", look)
    model = BreakInLoop()
    train(model, torch.compile(model, backend="eager"), torch.randn(4, 16), steps=5)
    assert len(looked) == 1
    assert said(told) == []


def checkpointed(net: Any, x: Tensor) -> Any:
    """As models of Hugging Face and of diffusers, whose checkpointing is an attribute."""
    if net.gradient_checkpointing:
        return checkpoint(net.block, x, use_reentrant=False).square().mean()
    return net.block(x).square().mean()


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_of_the_model_itself_is_named(
    on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(checkpointed, block=Block(16), gradient_checkpointing=on)
    train(model, compiled(model), torch.randn(4, 16))
    assert ("gradient checkpointing is on: 1 regions" in caplog.text) is on
