"""The joint graph that Inductor would give to a partitioner on a device that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from fxremat.compat.absent.attention import for_capability
from fxremat.compat.absent.moving import moved
from fxremat.compat.absent.pretending import CUDA, Properties, pretending
from fxremat.compat.call_stack import with_stack_room
from fxremat.compat.compilers import in_fake_mode_of, inductor_decompositions, joint_passes
from fxremat.compat.configuration import inductor_config
from fxremat.compat.partitioning import only_marked_buffers_donated, torch_partition

ABSENT = {"shape_padding": False, "max_autotune": False, "max_autotune_gemm": False}
"""What Inductor decides by running kernels cannot be decided here."""


@with_stack_room
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
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    for_capability(gm, properties.capability)

    def on_device(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with apart_from_tracing(), _configured(patches, properties):
            there = moved(module, CUDA, inductor_decompositions())
            joint_passes(there, lambda: partition(there, joint_inputs, **kwargs))
        return torch_partition(module, joint_inputs, **kwargs)

    with only_marked_buffers_donated():
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            partition_fn=on_device,
            decompositions={},
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = compiler(gm, inputs)
        return compiled


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


@contextmanager
def apart_from_tracing() -> Iterator[None]:
    """Inside, the fake tensors that the step was traced on are not the current ones."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracing(None):
        yield
