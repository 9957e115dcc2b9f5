"""Small kernels of our own, compiled by Inductor apart from the graph that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.autotune import tuned_in_the_step
from fxremat.compat.compilers import inductor_decompositions
from fxremat.compat.configuration import (
    CUDAGRAPHS,
    PARTITIONER,
    POST_GRAD_PASS,
    SCHEDULER_PASS,
    inductor_config,
)
from fxremat.compat.inductor.generated_code import code_key, generate, load_without_kernels
from fxremat.compat.inductor.kernels_ahead import begin_kernels
from fxremat.compat.inductor.lowered_ahead import hand_over
from fxremat.compat.tensors import Watching, storage_key, storage_watch, without_memory


@contextmanager
def apart() -> Iterator[None]:
    """Inside, tensors are real, and nothing that is being compiled around it has a say."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    own = {CUDAGRAPHS: False, POST_GRAD_PASS: None, SCHEDULER_PASS: None, PARTITIONER: None}
    with (
        unset_fake_temporarily(),
        tracing(None),
        inductor_config.patch(own),
        tuned_in_the_step(),
        torch.no_grad(),
    ):
        yield


@contextmanager
def for_a_kernel() -> Iterator[None]:
    """Inside, tensors are fake and of one mode, which the inputs of a kernel's graph have to be.

    A kernel is made of a graph that writes into its inputs and returns nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor's cache keeps what is made of a graph only where its sizes belong to a shape env.
    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with apart(), mode:
        yield


@contextmanager
def _kept_by_inductor(module: fx.GraphModule) -> Iterator[list[Any]]:
    """Inside, Inductor's cache keeps what it makes of a kernel's graph; its inputs."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.virtualized import V

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with apart():  # else what is compiled around it would give its own mode
        mode = detect_fake_mode(inputs)
        with tracing(TracingContext(mode)), V.set_fake_mode(mode):
            yield inputs


def kernel_key(module: fx.GraphModule) -> str | None:
    """Equal for graphs that are the same kernel, in all processes; None where that is not known."""
    with _kept_by_inductor(module):
        return code_key(module, is_backward=False)


def decomposed(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in the operators that Inductor has kernels for; inside `for_a_kernel`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    table = inductor_decompositions()
    traced: fx.GraphModule = make_fx(module, decomposition_table=table)(*inputs)
    return traced


@dataclass(frozen=True)
class Unbuilt:
    """A kernel as Inductor wrote it, not compiled.

    ``allocates`` are bytes beside its inputs, at its peak. ``run`` allocates as the kernel does, on
    tensors without memory, given in a list.
    """

    allocates: int
    run: Callable[[list[torch.Tensor]], object]


def unbuilt_kernel(module: fx.GraphModule) -> Unbuilt:
    """What a kernel allocates; compiles nothing."""
    with apart():
        generated = generate(module, is_backward=False)
    live: dict[int, tuple[int, Callable[[], bool]]] = {}
    peak = 0
    call = load_without_kernels(generated, generated.constants, "<kernel>")
    with without_memory() as made:
        given = [made(_like(n)) for n in module.graph.nodes if n.op == "placeholder"]
        known = {storage_key(tensor) for tensor in given}

        def count(_op: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            nonlocal peak
            for key in [key for key, (_, is_gone) in live.items() if is_gone()]:
                del live[key]
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known:
                    key, is_gone = storage_watch(leaf)
                    live[key] = leaf.untyped_storage().nbytes(), is_gone
            peak = max(peak, sum(size for size, _ in live.values()))

        with Watching(count):
            call(list(given))
    return Unbuilt(peak, call)


def begin_kernel(module: fx.GraphModule) -> None:
    """Begin to compile a kernel without waiting for it; `compile_kernel` then finds it."""
    with apart():
        generated = generate(module, is_backward=False, with_kernels=True)
        begin_kernels(generated)
        if generated.lowered is not None:
            hand_over(generated.lowered)


def compile_kernel(module: fx.GraphModule) -> Callable[[list[torch.Tensor]], object]:
    """Called with a list of tensors, which it empties."""
    from torch._inductor.compile_fx import compile_fx_inner

    with _kept_by_inductor(module) as inputs:
        compiled: Any = compile_fx_inner(module, inputs)
    return cast("Callable[[list[torch.Tensor]], object]", compiled)


def _like(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
