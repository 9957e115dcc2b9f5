"""Compilers of a Dynamo graph that call our partitioner: Inductor, and two that run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, cast

from torch import fx

from fxremat.compat.autotune import tuned_in_the_step
from fxremat.compat.call_stack import with_stack_room
from fxremat.compat.configuration import inductor_config
from fxremat.compat.partitioning import only_marked_buffers_donated


@with_stack_room
def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's whole compiler with ``patches`` in its configuration, backward included."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @wraps(compile_fx_inner)
    def compile_half(*args: Any, **kwargs: Any) -> Any:
        with tuned_in_the_step():  # the backward may be compiled when it first runs
            return compile_fx_inner(*args, **kwargs)

    given = {"inner_compile": compile_half, "config_patches": dict(patches), **kwargs}
    with only_marked_buffers_donated():
        compiled: Any = compile_fx(gm, inputs, **given)
    return cast("Callable[..., Any]", compiled)


@with_stack_room
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
    with only_marked_buffers_donated():
        compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


@with_stack_room
def trace_as_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The joint graph exactly as Inductor would give it to ``partition``; the parts run eagerly."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def with_joint_passes(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return joint_passes(module, lambda: partition(module, joint_inputs, **kwargs))

    with inductor_config.patch(dict(patches)), only_marked_buffers_donated():
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            partition_fn=with_joint_passes,
            decompositions=inductor_decompositions(),
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = compiler(gm, inputs)
        return compiled


def joint_passes(module: fx.GraphModule, then: Callable[[], Any]) -> Any:
    """Run Inductor's passes on a joint graph, ``then`` what follows, in the graph's fake mode."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    with in_fake_mode_of(module):
        _recursive_joint_graph_passes(module)
        return then()


@contextmanager
def in_fake_mode_of(module: fx.GraphModule) -> Iterator[None]:
    """Inside, Inductor makes its fake tensors in the mode of the graph's inputs."""
    from torch._guards import detect_fake_mode
    from torch._inductor.virtualized import V

    values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    with V.set_fake_mode(detect_fake_mode(values)):
        yield


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table; some of its functions look up lowerings, which nothing else may import."""
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")
    return dict(select_decomp_table())
