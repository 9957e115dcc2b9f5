"""Small kernels compiled apart from the graph around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import POST_GRAD_PASS, inductor_config
from fxremat.compat.inductor.kernels import (
    apart,
    compile_kernel,
    decomposed,
    for_a_kernel,
    unbuilt_kernel,
)


def kernel_graph() -> fx.GraphModule:
    """Writes gelu(x) - 1 over x, and the row sums of that into y."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
        x.copy_(torch.nn.functional.gelu(x) - 1)
        y.copy_(x.sum(1))
        return ()

    return kernel_of(function, (16, 32), (16,))


def kernel_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    """The graph of a kernel for arguments of these shapes."""
    module = fx.symbolic_trace(function)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    with for_a_kernel():
        for node, shape in zip(placeholders, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
        return decomposed(module)


def test_decomposed() -> None:
    names = {str(n.target) for n in kernel_graph().graph.nodes}
    assert "aten.erf.default" in names
    assert not any("gelu" in name for name in names)


def test_unbuilt_kernel() -> None:
    """A sum of each row has memory of its own before it is written where it belongs."""
    assert unbuilt_kernel(kernel_graph()).allocates == 16 * 4

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
        y.copy_((x @ x).sum(1))
        return ()

    assert unbuilt_kernel(kernel_of(function, (16, 16), (16,))).allocates == 17 * 16 * 4


def test_compile_kernel() -> None:
    kernel = compile_kernel(kernel_graph())
    x, y = torch.randn(16, 32), torch.zeros(16)
    best = torch.nn.functional.gelu(x) - 1
    kernel([x, y])
    torch.testing.assert_close(x, best)
    torch.testing.assert_close(y, best.sum(1))


def test_apart_from_what_is_being_compiled() -> None:
    with inductor_config.patch({POST_GRAD_PASS: print}), torch.device("cpu"):
        with for_a_kernel():
            assert inductor_config.post_grad_custom_post_pass is None
            assert type(torch.empty(1)) is not torch.Tensor
            with apart():
                assert type(torch.empty(1)) is torch.Tensor
        assert inductor_config.post_grad_custom_post_pass is print
