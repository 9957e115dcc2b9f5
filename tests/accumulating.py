"""What the tests of gradients that are added inside of the backward share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.runtime import accumulation
from tests.small import Layers, seeded

OPTIONS: dict[str, Any] = {"solver": "greedy", "variants": "none"}
EAGER: dict[str, Any] = {**OPTIONS, "executor": "aot_eager"}
Make = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
Early = list[Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that was compiled, asked for or told before counts."""
    torch._dynamo.reset()
    accumulation._TOLD.clear()
    yield
    while accumulation._ASKED:  # models that somebody still holds would count in later tests
        accumulation.withdraw(accumulation._ASKED)
    torch._dynamo.reset()


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    """The parameters whose gradients were added early, in that order."""
    found: Early = []
    keep_from = accumulation._keep_from

    def noting(adder: Any) -> None:
        found.append(adder.variable)
        keep_from(adder)

    monkeypatch.setattr(accumulation, "_keep_from", noting)
    return found


def compiled(model: Any, executor: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(
        model, backend="fxremat", options={**OPTIONS, "executor": executor, **options}
    )


def layers(depth: int = 3, width: int = 16) -> tuple[Any, Tensor]:
    return seeded(lambda: Layers(depth, width), 4, width)


def opted_in() -> tuple[Any, Tensor, Any]:
    """Layers whose gradients are added early, an input, and the layers compiled."""
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    return model, x, compiled(model)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in pairs
    )


def total(value: Any) -> Tensor:
    """A loss of all results."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    return torch.stack(
        [(t * torch.arange(1, t.numel() + 1).view_as(t)).mean() for t in wanted]
    ).sum()


def accumulated(
    made: tuple[Any, tuple[Tensor, ...]],
    early: str,
    loss_of: Callable[[Any], Any] = compiled,
    prepare: Callable[[Any], object] = lambda model: None,
    backward: Callable[[Tensor], object] = torch.autograd.backward,
    in_place: bool = True,
) -> list[Tensor | None]:
    """Gradients of three backwards, each of another loss, added up.

    ``early`` says whether graphs are made for it, "planned", and gradients added early, "yes".
    With ``in_place`` each ``grad`` stays the tensor that it was.
    """
    torch._dynamo.reset()
    model, inputs = made
    torch.manual_seed(5)
    handle = fxremat.accumulate_in_backward(model) if early != "no" else None
    prepare(model)
    call = loss_of(model)
    places: dict[int, tuple[Tensor, int]] = {}
    for number in range(3):
        loss = total(call(*inputs)) * (number + 1.1)
        if handle is not None and early == "planned":
            handle.remove()
        backward(loss)
        for index, parameter in enumerate(model.parameters()):
            grad = parameter.grad
            if in_place and grad is not None and not grad.is_sparse:
                found = places.setdefault(index, (grad, grad.data_ptr()))
                assert found[0] is grad
                assert found[1] == grad.data_ptr()
    if handle is not None:
        handle.remove()
    return [*gradients(model), *(i.grad for i in inputs)]


def check_same(
    make: Make, loss_of: Callable[[Any], Any] = compiled, without: str = "no", **rest: Any
) -> None:
    expected = accumulated(make(), without, loss_of, **rest)
    assert same(accumulated(make(), "yes", loss_of, **rest), expected)


def with_input(make: Callable[[], nn.Module], *shape: int) -> Make:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, x = seeded(make, *shape)
        return model, (x,)

    return made


LAYERS = with_input(lambda: Layers(3, 16), 4, 16)


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 1e-2


LOSSES: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "decay added after": lambda model, call, x: call(x) + squares(model),
    "decay added before": lambda model, call, x: squares(model) + call(x),
    "two calls": lambda model, call, x: call(x) + call(2 * x),
}
"""In each of them a parameter has another gradient beside that of one graph."""


class Refused(Exception):
    pass
