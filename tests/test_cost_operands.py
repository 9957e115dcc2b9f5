"""What convolutions are given when they run: images with the channels last, where Inductor does."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.cost.call_times import operands
from fxremat.cost.workspaces import Workspaces

ATEN = torch.ops.aten
HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def both(image: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    made = ATEN.convolution.default(image, weight, None, *HOW)
    found = ATEN.convolution_backward.default(
        gradient, image, weight, None, *HOW, [True, True, False]
    )
    total: torch.Tensor = made.sum() + found[0].sum() + found[1].sum()
    return total


@pytest.fixture
def graph() -> fx.Graph:
    """A convolution of 16 images of 8 channels, and its gradients."""
    given = torch.randn(16, 8, 12, 10), torch.randn(24, 8, 3, 3), torch.randn(16, 24, 12, 10)
    return make_fx(both, tracing_mode="fake")(*given).graph


def call_of(graph: fx.Graph, target: object) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.target is target)
    return found


def channels_last(args: object) -> list[bool]:
    assert isinstance(args, tuple)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    return [one.is_contiguous(memory_format=torch.channels_last) for one in tensors]


def test_images_of_convolutions_have_their_channels_last(graph: fx.Graph) -> None:
    """Both operands of a convolution; of its gradients all but the weight."""
    forward = operands(call_of(graph, ATEN.convolution.default), images_last=True)
    backward = operands(call_of(graph, ATEN.convolution_backward.default), images_last=True)
    assert channels_last(forward[0]) == [True, True]
    assert channels_last(backward[0]) == [True, True, False]
    assert (
        backward[0][2:]
        == operands(call_of(graph, ATEN.convolution_backward.default), images_last=False)[0][2:]
    )
    assert [one.shape for one in forward[0][:2]] == [(16, 8, 12, 10), (24, 8, 3, 3)]


def test_other_operands_are_as_in_the_graph(graph: fx.Graph) -> None:
    convolution = call_of(graph, ATEN.convolution.default)
    assert channels_last(operands(convolution, images_last=False)[0]) == [False, False]
    summed = call_of(graph, ATEN.sum.default)
    assert channels_last(operands(summed, images_last=True)[0]) == [False]


def test_scratch_memory_is_that_of_the_layout(graph: fx.Graph) -> None:
    """It is what the same call takes of real tensors that lie so."""
    node = call_of(graph, ATEN.convolution_backward.default)
    last = Workspaces(torch.device("cpu"), images_last=True).of_node(node)
    gradient, image = (
        torch.randn(shape).to(memory_format=torch.channels_last)
        for shape in ((16, 24, 12, 10), (16, 8, 12, 10))
    )
    args = (gradient, image, torch.randn(24, 8, 3, 3), None, *HOW, [True, True, False])
    assert last == Workspaces(torch.device("cpu")).of_call(node.target, args, {})
    assert last != Workspaces(torch.device("cpu")).of_node(node)
