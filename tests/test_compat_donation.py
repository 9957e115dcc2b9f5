"""Saved tensors that the backward may write over, where they are marked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from fxremat.compat.compilers import compile_with_aot_eager
from fxremat.compat.configuration import functorch_config
from fxremat.compat.inductor.generated_code import code_key, generate
from fxremat.compat.joint_graph import (
    donatable,
    donate,
    donated_inputs,
    saved_names,
    torch_partition,
)
from fxremat.passes.halves import DonateSaved
from tests.compat_graphs import half
from tests.graphs import batch


class Classifier(nn.Module):
    """The cross-entropy of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.int64))


LOGITS = "empty_strided_cpu((32, 500)"


def code_of(backward: fx.GraphModule) -> str:
    return generate(backward, is_backward=True).source


def test_the_gradient_of_logits_is_written_over_them() -> None:
    """The same backward allocates a gradient of its own before, and none after it is marked."""
    codes: list[str] = []
    keys: list[str | None] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        names = donatable(forward, backward, 1)
        assert "addmm" in names
        assert not any(name.startswith("primals") for name in names)
        saved = saved_names(backward)
        for marked in ((), ("addmm",)):
            donate(backward, marked)
            keys.append(code_key(backward, is_backward=True))
            codes.append(code_of(backward))
        assert saved_names(backward) == saved
        assert donated_inputs(backward) == [saved.index("addmm")]
        backward.graph.lint()

    half(Classifier(), step)
    assert [LOGITS in code for code in codes] == [True, False]
    assert None not in keys
    assert keys[0] != keys[1]  # else Inductor's cache would give the one for the other


def test_both_halves_are_marked_where_buffers_are_donated() -> None:
    """The backward writes over the logits, and the forward may lay out its results as it likes."""
    keys: list[str | None] = []
    donated: list[list[str]] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        keys.append(code_key(forward, is_backward=False))
        assert DonateSaved(backward, 1).call(forward).modified
        keys.append(code_key(forward, is_backward=False))
        saved = saved_names(backward)
        donated.append([saved[index] for index in donated_inputs(backward)])

    half(Classifier(), step)
    assert None not in keys
    assert keys[0] != keys[1]
    assert ["addmm" in names for names in donated] == [True]


def views(x: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Halves whose forward saves an exponential, a view of it, a view of its input and a sine."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(x: torch.Tensor) -> Any:
        exponential = x.exp()
        return x.cos(), exponential, exponential.view(-1), x.view(-1), x.sin()

    def backward(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a * d + (b * c).view(a.shape),)

    made = make_fx(forward, tracing_mode="fake")(x)
    results: Any = made.graph.output_node().args[0]
    mode = results[0].meta["val"].fake_mode
    with mode:
        second = make_fx(backward)(*(node.meta["val"] for node in results[1:]))
    return made, second


def test_what_shares_its_memory_is_not_donated() -> None:
    """Neither what is a view of an input, nor two saved tensors of one storage."""
    forward, backward = views(torch.randn(4, 4))
    assert donatable(forward, backward, 1) == ("sin",)
    assert donatable(forward, backward, 5) == ()


def test_nothing_is_donated_where_the_user_forbids_it() -> None:
    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        with functorch_config.patch(donated_buffer=False):
            assert donatable(forward, backward, 1) == ()

    half(Classifier(), step)


@pytest.mark.parametrize("donates", [False, True])
def test_a_backward_that_donates_runs_once(donates: bool) -> None:
    """torch itself refuses to keep its graph; without marks it may be kept, as torch would not."""

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        forward, backward = torch_partition(module, inputs, **kwargs)
        if donates:
            donate(backward, donatable(forward, backward, kwargs["num_fwd_outputs"]))
        return forward, backward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_with_aot_eager(gm, inputs, partition)

    model = Classifier()
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend)
    call(batch(32, 64)).backward()
    loss = call(batch(32, 64))
    if donates:
        with pytest.raises(RuntimeError, match="retain_graph=False"):
            loss.backward(retain_graph=True)
    else:
        loss.backward(retain_graph=True)
        loss.backward()
