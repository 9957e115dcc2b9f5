"""The Python code that Inductor generates for a graph: its key, and running it without kernels."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxremat.compat.compilers import tuned_in_the_step
from fxremat.compat.configuration import caches_disabled, inductor_config
from fxremat.compat.inductor.lowered_ahead import Lowered, lowering_key
from fxremat.compat.inductor.post_grad import unmarked
from fxremat.compat.inductor.scheduling import far_loops_apart
from fxremat.compat.joint_graph import copy_module, donated_inputs, name_in_forward


@dataclass(frozen=True)
class Generated:
    """The Python code that Inductor makes of one graph: it allocates, calls kernels, and frees.

    ``source`` defines ``call(args)``, which uses the named ``constants``. ``origin_of`` gives the
    FX node of a buffer where it has one, ``strides`` those of the results, None where they are no
    tensors.
    """

    source: str
    constants: Mapping[str, Any]
    origin_of: Mapping[str, str]
    strides: tuple[tuple[Any, ...] | None, ...]
    lowered: Lowered | None = field(default=None, repr=False, compare=False)
    """What Inductor's compiler can go on from; only where it came with kernels."""


def generate(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    is_inference: bool = False,
    seen_outputs: int | None = None,
    input_strides: Mapping[str, tuple[Any, ...]] | None = None,
    with_kernels: bool = False,
) -> Generated:
    """Inductor's code for ``module`` under the current configuration; no kernel is compiled.

    Unless it is to come ``with_kernels`` that can be compiled, those in C++ are written without
    vectors: it takes a third of the time. The user sees the first ``seen_outputs`` results, so
    that they keep their strides; None: those of a backward, as configured. ``input_strides``
    replaces the strides of inputs, by name in the forward: the backward reads what the forward
    saved in the layout that Inductor chose there.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        _recursive_record_original_output_strides,
        fake_tensor_prop,
    )
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    with _uncounted(), inductor_config.patch(_ONLY_CODE), tuned_in_the_step():
        module = copy_module(module)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        mode = detect_fake_mode([n.meta.get("val") for n in placeholders])
        assert mode is not None, "a graph without tensor inputs has no code"
        with V.set_fake_mode(mode):
            with mode:
                _set_strides(placeholders, input_strides or {})
            inputs = [n.meta["val"] for n in placeholders]
            view_to_reshape(module)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                fake_tensor_prop(module, inputs)
            _recursive_record_original_output_strides(module)
            _record_seen_outputs(module.graph.output_node(), seen_outputs)
            _recursive_post_grad_passes(module, is_inference=is_inference)
            return _lowered(module, inputs, is_backward, is_inference, with_kernels)


_ONLY_CODE = {
    "trace.enabled": False,
    "compile_threads": 1,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "benchmark_fusion": False,
}
"""With more threads Triton kernels are compiled as soon as each is written. No kernel is run: what
tuning finds is kept on disk, and it would be found while the user's memory is full. Code that is
to be tuned is lowered anew, as its configuration differs."""


@contextmanager
def _uncounted() -> Iterator[None]:
    """What is compiled inside is not counted among what torch has compiled."""
    from torch._dynamo.utils import counters

    counted = {key: value.copy() for key, value in counters.items()}
    yield
    for key, value in counted.items():
        counters[key] = value


def _lowered(
    module: fx.GraphModule,
    inputs: list[Any],
    is_backward: bool,
    is_inference: bool,
    with_kernels: bool,
) -> Generated:
    """The code of a graph that Inductor's passes have gone over, in the fake mode of now."""
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import maybe_disable_comprehensive_padding
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    before = counters["inductor"].copy()
    lowering: Any = GraphLowering(
        module,
        example_inputs=inputs,
        shape_env=V.fake_mode.shape_env,
        is_backward=is_backward,
        is_inference=is_inference,
    )
    with (
        _disable_current_modes(),  # what runs meanwhile runs on real tensors, as in Inductor
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(lowering),
        V.set_extern_kernel_nodes([]),
        maybe_disable_comprehensive_padding(inputs),
        far_loops_apart(),
    ):
        donated = donated_inputs(module) if is_backward else []
        lowering.bw_donated_idxs = donated
        lowering.freeze_runtime_asserts()
        lowering.run(*inputs)
        with nullcontext() if with_kernels else _without_vectors():
            code = lowering.codegen()
        generated = _generated(lowering, str(code[0].value))
        if not with_kernels:
            return generated
        key = lowering_key(module, inputs, is_backward=is_backward, donated=donated)
        counted = counters["inductor"] - before
        return replace(generated, lowered=Lowered(key, lowering, code, counted))


class _NoVectors:
    """Stands for Inductor's module of vector instructions: this processor has none."""

    def pick_vec_isa(self) -> Any:
        from torch._inductor import cpu_vec_isa

        return cpu_vec_isa.invalid_vec_isa

    def __getattr__(self, name: str) -> Any:
        from torch._inductor import cpu_vec_isa

        return getattr(cpu_vec_isa, name)


@contextmanager
def _without_vectors() -> Iterator[None]:
    """Inside, C++ kernels are scalar loops.

    How loops are fused and what buffers hold does not depend on it. To ask which vectors there are
    would take a program for each kind, compiled and run.
    """
    from torch._inductor.codegen import cpp

    code: Any = cpp
    known = code.cpu_vec_isa
    code.cpu_vec_isa = _NoVectors()
    try:
        yield
    finally:
        code.cpu_vec_isa = known


def code_key(module: fx.GraphModule, *, is_backward: bool) -> str | None:
    """Equal for graphs that `generate` makes the same code of: Inductor's key in its own cache.

    None where that cannot be told: where Inductor keeps nothing (its caches are disabled, a pass of
    the user has no name, an op is not to be kept), and where a size is not known.
    """
    from torch._dynamo.utils import counters
    from torch._guards import detect_fake_mode
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.virtualized import V

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(inputs)
    if caches_disabled() or mode is None or any(map(_has_symbols, inputs)):
        return None
    counted = counters["inductor"].copy()
    with V.set_fake_mode(mode):
        found, _ = FxGraphCache.prepare_key(
            module, inputs, {"is_backward": is_backward}, inputs_to_check=[], remote=False
        )
    counters["inductor"] = counted
    return found[0] if found is not None else None


def _has_symbols(value: Any) -> bool:
    sizes = [value.numel(), *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def _record_seen_outputs(output: fx.Node, count: int | None) -> None:
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    if count is None:
        count = len(results) if inductor_config.bw_outputs_user_visible else 0
    seen = [index for index, node in enumerate(results[:count]) if isinstance(node, fx.Node)]
    output.meta["user_visible_output_idxs"] = seen


def _set_strides(placeholders: Sequence[fx.Node], strides: Mapping[str, Any]) -> None:
    for node in placeholders:
        name = name_in_forward(node)
        if name in strides:
            old = node.meta["val"]
            node.meta["val"] = torch.empty_strided(
                old.shape, strides[name], dtype=old.dtype, device=old.device
            )


def _generated(lowering: Any, source: str) -> Generated:
    named = {name: buffer.get_origin_node() for name, buffer in lowering.name_to_buffer.items()}
    named |= _calls_of_several_results(lowering)
    return Generated(
        source=source,
        constants={
            **lowering.constants,
            **lowering.torchbind_constants,
            **lowering.opaque_value_type_classes,
        },
        origin_of={
            name: str(unmarked(node).name)
            for name, node in named.items()
            if node is not None and node.op != "placeholder"
        },
        strides=tuple(_output_strides(o) for o in lowering.graph_outputs),
    )


def _calls_of_several_results(lowering: Any) -> dict[str, fx.Node]:
    """The nodes of library calls that return several buffers; only these know theirs."""
    from torch._inductor import ir

    found = {}
    for buffer in lowering.name_to_buffer.values():
        origin = buffer.get_origin_node()
        if isinstance(buffer, ir.MultiOutput) and origin is not None:
            call: Any = buffer.inputs[0]
            known = lowering.name_to_buffer[call.get_name()].get_origin_node()
            if known is None and isinstance(origin.args[0], fx.Node):
                found[call.get_name()] = origin.args[0]
    return found


def _output_strides(output: Any) -> tuple[Any, ...] | None:
    from torch._inductor import ir

    if not hasattr(output, "get_stride") or isinstance(output, ir.ShapeAsConstantBuffer):
        return None
    try:
        return tuple(int(s) for s in output.get_stride())
    except (TypeError, NotImplementedError, AttributeError):
        return None


class _NoKernel:
    """Stands for a compiled kernel, and for all that makes one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self


class _WithoutKernels(ast.NodeTransformer):
    """Replaces the object that compiles kernels."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "AsyncCompile":
            return ast.copy_location(ast.Name("_no_kernel", ast.Load()), node)
        return self.generic_visit(node)


def _unseen(made: torch.Tensor) -> None:
    """Pinned memory is the host's."""


def _empty_like_generated(
    device: str, asked: Callable[[torch.Tensor], None]
) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        asked(made)
        return made

    return empty


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any
) -> torch.Tensor:
    return pool.view(dtype).as_strided(size, stride, offset // dtype.itemsize)


def load_without_kernels(
    generated: Generated,
    constants: Mapping[str, Any],
    filename: str,
    asked: Callable[[torch.Tensor], None] = lambda made: None,
) -> Callable[[list[Any]], Any]:
    """The generated ``call``, in which kernels do nothing.

    What it allocates, and the library calls it makes, go through torch's dispatcher: under a
    fake mode it runs on tensors without memory. Its code objects carry ``filename``. ``asked`` is
    told each buffer that the code itself allocates on the CPU or a GPU.
    """
    tree = ast.fix_missing_locations(_WithoutKernels().visit(ast.parse(generated.source)))
    namespace: dict[str, Any] = {"_no_kernel": _NoKernel(), "__name__": filename}
    exec(compile(tree, filename, "exec"), namespace)
    for name in [n for n in namespace if n.startswith("empty_strided_")]:
        device = name.removeprefix("empty_strided_").removesuffix("_pinned")
        pinned = name.endswith("_pinned")
        namespace[name] = _empty_like_generated(device, _unseen if pinned else asked)
    namespace |= {
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": _from_pool,
        "assert_size_stride": _NoKernel(),
        "assert_alignment": _NoKernel(),
        **constants,
    }
    call: Callable[[list[Any]], Any] = namespace["call"]
    return call
