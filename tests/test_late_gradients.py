"""Gradients are plain compile's where none is sent for a result at first, and one comes late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxremat.sizes import MIB
from tests.end_to_end import QUICK
from tests.test_step_planned import PLAIN, HeadApart, WithFeatures

pytestmark = pytest.mark.usefixtures("fresh")


class Parts(nn.Module):
    """What the cases below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.weight, self.norm = nn.Parameter(torch.randn(64)), nn.BatchNorm1d(64)
        self.table = nn.Embedding(256, 64, max_norm=1.0)

    def break_between(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        hidden = change(hidden)
        return self.head(hidden), hidden.repeat(1, 8)


def in_region(parts: Parts, x: Tensor) -> Any:
    norm = partial(checkpoint, lambda q: parts.norm(q).tanh(), use_reentrant=False)
    return parts.head(hidden := norm(parts.first(x))), hidden.repeat(1, 8)


def written_between(parts: Parts, x: Tensor) -> Any:
    wide = (hidden := parts.first(x).tanh()).repeat(1, 8)
    wide[:, :64].mul_(parts.weight)
    return parts.head(hidden), wide


def in_low_precision(parts: Parts, x: Tensor) -> Any:
    """Run again without autocast, it would multiply two types."""
    wide = F.linear(hidden := parts.first(x), parts.second.weight.to(hidden.dtype)).repeat(1, 8)
    return parts.head(hidden) + wide[:, :16], wide


LATE: dict[str, Callable[[Parts, Tensor], Any]] = {
    "features": lambda p, x: (p.head(y := p.first(x).tanh()), y.repeat(1, 8)),
    "autocast": in_low_precision,
    "a weight of its own": lambda p, x: (
        p.head(y := p.first(x).tanh()), (y * p.weight).repeat(1, 8)
    ),
    "a weight through parts": lambda p, x: (
        p.head(y := p.first(x).tanh()), (y * p.weight).chunk(2, 1)[0].repeat(1, 16)
    ),
    "a weight written in": written_between,
    "a norm in a region": in_region,
    "a table of small norms": lambda p, x: (
        p.head(y := p.table(x.argmax(1)).tanh()), y.repeat(1, 8)
    ),
    "written after a break": lambda p, x: p.break_between(x, torch.relu_),
    "tied over a break": lambda p, x: p.break_between(x, lambda y: p.first(y).tanh()),
}  # fmt: skip


@pytest.mark.parametrize("case", LATE)
@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_gradients_are_those_of_plain_compile_late_or_not(case: str) -> None:
    """Each of them is one of zeros, or none, where plain compile's is."""

    def gradients(**how: Any) -> list[Any]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, found = Parts(), list[Any]()
        call = torch.compile(LATE[case], **how)
        for late in (False, False, True, False):
            model.zero_grad()
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                narrow, wide = call(model, torch.randn(256, 64) + model.first.bias)
            loss = narrow.float().square().mean()
            (loss + wide.float().square().mean() if late else loss).backward()
            found.append([one.grad for one in model.parameters()])
        return found

    expected = gradients(backend="aot_eager")
    ours = gradients(backend="fxremat", options={**QUICK, "memory_budget": 4 * MIB})
    rtol, atol = (2e-2, 1e-3) if case == "autocast" else (1e-5, 1e-6)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_views_of_what_a_graph_saves_may_be_written() -> None:
    """They are not left out: detached, they would be what it has saved."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(64, 256), "head": nn.Linear(256, 16)})

    def run(x: Tensor) -> Any:
        hidden = model["first"](x).tanh()
        return model["head"](hidden), *hidden.chunk(4, 1)

    call = torch.compile(run, backend="fxremat", options={**QUICK, "memory_budget": 4 * MIB})
    for step in range(3):
        found, part, *_ = call(torch.randn(256, 64))
        if step:
            part.mul_(2.0)
        found.square().mean().backward()


@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_a_step_goes_on_where_it_does_not_fit_with_a_gradient_that_came_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = WithFeatures(), torch.randn(1024, 32)
    options = {**QUICK, "memory_budget": 6 * MIB}
    call = torch.compile(model, backend="fxremat", options=options)
    for late in (False, False, True, False, False):
        model.zero_grad()
        loss, features = call(x)
        (loss + features.square().mean() if late else loss).backward()
    assert "the plan stays as it is" in caplog.text


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.usefixtures("fresh_budgets")
def test_logits_beside_the_loss_of_the_last_graph_get_no_gradient_unless_one_comes(
    sent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = HeadApart(2, head_and_loss=True), torch.randn(512, 32)

    def gradients(call: Any) -> list[Tensor | None]:
        model.zero_grad()
        loss, logits = call(x)
        (loss + sent * logits.square().mean() if sent else loss).backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(torch.compile(model, **PLAIN))
    torch._dynamo.reset()
    options = {**QUICK, "memory_budget": 64 * MIB}
    ours = torch.compile(model, backend="fxremat", options=options)
    for _ in range(3):
        torch.testing.assert_close(gradients(ours), expected)
    assert ("a gradient came" in caplog.text) == sent
