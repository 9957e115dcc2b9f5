"""The whole way: the least budget of a model, and what a compiled step of it does and takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.backend import fxremat as backend
from fxremat.memory.measured_peak import measure_peak

QUICK: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "variants": "none"}
"""Options with which ops run as they are, and again, and nothing else."""


def compiled_by_fxremat(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options=options)


def least(model: nn.Module, inputs: tuple[Tensor, ...], budget: Any = "1B", **options: Any) -> int:
    """What the error names."""
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.explain(model, *inputs, memory_budget=budget, options=options)
    assert caught.value.minimum_bytes is not None
    return caught.value.minimum_bytes


def step(model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss: Tensor = call(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def observed(
    model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> list[Tensor]:
    """Everything that the user can see of a step: loss, gradients, buffers, random state."""
    torch.manual_seed(7)
    loss = step(model, call, inputs)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss, *gradients, *model.buffers(), torch.rand(1)]


def measured(model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> int:
    step(model, call, inputs)
    model.zero_grad(set_to_none=True)
    return measure_peak(lambda: step(model, call, inputs), held=(model, inputs)).peak_bytes


class Steps:
    """Steps of ``models`` with what they are ``given``; `run` is a forward and a backward."""

    models: Sequence[nn.Module]
    given: Sequence[Any]

    def run(self) -> Any:
        """Adds to the gradients that are there."""
        raise NotImplementedError

    def forget_gradients(self) -> None:
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.forget_gradients()
        self.run()

    def gradients(self) -> list[Tensor | None]:
        """Of a step."""
        self.step()
        return [p.grad for model in self.models for p in model.parameters()]

    def peak_bytes(self, run: Callable[[], Any] | None = None) -> int:
        """Of a step, or of what else begins without gradients."""
        self.forget_gradients()
        return measure_peak(run or self.step, held=(*self.models, *self.given)).peak_bytes


Kind = TypeVar("Kind", bound=Warning)


@contextmanager
def warned(kind: type[Kind]) -> Iterator[list[Kind]]:
    """The warnings of a kind that come inside, newest last; they are there at the end."""
    found: list[Kind] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [each.message for each in caught if isinstance(each.message, kind)]
