"""What autograd says of the backward that is running."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxremat.compat.backward import (
    leaves_of_one_edge,
    leaves_of_one_node,
    leaves_of_this_node,
    no_other_backward,
    running_backward,
    saved_before,
    watch_backwards,
)


class Product(torch.autograd.Function):
    """Notes what is known of the backward while it runs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        known.append((leaves_of_one_node(), leaves_of_this_node()))
        watched.append(leaves_of_one_edge())
        with no_other_backward() as alone:
            assert alone or not watched[-1]
        assert running_backward() is not None
        return gradient, gradient


known: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []


watched: list[list[torch.Tensor]] = []


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Product.apply(a, b)  # type: ignore[no-untyped-call]
    return found


def test_leaves_of_the_backward_that_is_running() -> None:
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    several = torch.accelerator.is_available()
    with torch.autograd.set_multithreading_enabled(False) if several else nullcontext():
        torch.autograd.backward(product(a, b))
        assert known.pop() == ([a, b], [a, b])
        torch.autograd.backward(product(a, b), inputs=[b])
        assert known.pop() == ([a, b], [b])
        torch.autograd.grad(product(a, b), [a, b])
        assert known.pop()[1] == []
        torch.autograd.backward([b.exp(), product(a, b)])  # the one made last runs first
        assert known.pop() == ([a], [a, b])
        for loss in (product(a, b).exp(), product(a, b) + a, b + product(a, b)):
            loss.backward()  # type: ignore[no-untyped-call]
            assert known.pop()[0] == []
    assert running_backward() is None
    assert leaves_of_one_node() == leaves_of_this_node() == []


@pytest.mark.filterwarnings("ignore:Using backward")
def test_leaves_of_the_backwards_that_are_watched() -> None:
    """Where a backward begins is known; so are its leaves, wherever the node is that asks."""
    autograd: Any = torch.autograd
    before = autograd._engine_run_backward
    autograd._engine_run_backward = inspect.unwrap(before)
    watch_backwards()
    installed = autograd._engine_run_backward
    watch_backwards()
    assert autograd._engine_run_backward is installed
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    try:
        for loss, expected in (
            (product(a, b), [a, b]),
            (product(a, b).exp(), [a, b]),
            (product(a, b) + a, [b]),
            (product(a, b) * product(a, torch.ones(())), [b]),
        ):
            torch.autograd.backward(loss)
            assert list(map(id, watched.pop())) == list(map(id, expected))
            watched.clear()
        torch.autograd.backward([product(a, b), b.exp()])
        assert list(map(id, watched.pop())) == [id(a)]
        torch.autograd.backward([product(a, b), a])
        torch.autograd.grad(product(a, b), [a, b])
        torch.autograd.backward(product(a, b), create_graph=True)
        assert watched == [[], [], []]
        autograd._engine_run_backward = inspect.unwrap(before)
        torch.autograd.backward(product(a, b))
        assert watched.pop() == []
        with no_other_backward() as alone:
            assert not alone
    finally:
        watched.clear()
        autograd._engine_run_backward = before


def test_what_eager_nodes_have_saved() -> None:
    """Not what hooks have made of a tensor, and nothing after a backward."""
    x, again = torch.ones(3, requires_grad=True), [0]

    def counted(y: torch.Tensor) -> torch.Tensor:
        again[0] += 1
        return y.sin().cos()

    first = x.exp()
    y = checkpoint(counted, torch.cat([first, first]), use_reentrant=False)
    z = torch.stack([y, y])[torch.tensor([0])]
    saved = {each.data_ptr() for each in saved_before([z, None, 3, x.detach()])}
    assert first.data_ptr() in saved
    assert again == [1]
    assert x.data_ptr() not in saved
    assert any(each.dtype == torch.int64 for each in saved_before([z]))
    torch.autograd.backward(z.sum())
    assert saved_before([z]) == []
    assert saved_before([x]) == []
