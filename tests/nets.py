"""Small models, each with one feature that a joint graph can have, and inputs for them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.graphs import Capture, Net, batch, capture, linear, mlp

ADDMMS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


@torch.library.custom_op("fxremat_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    """Three times ``x``, opaque to the compiler."""
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


triple.register_autograd(lambda _, grad: triple(grad))


def save_addmms(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matmuls must be saved, everything else must be recomputed."""
    return CheckpointPolicy.MUST_SAVE if op in ADDMMS else CheckpointPolicy.MUST_RECOMPUTE


def save_nothing(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything must be recomputed."""
    return CheckpointPolicy.MUST_RECOMPUTE


def save_everything(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything must be saved."""
    return CheckpointPolicy.MUST_SAVE


def checkpointed(middle: nn.Module, policy: Any = None) -> Net:
    """A linear layer, ``middle`` under torch.utils.checkpoint, the linear layer again."""
    extra: dict[str, Any] = {}
    if policy is not None:
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def run(net: Any, x: torch.Tensor) -> Any:
        return net.linear(checkpoint(net.middle, net.linear(x), use_reentrant=False, **extra))

    return Net(run, linear=linear(), middle=middle)


def attention(dropout: float, net: Any, x: torch.Tensor) -> torch.Tensor:
    """Causal self-attention with two heads."""
    q, k, v = net.qkv(x).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return net.out(y.transpose(1, 2).reshape(2, 4, 16))  # type: ignore[no-any-return]


def attend(dropout: float) -> Net:
    torch.manual_seed(1)
    return Net(partial(attention, dropout), qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))


def overwrite_buffer(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The backward needs the sine of what the buffer held before the step."""
    y = x * torch.sin(net.buffer.clone() + 1)
    net.buffer.mul_(2.0).add_(1)
    return y.cos()


def overwrite_what_backward_reads(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The backward needs what the buffer held before the step, as it was."""
    y: torch.Tensor = net.linear(x) * net.buffer.clone()
    net.buffer.add_(1)
    return y.cos()


def tied(net: Any, index: torch.Tensor) -> torch.Tensor:
    """An embedding whose weight is the output layer's, and a loss."""
    hidden = torch.tanh(net.norm(net.embedding(index)))
    logits = F.linear(hidden, net.embedding.weight)
    loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), index.flatten())
    return loss


def frozen() -> nn.Module:
    net = mlp(8, 3, nn.Tanh)
    net[0].requires_grad_(False)
    net[2].weight.requires_grad_(False)
    return net


def pieces(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Views that come as tuples."""
    first, second, _ = net.linear(x).split(3, 1)
    third = net.linear(x).chunk(2, 0)[1].unbind(0)[0][:3]
    return first.sin() + second.cos() * third.exp()  # type: ignore[no-any-return]


def several_results(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls with more than one result, some of them unused."""
    y = net.linear(x)
    top = y.topk(3, 1)[0].sin() * y.sort(1)[0][:, :3].cos()
    return torch.var_mean(y, 1)[0].exp().sum() + top + net.norm(y)[:, :3]  # type: ignore[no-any-return]


def with_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.mlp(x)  # type: ignore[no-any-return]


def integers_and_masks(net: Any, x: torch.Tensor, i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b, net.linear(x).exp()[i], net.linear(x).sin()) * (i > 1)[:, None]


def odd_results(net: Any, x: torch.Tensor) -> Any:
    """Results that are no tensors, an unused value, an input, and views."""
    y = net.linear(x).sin().cos()
    x.exp()
    return y, None, 3, x, {"rows": x.view(8, 4), "turned": y.t(), "part": y[1:]}


def all_random(net: Any, x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x) * torch.bernoulli(torch.full_like(x, 0.5)) * torch.randn(4, 8)
    return torch.sin(net.linear(x) + torch.cos(noise)).cos()


def count(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Picks rows: how many there are is known only at run time."""
    return net.linear(x)[x[:, 0] > 0].sin()  # type: ignore[no-any-return]


def overwrite_input(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = net.linear(x) * y.sin()
    y.add_(1)
    return result  # type: ignore[no-any-return]


def _all() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Fresh models by their names, each with its inputs."""
    x, wants = batch(4, 8), batch(4, 8).requires_grad_()
    torch.manual_seed(3)
    drop = nn.Sequential(linear(), nn.Dropout(), nn.GELU(), linear())
    deep = nn.Sequential(mlp(), nn.LayerNorm(8), nn.Dropout(), linear())
    norm = nn.Sequential(linear(), nn.BatchNorm1d(8), nn.ReLU(), linear(), nn.BatchNorm1d(8))
    conv = nn.Conv2d(3, 4, 3)
    image = batch(2, 3, 8, 8)
    index = torch.arange(12).view(3, 4) % 16
    return {
        "mlp": (mlp(8, 3), (x,)),
        "dropout": (drop, (x,)),
        "random": (Net(all_random, linear=linear()), (x,)),
        "batch norm": (norm, (x,)),
        "buffer": (Net(overwrite_buffer, buffer=batch(4, 8)), (wants,)),
        "old buffer": (
            Net(overwrite_what_backward_reads, linear=linear(), buffer=batch(8)), (x,)
        ),
        "input overwritten": (Net(overwrite_input, linear=linear()), (x, batch(4, 8))),
        "tied": (
            Net(tied, embedding=nn.Embedding(16, 8), norm=nn.LayerNorm(8)), (index,)
        ),
        "input gradient": (mlp(), (wants,)),
        "odd results": (Net(odd_results, linear=linear()), (x,)),
        "odd results, input gradient": (Net(odd_results, linear=linear()), (wants,)),
        "frozen": (frozen(), (x,)),
        "pieces": (Net(pieces, linear=linear()), (x,)),
        "several results": (
            Net(several_results, linear=linear(), norm=nn.LayerNorm(8)), (x,)
        ),
        "max pool": (nn.Sequential(conv, nn.MaxPool2d(2, return_indices=True)), (image,)),
        "autocast": (Net(with_autocast, mlp=mlp()), (x,)),
        "integers": (
            Net(integers_and_masks, linear=linear()), (x, torch.tensor([3, 1, 0, 2]), x > 0)
        ),
        "checkpoint": (checkpointed(mlp()), (x,)),
        "checkpoint dropout": (checkpointed(drop), (x,)),
        "save addmms": (checkpointed(mlp(), save_addmms), (x,)),
        "save nothing": (checkpointed(deep, save_nothing), (x,)),
        "save everything": (checkpointed(mlp(), save_everything), (x,)),
        "custom op": (Net(lambda n, x: triple(n.linear(x).sin()).cos(), linear=linear()), (x,)),
        "attention": (attend(0.0), (batch(2, 4, 16),)),
        "attention dropout": (attend(0.5), (batch(2, 4, 16),)),
        "gru": (Net(lambda n, x: n.cell(x).sin(), cell=nn.GRUCell(8, 8)), (x,)),
        "count": (Net(count, linear=linear()), (x,)),
    }  # fmt: skip


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A fresh model of this name with its inputs."""
    model, inputs = _all()[name]
    return model, tuple(i.detach().clone().requires_grad_(i.requires_grad) for i in inputs)


NAMES = tuple(_all())
REFERENCE = {"gru": "aot_eager"}  # eager torch has a fused cell that rounds differently


@cache
def traced(name: str, fused: bool = False) -> Capture:
    """The model traced once for all tests, nothing run again; not to be changed."""
    model, inputs = make(name)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return capture(model, inputs, fused=fused)
