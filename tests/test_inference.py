"""Graphs that take no gradients keep the budget where that is asked for."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.errors import InfeasibleBudget


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.LayerNorm(64))
    return layers, torch.randn(512, 64)


def _compiled(net: nn.Module, budget: int, **options: Any) -> Callable[..., Any]:
    return torch.compile(net, backend="fxremat", options={"memory_budget": budget, **options})


def _refused(call: Callable[[], object]) -> InfeasibleBudget:
    with pytest.raises(BackendCompilerFailed, match="takes no gradients") as raised:
        call()
    found = raised.value.inner_exception
    assert isinstance(found, InfeasibleBudget)
    return found


def test_an_evaluation_over_the_budget_is_refused_and_the_named_number_is_what_it_takes() -> None:
    net, x = _net()
    with torch.no_grad():
        refused = _refused(lambda: _compiled(net, 1 << 20, inference=True)(x))
        torch._dynamo.reset()
        least = refused.minimum_bytes
        assert least is not None
        evaluate = _compiled(net, least, inference=True)
        assert torch.allclose(evaluate(x), net(x), atol=1e-5)
        assert fxremat.measure_peak(lambda: evaluate(x), held=(net, x)).peak_bytes == least
    assert refused.contributors[0][1] == 512 * 512 * 4


def test_without_the_option_an_evaluation_runs_in_what_it_takes() -> None:
    net, x = _net()
    with torch.no_grad():
        assert torch.allclose(_compiled(net, 1 << 20)(x), net(x), atol=1e-5)


def test_a_longer_batch_is_refused_when_it_comes() -> None:
    net, x = _net()
    evaluate = _compiled(net, 3 << 20, inference=True)
    with torch.no_grad():
        evaluate(x)
        refused = _refused(lambda: evaluate(x.repeat(8, 1)))
    assert refused.minimum_bytes is not None
    assert refused.minimum_bytes > 8 * 512 * 512 * 4


def test_training_is_planned_as_without_the_option() -> None:
    net, x = _net()
    train = _compiled(net, 8 << 20, inference=True)
    train(x).sum().backward()
    assert [report.memory.budget_bytes for report in fxremat.reports()] == [8 << 20]


def test_code_that_needs_data_is_not_counted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("needs data")

    monkeypatch.setattr("fxremat.compile.dry_run.inference.inference_peak", fails)
    net, x = _net()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        _compiled(net, 1 << 20, inference=True)(x)
    assert "needs data" in caplog.text


class Distilled(nn.Module):
    """A student that learns from what a teacher gave."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.student(x) - target).square().mean()
        return loss


def test_weights_of_a_teacher_count_where_its_student_is_planned() -> None:
    """Both are compiled for the budget; the teacher takes no gradients."""
    torch._dynamo.reset()
    (teacher, x), (first, _), (second, _) = _net(), _net(), _net()
    teacher.eval().requires_grad_(False)
    student, budget = nn.Sequential(first, second), 4 << 20
    calls = [_compiled(net, budget) for net in (teacher, Distilled(student))]

    def step() -> None:
        with torch.no_grad():
            target = calls[0](x)
        calls[1](x, target).backward()

    for _ in range(2):
        student.zero_grad()
        step()
    student.zero_grad()
    peak = fxremat.measure_peak(step, held=(teacher, student, x)).peak_bytes
    assert peak == fxremat.reports()[-1].step_peak_bytes
    assert peak <= budget
