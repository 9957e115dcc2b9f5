"""Results written, inputs returned, copies dropped and channels laid out by Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.compat.configuration import POST_GRAD_PASS, inductor_config
from fxremat.compat.inductor import post_grad
from fxremat.compat.inductor.generated_code import generate
from fxremat.compat.inductor.post_grad import (
    copy_images,
    leave_layouts,
    prefers_channels_last,
    return_inputs_as_they_are,
    write_results,
)
from fxremat.compat.tensors import fake_mode_of
from tests.compat_graphs import ATEN, Shared, half
from tests.graphs import batch
from tests.small import forward_code


def test_write_results() -> None:
    """A result that would be computed in each of its readers is written instead."""

    def mark(graph: fx.Graph) -> None:
        write_results(graph, [n for n in graph.nodes if n.target is ATEN.abs.default])

    plain = forward_code(Shared(), batch(32, 64))
    written = forward_code(Shared(), batch(32, 64), **{POST_GRAD_PASS: mark})
    assert written.count("= empty_strided_cpu((32, 64)") == 1 + plain.count(
        "= empty_strided_cpu((32, 64)"
    )


@pytest.mark.parametrize("read_twice", [False, True])
def test_what_a_convolution_reads_as_an_image_is_written_as_one(read_twice: bool) -> None:
    """The mark stands behind the view, if nothing else reads the groups of channels."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        groups = x.sin()
        image = torch.conv2d(groups.view(2, 8, 6, 6), weight)
        return (image, groups.cos()) if read_twice else image

    module = make_fx(step, tracing_mode="fake")(torch.ones(2, 2, 4, 36), torch.ones(4, 8, 3, 3))
    (sin,) = (n for n in module.graph.nodes if n.target is ATEN.sin.default)
    write_results(module.graph, [sin])
    (mark,) = (n for n in module.graph.nodes if n.target is torch.ops.fxremat.written.default)
    assert mark.meta["val"].shape == ((2, 2, 4, 36) if read_twice else (2, 8, 6, 6))
    assert post_grad.unmarked(mark) is sin


class Masked(nn.Module):
    """A mask whose two readers stand on either side of a library call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        first = torch.where(mask, x, -1.0) @ self.w
        return (first @ self.w) + mask


def test_a_written_mask_is_stored_as_bytes_and_read_as_it_was() -> None:
    def mark(graph: fx.Graph) -> None:
        write_results(graph, [n for n in graph.nodes if n.target is ATEN.gt.Scalar])

    x = torch.randn(32, 64)
    code = forward_code(Masked(), x, **{POST_GRAD_PASS: mark})
    assert "(32, 64), (64, 1), torch.uint8)" in code
    torch._dynamo.reset()
    with inductor_config.patch({POST_GRAD_PASS: mark, "force_disable_caches": True}):
        compiled = torch.compile(Masked())(x)
    torch.testing.assert_close(compiled, Masked()(x))


def conv_pair() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


def test_inputs_are_returned_as_they_are() -> None:
    """What a convolution's backward reads of the graph's inputs is no copy with channels last."""
    kept: list[dict[str, bool]] = []

    def strides(marked: bool, forward: fx.GraphModule) -> dict[str, bool]:
        def mark(graph: fx.Graph) -> None:
            if marked:
                return_inputs_as_they_are(graph)

        with torch._inductor.config.patch(post_grad_custom_post_pass=mark):
            code = generate(forward, is_backward=False, seen_outputs=1)
        results: Any = forward.graph.output_node().args[0]
        return {
            node.name: stride == node.meta["val"].stride()
            for node, stride in zip(results, code.strides, strict=True)
            if isinstance(node, fx.Node) and node.meta["val"].dim() == 4
        }

    def step(forward: fx.GraphModule, _: fx.GraphModule) -> None:
        kept.extend(strides(marked, forward) for marked in (False, True))
        text = forward.code
        leave_layouts(forward)
        assert forward.code != text  # Inductor's caches know a graph by its text
        kept.append(strides(True, forward))

    half(conv_pair(), step, torch.randn(2, 4, 16, 16))
    loose, tight, left = kept
    assert left == loose
    inputs = [name for name in loose if name.startswith("primals")]
    assert inputs
    assert not all(loose[name] for name in inputs)
    assert all(tight[name] for name in inputs)
    seen = next(name for name in loose if not name.startswith("primals"))
    assert loose[seen]  # the user's result keeps its strides either way
    assert tight[seen]


def test_the_order_of_channels_that_inductor_prefers() -> None:
    """On CPUs with mkldnn channels go last wherever there is a convolution."""
    image, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    convolution = make_fx(torch.conv2d, tracing_mode="fake")(image, weight)
    assert prefers_channels_last(convolution)
    with torch._inductor.config.patch(layout_optimization=False):
        assert not prefers_channels_last(convolution)
    assert not prefers_channels_last(make_fx(torch.sin, tracing_mode="fake")(image))


@pytest.mark.parametrize(("channels", "copied"), [(3, True), (32, False)])
def test_images_are_copied_where_gradients_would_be(channels: int, copied: bool) -> None:
    """The smaller of the two; values stay."""
    image, gradient = torch.randn(2, channels, 8, 8), torch.randn(2, 16, 8, 8)
    gradient = gradient.to(memory_format=torch.channels_last)
    weight, how = torch.randn(16, channels, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def of_weight(gradient: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        mask = [False, True, False]
        backward: Any = ATEN.convolution_backward.default
        found: torch.Tensor = backward(gradient, image, weight, None, *how, mask)[1]
        return found

    module = make_fx(of_weight, tracing_mode="fake", _allow_non_fake_inputs=True)(gradient, image)
    with fake_mode_of(module.graph):
        copy_images(module.graph)
    module.recompile()
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.convolution_backward.default)
    read = node.args[1].meta["val"]
    assert read.is_contiguous(memory_format=torch.channels_last) == copied
    torch.testing.assert_close(module(gradient, image), of_weight(gradient, image))
