"""The joint graph that Inductor would give to a partitioner on a device that is not here.

Autograd refuses fake tensors of a device that torch was built without. So the step is traced on
the CPU, without any decomposition, and the joint graph is moved: its inputs and all device
arguments. Then it is traced once more on fake tensors of the device, which decomposes it as
Inductor would there; gradients are in the graph by then, and autograd has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxremat.compat.absent.attention import for_capability
from fxremat.compat.absent.autocast import has_kernel
from fxremat.compat.absent.pretending import CUDA, Properties, pretending
from fxremat.compat.compilers import (
    compile_with_aot_eager,
    in_fake_mode_of,
    inductor_decompositions,
    joint_passes,
)
from fxremat.compat.configuration import inductor_config
from fxremat.compat.joint_graph import copy_module, torch_partition
from fxremat.compat.sizes import planned_inputs, sizes_at
from fxremat.compat.tensors import apart_from_tracing

ABSENT = {"shape_padding": False, "max_autotune": False, "max_autotune_gemm": False}
"""What Inductor decides by running kernels cannot be decided here."""


def trace_for_absent(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
    properties: Properties,
) -> Callable[..., Any]:
    """Trace a Dynamo graph on the CPU, and give ``partition`` its joint graph on the device.

    Inside of ``partition``, code can be generated for the device. What is returned runs the graph
    on the CPU, node by node, as torch would cut it.
    """
    for_capability(gm, properties.capability)

    def on_device(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with apart_from_tracing(), _configured(patches, properties):
            there = moved(module, CUDA, inductor_decompositions())
            joint_passes(there, lambda: partition(there, joint_inputs, **kwargs))
        return torch_partition(module, joint_inputs, **kwargs)

    return compile_with_aot_eager(gm, inputs, on_device, {})


@contextmanager
def _configured(patches: Mapping[str, Any], properties: Properties | None) -> Iterator[None]:
    """Inside, Inductor is configured, for a device that is not here where there are properties."""
    if properties is None:
        with inductor_config.patch(dict(patches)):
            yield
    else:
        with pretending(properties), inductor_config.patch({**patches, **ABSENT}):
            yield


@contextmanager
def generating(
    module: fx.GraphModule, patches: Mapping[str, Any], properties: Properties | None
) -> Iterator[None]:
    """Inside, code can be generated for a joint graph, as in the partition that it was given to.

    It need not be traced any more. ``properties`` are those of a device that is not here.
    """
    with apart_from_tracing(), _configured(patches, properties), in_fake_mode_of(module):
        yield


def moved(
    module: fx.GraphModule, device: torch.device, table: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """A copy of a joint graph on ``device``, decomposed by the ``table``.

    Placeholders keep their names, and nodes what is known of where they come from.
    """
    on_device = _with_device_arguments(copy_module(module), device)
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_shape_env_of(module))
    with mode:
        inputs = [
            _placed(n.meta.get("val"), device) for n in module.graph.find_nodes(op="placeholder")
        ]
    traced = _traced(_Decomposing(on_device, table).run, inputs, mode, table)
    _as_named(module, module.graph.find_nodes(op="placeholder"), traced)
    return traced


class _Decomposing(fx.Interpreter):
    """Takes ops apart by the table before torch asks for their kernels.

    A torch without CUDA has none for it. Of an op that has a kernel for each device, and one in
    terms of other ops for the rest, it would run the latter, in place and unseen by the tracer.

    Convolutions have other strides there than on the CPU, where the graph was traced: what is no
    view of them there is copied, as a reshape does.
    """

    def __init__(self, module: fx.GraphModule, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__(module)
        self.table = table

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.table and has_kernel(target.name(), "CompositeImplicitAutograd"):
            target = self.table[target]
        if target is torch.ops.aten.view.default and not _is_view(*args):
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _is_view(tensor: torch.Tensor, size: Any) -> bool:
    """Whether the sizes are possible without a copy."""
    if not tensor.is_contiguous():
        try:
            tensor.view(size)
        except (RuntimeError, ValueError):
            return False
    return True


def with_numbers(
    module: fx.GraphModule, sizes: Mapping[Any, int]
) -> tuple[fx.GraphModule, list[int]]:
    """A copy of a joint graph with numbers in place of its symbols, and which inputs it keeps.

    Inputs that are symbols go; of the others, the positions are given. ``sizes`` has a number for
    each symbol.
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, sizes_at(sizes):
        given = list(planned_inputs(module.graph).values())
    kept = [k for k, value in enumerate(given) if isinstance(value, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        for k, tensor in zip(kept, tensors, strict=True):
            given[k] = tensor
        return fx.Interpreter(module).run(*given)

    traced = _traced(run, [given[k] for k in kept], mode, {})
    _as_named(module, [module.graph.find_nodes(op="placeholder")[k] for k in kept], traced)
    return traced, kept


def _traced(
    run: Callable[..., Any], inputs: list[Any], mode: Any, table: Mapping[Any, Any]
) -> fx.GraphModule:
    """Trace once more, in this fake mode; nodes keep what is known of where they come from."""
    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        traced: fx.GraphModule = make_fx(
            run, decomposition_table=dict(table), _allow_non_fake_inputs=True
        )(*inputs)
    return traced


def _shape_env_of(module: fx.GraphModule) -> Any:
    for node in module.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _placed(value: Any, device: torch.device) -> Any:
    """An input without memory on the device; numbers stay on the CPU, as scalars do."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _with_device_arguments(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Tensors are made on the device where they were made on the CPU; constants move there."""

    def there(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = pytree.tree_map(there, node.args)
            node.kwargs = pytree.tree_map(there, node.kwargs)
    module.recompile()
    return module


def _as_named(
    source: fx.GraphModule, placeholders: Sequence[fx.Node], traced: fx.GraphModule
) -> None:
    """Give placeholders, and what torch says of them and of the outputs, back to the new graph."""
    for old, new in zip(placeholders, traced.graph.find_nodes(op="placeholder"), strict=True):
        new.target = old.target
        new._rename(str(old.target))
        new.meta = {**old.meta, "val": new.meta["val"]}
        new.meta.pop("tensor_meta", None)
    before, after = source.graph.output_node().meta, traced.graph.output_node().meta
    after |= {k: v for k, v in before.items() if k == "desc" or k not in after}
    traced.meta = dict(source.meta)
    traced.recompile()
