"""Compilers of a Dynamo graph that call our partitioner: Inductor, and two that run eagerly."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from typing import Any, cast
from unittest import mock

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import detect_fake_mode
from torch._inductor.virtualized import V

from fxremat.compat.configuration import inductor_config
from fxremat.compat.dynamo import with_stack_room
from fxremat.compat.joint_graph import copy_module, only_marked_buffers_donated
from fxremat.core.layout import extent

_MARK = "fxremat"
"""In what Inductor notes of a kernel: tuned without more memory than the step has."""


def tuned_in_the_step() -> AbstractContextManager[object]:
    """Inside, kernels are written to be tuned where the step has room, but for a cache to flush.

    Each run that is timed gets copies of what the kernel overwrites. In the backward and for
    inference Inductor keeps a copy in host memory where it would exceed what has been allocated
    before, but not in the forward of a training step; and what was allocated at most may be in
    other pieces now. So copies of these kernels are made on the device only where a free piece of
    the allocator is as large, and the cache is flushed in a pool of its own if there is none for it
    (`tune_in_the_step`).
    """
    from torch._inductor.codegen import triton

    tune_in_the_step()
    before = vars(triton.TritonKernel)["inductor_meta_common"]

    def more(cls: Any) -> dict[str, Any]:
        return {**before.__func__(cls), "optimize_mem": True, _MARK: True}

    return mock.patch.object(triton.TritonKernel, "inductor_meta_common", classmethod(more))


def tune_in_the_step() -> None:
    """Have Inductor tune marked kernels so, in this process; others as ever."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner: Any = CachingAutotuner
    if hasattr(tuner.benchmark_all_configs, _MARK):
        return
    benchmark, copy = tuner.benchmark_all_configs, tuner.copy_args_to_cpu_if_needed

    @wraps(benchmark)
    def benchmark_in_the_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None or not self.inductor_meta.get(_MARK):
            return benchmark(self, *args, **kwargs)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        if take_piece(free_pieces(device), cache):
            return benchmark(self, *args, **kwargs)
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            return benchmark(self, *args, **kwargs)

    @wraps(copy)
    def copy_to_the_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None or not self.inductor_meta.get(_MARK):
            return copy(self, *args, **kwargs)
        pieces = free_pieces(device)
        if not take_piece(pieces, torch.cuda.get_device_properties(device).L2_cache_size):
            pieces = []  # the pool is for the cache alone
        named = [*zip(self.fn.arg_names, args, strict=False), *kwargs.items()]
        return {
            name: (arg, _on_host(arg))
            for name, arg in named
            if name in self.mutated_arg_names and isinstance(arg, torch.Tensor) and arg.is_cuda
            if not take_piece(pieces, extent(arg.shape, arg.stride()) * arg.element_size())
        }

    setattr(benchmark_in_the_step, _MARK, True)
    tuner.benchmark_all_configs = benchmark_in_the_step
    tuner.copy_args_to_cpu_if_needed = copy_to_the_host


def free_pieces(device: torch.device) -> list[int]:
    """The bytes of each free piece that the allocator has, in order."""
    snapshot: Any = torch.cuda.memory_snapshot
    index = torch.cuda.current_device() if device.index is None else device.index
    return sorted(
        block["size"]
        for segment in snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )


def take_piece(pieces: list[int], nbytes: int) -> bool:
    """Cut so many bytes from the smallest piece that has them; false where there is none."""
    place = bisect_left(pieces, nbytes)
    if place == len(pieces):
        return False
    insort(pieces, pieces.pop(place) - nbytes)
    return True


def _device_of(values: tuple[Any, ...]) -> torch.device | None:
    """The GPU that the arguments of a kernel lie on."""
    return next((x.device for x in values if isinstance(x, torch.Tensor) and x.is_cuda), None)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's storage in pinned host memory."""
    flat = tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,))
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)


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
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd with our partition; the graphs run as they are, node by node."""
    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    with only_marked_buffers_donated():
        compiled: Callable[..., Any] = compiler(gm, inputs)
        return compiled


def trace_as_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The joint graph exactly as Inductor would give it to ``partition``; the parts run eagerly."""

    def with_joint_passes(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return joint_passes(module, lambda: partition(module, joint_inputs, **kwargs))

    with inductor_config.patch(dict(patches)):
        return compile_with_aot_eager(gm, inputs, with_joint_passes, inductor_decompositions())


@with_stack_room
def trace_without_gradients(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> fx.GraphModule:
    """The graph of a call that takes no gradients, as Inductor lowers it."""
    traced = list[fx.GraphModule]()

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        traced.append(copy_module(module))
        return boxed_nop(module, inputs)

    with inductor_config.patch(dict(patches)):
        aot_autograd(
            fw_compiler=boxed_nop,
            inference_compiler=keep,
            decompositions=inductor_decompositions(),
            keep_inference_input_mutations=True,
        )(gm, inputs)
        joint_passes(traced[0], lambda: None)
    return traced[0]


def joint_passes(module: fx.GraphModule, then: Callable[[], Any]) -> Any:
    """Run Inductor's passes on a joint graph, ``then`` what follows, in the graph's fake mode."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    with in_fake_mode_of(module):
        _recursive_joint_graph_passes(module)
        return then()


def in_fake_mode_of(module: fx.GraphModule) -> AbstractContextManager[Any]:
    """Inside, Inductor makes its fake tensors in the mode of the graph's inputs."""
    values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    mode: AbstractContextManager[Any] = V.set_fake_mode(detect_fake_mode(values))
    return mode


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table; some of its functions look up lowerings, which nothing else may import."""
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")
    return dict(select_decomp_table())
