"""The benchmark models: one graph each, gradients everywhere, the checkpointed twin agrees."""

import pytest
import torch
from torch import Tensor

from benchmarks.models import MODELS, build, find_config, uses_random_ops, with_checkpoint

NAMES = sorted(set(MODELS) - {"gpt16", "gpt6", "gpt50k"})


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, arguments = build(name)
    loss = model(*arguments)
    loss.backward()
    assert loss.shape == ()
    assert all(gradient.isfinite().all() for gradient in _gradients(model))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_builds_the_same_model(name: str) -> None:
    (first, batch), (second, same_batch) = build(name, seed=3), build(name, seed=3)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    assert all(map(torch.equal, batch, same_batch))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", NAMES)
def test_dynamo_captures_one_graph(name: str, checkpointed: bool) -> None:
    torch._dynamo.reset()
    model, arguments = build(name)
    if checkpointed:
        model = with_checkpoint(model)
    loss = torch.compile(model, backend="eager", fullgraph=True)(*arguments)
    assert loss.isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_keeps_the_gradients(name: str) -> None:
    model, arguments = build(name)
    torch.manual_seed(1)
    model(*arguments).backward()
    expected = _gradients(model)
    twin, arguments = build(name)
    torch.manual_seed(1)
    with_checkpoint(twin)(*arguments).backward()
    for left, right in zip(expected, _gradients(twin), strict=True):
        torch.testing.assert_close(left, right)


def test_only_the_dropout_model_draws_random_numbers() -> None:
    assert [name for name in NAMES if uses_random_ops(build(name)[0])] == ["dropout"]


@pytest.mark.parametrize(
    ("name", "layers", "width"), [("gpt16", 16, 128), ("gpt6", 6, 256), ("gpt50k", 4, 256)]
)
def test_the_models_of_the_criteria_have_one_size(name: str, layers: int, width: int) -> None:
    config = find_config(name, "deep")
    assert config == find_config(name, "small")
    assert (config.arguments["layers"], config.arguments["width"]) == (layers, width)
