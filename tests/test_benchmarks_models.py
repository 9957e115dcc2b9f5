"""The benchmark models: one graph each, gradients everywhere, the checkpointed twin agrees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.models import MODELS, build, find_config, uses_random_ops, with_checkpoint
from benchmarks.nets.layers import Network

NAMES = sorted(set(MODELS) - {"gpt16", "gpt6", "gpt48", "gpt50k", "llama32"})
LARGE = ("resnet50", "vgg16")


@dataclass(frozen=True)
class Step:
    """What a training step of a model gives."""

    loss: Tensor
    gradients: list[Tensor | None]


def step(model: nn.Module, arguments: tuple[Tensor, ...]) -> Step:
    """One step; random numbers are the same in each."""
    torch.manual_seed(1)
    loss = model(*arguments)
    loss.backward()
    return Step(loss.detach(), [parameter.grad for parameter in model.parameters()])


def few(name: str) -> tuple[Network, tuple[Tensor, ...]]:
    """A model, and of its batch as much as a test needs of the large ones."""
    model, arguments = build(name)
    return model, tuple(x[:1] for x in arguments) if name in LARGE else arguments


def shallow(name: str) -> tuple[Network, tuple[Tensor, ...]]:
    """A model with two layers at most, where further ones are the same again, and its batch."""
    config = find_config(name)
    layers = config.arguments.get("layers")
    fewer = {} if layers is None else {"layers": min(layers, 2)}
    model = config.network(**{**config.arguments, **fewer}).train()
    return model, model.sample(config.batch, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_dynamo_captures_one_graph(name: str) -> None:
    """Captured with its checkpoints, and not run: what a step computes is tested elsewhere."""
    graphs = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor]]:
        graphs.append(gm)
        return lambda *_: (torch.zeros(()),)

    torch._dynamo.reset()
    model, arguments = shallow(name)
    torch.compile(with_checkpoint(model), backend=keep, fullgraph=True)(*arguments)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_the_gradient_that_it_has_with_checkpoints(name: str) -> None:
    model, arguments = few(name)
    plain = step(model, arguments)
    assert plain.loss.shape == ()
    assert all(gradient is not None and gradient.isfinite().all() for gradient in plain.gradients)
    model.zero_grad(set_to_none=True)
    found = step(with_checkpoint(model), arguments)
    torch.testing.assert_close(found.gradients, plain.gradients)


def test_only_models_with_dropout_draw_random_numbers() -> None:
    assert [name for name in NAMES if uses_random_ops(build(name)[0])] == [
        "bert",
        "bert6",
        "dropout",
    ]
