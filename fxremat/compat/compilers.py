"""Compilers of a Dynamo graph that call our partitioner: Inductor, and two that run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import fx

from fxremat.compat.configuration import inductor_config


@contextmanager
def without_donated_buffers() -> Iterator[None]:
    """What is compiled inside donates no saved tensor to its backward.

    Donated buffers would save a little and make ``backward(retain_graph=True)`` an error. The
    option of torch is no help: it is asked again when the backward runs, and a graph of which
    nothing was noted then passes for one that donates.
    """
    from torch._functorch._aot_autograd import graph_compile

    found = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = found


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's whole compiler with ``patches`` in its configuration, backward included."""
    from torch._inductor.compile_fx import compile_fx

    with without_donated_buffers():
        compiled: Any = compile_fx(gm, inputs, config_patches=dict(patches), **kwargs)
    return cast("Callable[..., Any]", compiled)


def compile_with_aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """AOTAutograd with our partition; the graphs run as they are, node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with without_donated_buffers():
        compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


def trace_as_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The joint graph exactly as Inductor would give it to ``partition``; the parts run eagerly."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    def with_joint_passes(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        with V.set_fake_mode(detect_fake_mode(values)):
            _recursive_joint_graph_passes(module)
            return partition(module, joint_inputs, **kwargs)

    with inductor_config.patch(dict(patches)), without_donated_buffers():
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            partition_fn=with_joint_passes,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = compiler(gm, inputs)
        return compiled
