"""Inductor after its post-grad passes: what it writes, returns and drops, in which layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.virtualized import V

_FREE = "_in_any_layout"

_REGROUPING = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.default,
        torch.ops.aten.squeeze.dim,
        torch.ops.aten.squeeze.dims,
    }
)
"""Views of all elements, in their order."""
_CONVOLUTIONS = frozenset(
    {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
)

_LIBRARY: Any = torch.library.Library("fxremat", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("written(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("written", torch.ops.aten.alias.default, "CompositeExplicitAutograd")


def write_results(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Make Inductor write these results to memory, not compute them in their readers' loops.

    Each gets a mark behind it, through which all its readers read. What a convolution reads as an
    image is written as an image: in the order of dimensions that the convolution wants.
    """
    _lower_written()
    for node in nodes:
        seen = _as_an_image(node)
        readers = list(seen.users)
        with graph.inserting_after(seen):
            mark = graph.call_function(torch.ops.fxremat.written.default, (seen,))
        mark.meta = dict(seen.meta)
        for reader in readers:
            reader.replace_input_with(seen, mark)


def is_read_as_an_image(node: fx.Node) -> bool:
    """Whether convolutions alone read a node, through a view of all its elements.

    Where Inductor puts channels last, it would write the node as it is, and copy it for them.
    """
    return _as_an_image(node) is not node


def _as_an_image(node: fx.Node) -> fx.Node:
    """The view through which convolutions alone read all elements of a node; else the node."""
    seen = node
    while len(seen.users) == 1 and (view := next(iter(seen.users))).target in _REGROUPING:
        seen = view
    return seen if all(user.target in _CONVOLUTIONS for user in seen.users) else node


def return_inputs_as_they_are(graph: fx.Graph) -> None:
    """Keep Inductor from returning copies of the graph's own inputs, with channels last.

    Of the images and weights of convolutions that the backward reads it would make such copies, and
    keep them until then. What the user sees it leaves as it is; so they are said to be seen.
    Graphs that `leave_layouts` has marked are left alone.
    """
    if any(node.name.endswith(_FREE) for node in graph.nodes):
        return
    output = graph.output_node()
    seen = output.meta.get("user_visible_output_idxs")
    if seen is None or not isinstance(output.args[0], (list, tuple)):
        return
    inputs = [
        index
        for index, node in enumerate(output.args[0])
        if isinstance(node, fx.Node) and node.op == "placeholder"
    ]
    output.meta["user_visible_output_idxs"] = sorted({*seen, *inputs})


def copy_images(graph: fx.Graph) -> None:
    """Copy images for the gradients of convolutions where they lie in another order than those.

    Inductor copies the gradient else, into the order of the image. That of the first convolution of
    a net is larger than the picture, and writing it so takes long.
    """
    last = torch.channels_last
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default
    ):
        gradient, image = (one.meta["val"] for one in node.args[:2])
        if gradient.dim() != 4 or not gradient.is_contiguous(memory_format=last):
            continue
        if image.is_contiguous(memory_format=last) or image.numel() >= gradient.numel():
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.ops.aten.clone.default, (node.args[1],), {"memory_format": last}
            )
        copy.meta["val"] = image.clone(memory_format=last)
        node.update_arg(1, copy)


def leave_layouts(forward: fx.GraphModule) -> None:
    """Mark a forward whose inputs Inductor may return in any layout, as it does for plain torch.

    The mark is in a name, so that the graph's text differs for Inductor's caches. A graph all of
    whose results are inputs or results of its ops has no place for one, and is left as it is.
    """
    kept = set(forward.graph.output_node().all_input_nodes)
    inner = (n for n in forward.graph.nodes if n.op == "call_function" and n not in kept)
    node = next(inner, None)
    if node is not None:
        node._rename(node.name + _FREE)
        forward.recompile()


def unmarked(node: fx.Node) -> fx.Node:
    """What a mark of `write_results` is for."""
    if node.target is not torch.ops.fxremat.written.default:
        return node
    marked = node.args[0]
    while isinstance(marked, fx.Node) and marked.target in _REGROUPING:
        marked = marked.args[0]
    assert isinstance(marked, fx.Node)
    return marked


def _lower_written() -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, register_lowering

    if torch.ops.fxremat.written.default in lowerings:
        return
    convert = lowerings[torch.ops.prims.convert_element_type.default]

    def written(x: Any) -> Any:
        node = V.graph.current_node
        value = node.meta["val"]
        targets = {user.target for user in node.users}
        wanted = bool(targets - _REGROUPING) and node in V.graph.nodes_prefer_channels_last
        wanted |= V.graph.layout_opt and not targets.isdisjoint(_CONVOLUTIONS)
        if wanted and value.dim() == 4:
            strides = torch._prims_common.make_channels_last_strides_for(value.shape)
            x = ir.ExternKernel.require_stride_order(x, ir.get_stride_order(strides))
        if value.dtype is torch.bool and value.device.type == "cpu":
            # C++ reads stored bools one by one; as bytes, turned to floats, whole vectors
            x = convert(x, torch.uint8)
            x.realize()
            return lowerings[torch.ops.aten.ne.Scalar](convert(x, torch.float32), 0)
        whole: Any = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else None
        if whole is not None and isinstance(whole.data, ir.Pointwise):
            x = ir.ExternKernel.copy_input(x)  # to realize a view writes what it is of, as it is
        x.realize()
        return x

    register_lowering(torch.ops.fxremat.written.default, type_promotion_kind=None)(written)


def is_noop_to_inductor(node: fx.Node) -> bool:
    """Whether a call is one that Inductor may drop where it changes nothing, copies among them."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    return node.target in noop_registry


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """Whether Inductor will lay out what the module's convolutions read and write in that order."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))
