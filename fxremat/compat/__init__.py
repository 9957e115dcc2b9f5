"""Every private torch name that fxremat uses, for torch 2.11, 2.13 and 2.15.

The one place where versions differ. Each function is covered by ``tests/test_compat.py``.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as _partitioners
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
except ImportError:  # torch 2.11 has one class for both
    SchedulerPass = CustomGraphPass  # type: ignore[misc, assignment]

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "OpOverload",
    "SchedulerPass",
    "ShapeEnv",
    "functorch_config",
    "inductor_config",
]


# --- the joint graph ---------------------------------------------------------------------


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph is an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether a node may not leave the forward (mutations without a backward tag)."""
    return bool(_partitioners._must_be_in_forward(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether a node's tag puts it into the backward."""
    return bool(_partitioners._must_be_in_backward(node))


def mutated_input_of(description: object) -> object | None:
    """The description of the input that an output of the graph is the new content of."""
    return getattr(description, "mutated_input", None)


def user_tag(node: fx.Node) -> str | None:
    """The name of the user's torch.utils.checkpoint policy on a node, None without one."""
    tag = node.meta.get("recompute")
    return getattr(tag, "name", None)


def prepare_joint_graph(module: fx.GraphModule) -> None:
    """Dead code out, common subexpressions merged, the user's checkpoint tags made consistent.

    Merging must come before recompute copies are made: afterwards it would undo them.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    if _partitioners.has_recomputable_ops(module):
        _partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        _partitioners.force_save_collectives(module)
    _partitioners.force_save_effectful_ops(module)
    _partitioners.force_save_bw_mutation_src(module)
    module.recompile()


def is_symbol(node: fx.Node) -> bool:
    """Whether a node is a symbolic number (or a number computed from one)."""
    return is_sym_node(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node is an object that is neither tensor nor number (torch 2.13 and later)."""
    test = getattr(_partitioners, "is_opaque_node", None)
    return bool(test(node)) if test is not None else False


def default_partition(
    module: fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own partition, which handles graphs whose backward needs nothing."""
    return _partitioners.min_cut_rematerialization_partition(module, joint_inputs, **kwargs)


def extract_forward_backward(
    module: fx.GraphModule,
    saved: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph at exactly the nodes ``saved``, which must cover the backward's needs."""
    from torch.utils._ordered_set import OrderedSet

    tensors = [n for n in saved if not is_symbol(n) and not is_opaque(n)]
    symbols = [n for n in saved if is_symbol(n)]
    opaque = [n for n in saved if not is_symbol(n) and is_opaque(n)]
    extra = [opaque] if "saved_opaque_nodes" in _EXTRACT_ARGUMENTS else []
    forward, backward = _partitioners._extract_fwd_bwd_modules(
        module,
        tensors,
        symbols,
        *extra,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static_inputs),
    )
    thread = getattr(_partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        forward = thread(forward, is_backward=False)
        backward = thread(backward, is_backward=True)
    return forward, backward


_EXTRACT_ARGUMENTS = frozenset(inspect.signature(_partitioners._extract_fwd_bwd_modules).parameters)


# --- sizes -------------------------------------------------------------------------------


def size_bound(size: Any) -> int:
    """A size as a number: the declared upper bound of a dynamic one, else the size seen.

    A bound counts as declared when it is a number that fits a tensor dimension.
    """
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    env: ShapeEnv = node.shape_env
    expression = node.expr
    substitution = {s: _symbol_bound(env, s) for s in expression.free_symbols}
    return int(expression.xreplace(substitution))


def _symbol_bound(env: ShapeEnv, symbol: Any) -> int:
    declared = _declared_bound(env, symbol)
    return int(_hints(env).get(symbol, 4096)) if declared is None else declared


def _hints(env: ShapeEnv) -> Mapping[Any, Any]:
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    return cast("Mapping[Any, Any]", getattr(env, name))


def plan_for_sizes_seen(graph: fx.Graph) -> None:
    """Guard dynamic sizes without a declared bound by what was seen: larger ones compile anew."""
    import sympy

    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.SymInt):
            continue
        env, symbol = value.node.shape_env, value.node.expr
        if isinstance(symbol, sympy.Symbol) and _declared_bound(env, symbol) is None:
            hint = _hints(env).get(symbol)
            if hint is not None:
                env.evaluate_expr(sympy.Le(symbol, int(hint)))


def _declared_bound(env: ShapeEnv, symbol: Any) -> int | None:
    import sympy

    upper = env.var_to_range[symbol].upper if symbol in env.var_to_range else None
    return int(upper) if isinstance(upper, sympy.Integer) and upper < 2**48 else None


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo ended the graph because it could not go on, so that another follows."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def current_frame() -> int:
    """The number of the frame that Dynamo is compiling; graphs of one frame replace each other."""
    from torch._guards import CompileContext

    identifier = CompileContext.current_compile_id()
    frame = getattr(identifier, "frame_id", None)
    return -1 if frame is None else int(frame)


def storage_watch(tensor: torch.Tensor) -> tuple[int, Callable[[], bool]]:
    """A number for the storage of ``tensor``, unique as long as the second is kept.

    The second says whether the storage is gone.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata), reference.expired


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that live and share one storage."""
    return storage_watch(tensor)[0]


# --- Inductor ----------------------------------------------------------------------------


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


@contextmanager
def fresh_dynamo_caches() -> Iterator[None]:
    """Compilations inside are not counted against the recompile limit outside."""
    import torch._dynamo.config as dynamo_config

    with dynamo_config.patch(recompile_limit=64):
        yield


_LIBRARY: Any = torch.library.Library("fxremat", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("written(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("written", torch.ops.aten.alias.default, "CompositeExplicitAutograd")


def write_results(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Make Inductor write these results to memory, not compute them in their readers' loops.

    Each gets a mark behind it, through which all its readers read.
    """
    _lower_written()
    for node in nodes:
        readers = list(node.users)
        with graph.inserting_after(node):
            mark = graph.call_function(torch.ops.fxremat.written.default, (node,))
        mark.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, mark)


def return_inputs_as_they_are(graph: fx.Graph) -> None:
    """Keep Inductor from returning copies of the graph's own inputs, with channels last.

    Of the images and weights of convolutions that the backward reads it would make such copies, and
    keep them until then. What the user sees it leaves as it is; so they are said to be seen.
    """
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


def _unmarked(node: fx.Node) -> fx.Node:
    """What stands before a mark of `write_results`."""
    marked = node.args[0] if node.target is torch.ops.fxremat.written.default else node
    assert isinstance(marked, fx.Node)
    return marked


def _lower_written() -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    if torch.ops.fxremat.written.default in lowerings:
        return
    convert = lowerings[torch.ops.prims.convert_element_type.default]

    def written(x: Any) -> Any:
        node = V.graph.current_node
        value = node.meta["val"]
        if node in V.graph.nodes_prefer_channels_last and value.dim() == 4:
            strides = torch._prims_common.make_channels_last_strides_for(value.shape)
            x = ir.ExternKernel.require_stride_order(x, ir.get_stride_order(strides))
        if value.dtype is torch.bool and value.device.type == "cpu":
            # C++ reads stored bools one by one; as bytes, turned to floats, whole vectors
            x = convert(x, torch.uint8)
            x.realize()
            return lowerings[torch.ops.aten.ne.Scalar](convert(x, torch.float32), 0)
        x.realize()
        return x

    register_lowering(torch.ops.fxremat.written.default, type_promotion_kind=None)(written)


# --- Inductor's scheduler ----------------------------------------------------------------

SCHEDULER_PASS = "_pre_fusion_custom_pass"


@dataclass(frozen=True)
class Scheduled:
    """A kernel before fusion: a library call, a loop, or (neither) something without work.

    ``is_copy`` of a loop that changes no value, only the layout. ``read_bytes`` of the largest
    operand, ``written_bytes`` of all results; ``reads`` and ``writes`` name the buffers.
    """

    is_call: bool
    is_loop: bool
    read_bytes: int
    written_bytes: int
    is_copy: bool = False
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


def scheduled(node: Any) -> Scheduled:
    """What a scheduler node is."""
    from torch._inductor import ir
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    size = V.graph.get_dep_size_hint
    is_loop = isinstance(node, SchedulerNode) and not node.is_template()
    reads, writes = node.read_writes.reads, node.read_writes.writes
    return Scheduled(
        is_call=bool(node.is_extern() or node.is_template())
        and not isinstance(node.node, ir.MultiOutput),
        is_loop=is_loop,
        read_bytes=max((size(dep) for dep in reads), default=0),
        written_bytes=sum(size(dep) for dep in writes),
        is_copy=is_loop
        and set(node._body.op_counts) == {"load", "store", "output"}
        and not node.has_aliasing_or_mutation(),
        reads=frozenset(dep.name for dep in reads),
        writes=frozenset(dep.name for dep in writes),
    )


def names_being_scheduled() -> list[str]:
    """The nodes of the graph that Inductor is scheduling."""
    from torch._inductor.virtualized import V

    module: Any = V.graph.module
    return [node.name for node in module.graph.nodes]


def run_after(nodes: Sequence[Any], after: Mapping[int, Sequence[int]]) -> list[Any]:
    """Make Inductor run each key after its values, all of them positions in ``nodes``.

    To the scheduler these are no uses: what is waited for may be freed and overwritten before.
    Returns the nodes in an order that agrees with it.
    """
    from torch._inductor.dependencies import WeakDep

    for later, earlier in after.items():
        own = nodes[later].get_name()  # of no buffer: nothing is mutated
        there = {dep.name for dep in nodes[later].unmet_dependencies}
        for position in earlier:
            names = [buffer.get_name() for buffer in nodes[position].get_outputs()]
            if not there.isdisjoint(names):
                continue  # a read that Inductor may turn into an overwrite, if it stands alone
            name = names[0]
            nodes[later].add_fake_dep(WeakDep(name, mutating_buf=own, is_fake=True))
        nodes[later].prune_weak_deps()  # those on dead code, which adding one brings back
    ordered = [nodes[position] for position in _delayed(len(nodes), after)]
    if after:
        scheduler = nodes[0].scheduler
        scheduler.nodes = list(ordered)
        scheduler.compute_ancestors()
    return ordered


def run_each_alone(nodes: Sequence[Any]) -> None:
    """Have each kernel called by itself: on the CPU Inductor puts several loops into one function.

    What such a function writes is allocated before it, and what it reads freed behind it.
    """
    for device in {node.get_device() for node in nodes} - {None}:
        if device.type == "cpu":
            backend = nodes[0].scheduler.get_backend(device)
            backend.ready_to_flush = lambda: True


def _delayed(count: int, after: Mapping[int, Sequence[int]]) -> list[int]:
    """Positions in their order, but each one behind those that it waits for."""
    ordered: dict[int, None] = {}
    waiting: list[int] = []
    for position in range(count):
        waiting.append(position)
        while ready := [one for one in waiting if ordered.keys() >= set(after.get(one, ()))]:
            ordered.update(dict.fromkeys(ready))
            waiting = [one for one in waiting if one not in ordered]
    assert not waiting, "kernels wait for one another"
    return list(ordered)


# --- Inductor's generated code -------------------------------------------------------------


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


def copy_module(
    module: fx.GraphModule, copies: dict[fx.Node, fx.Node] | None = None
) -> fx.GraphModule:
    """A copy whose nodes have their own ``meta``; ``copies`` is told which is whose."""
    graph, copies = fx.Graph(), {} if copies is None else copies
    result = graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    result.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def generate(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    seen_outputs: int | None = None,
    input_strides: Mapping[str, tuple[Any, ...]] | None = None,
) -> Generated:
    """Inductor's code for ``module`` under the current configuration; no kernel is compiled.

    The user sees the first ``seen_outputs`` results, so that they keep their strides; None: those
    of a backward, as configured. ``input_strides`` replaces the strides of inputs, by placeholder
    name: the backward reads what the forward saved in the layout that Inductor chose there.
    """
    from torch._dynamo.utils import counters
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        _recursive_record_original_output_strides,
        fake_tensor_prop,
        maybe_disable_comprehensive_padding,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    counted = {key: value.copy() for key, value in counters.items()}
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
        _recursive_post_grad_passes(module, is_inference=False)
        lowering: Any = GraphLowering(
            module,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_backward=is_backward,
            is_inference=False,
        )
        with (
            V.set_debug_handler(DebugContext()),
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            maybe_disable_comprehensive_padding(inputs),
        ):
            lowering.freeze_runtime_asserts()
            lowering.run(*inputs)
            code = lowering.codegen()[0]
            result = _generated(lowering, str(getattr(code, "value", code)))
    for key, value in counted.items():
        counters[key] = value
    return result


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
        from torch._inductor import config

        count = len(results) if config.bw_outputs_user_visible else 0
    seen = [index for index, node in enumerate(results[:count]) if isinstance(node, fx.Node)]
    output.meta["user_visible_output_idxs"] = seen


def _set_strides(placeholders: Sequence[fx.Node], strides: Mapping[str, Any]) -> None:
    for node in placeholders:
        if node.name in strides:
            old = node.meta["val"]
            node.meta["val"] = torch.empty_strided(
                old.shape, strides[node.name], dtype=old.dtype, device=old.device
            )


def _generated(lowering: Any, source: str) -> Generated:
    named = {name: buffer.get_origin_node() for name, buffer in lowering.name_to_buffer.items()}
    return Generated(
        source=source,
        constants={
            **lowering.constants,
            **lowering.torchbind_constants,
            **getattr(lowering, "opaque_value_type_classes", {}),
        },
        origin_of={
            name: str(_unmarked(node).name)
            for name, node in named.items()
            if node is not None and node.op != "placeholder"
        },
        strides=tuple(_output_strides(o) for o in lowering.graph_outputs),
    )


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


def _empty_like_generated(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any
) -> torch.Tensor:
    return pool.view(dtype).as_strided(size, stride, offset // dtype.itemsize)


def load_without_kernels(
    generated: Generated, constants: Mapping[str, Any], filename: str
) -> Callable[[list[Any]], Any]:
    """The generated ``call``, in which kernels do nothing.

    What it allocates, and the library calls it makes, go through torch's dispatcher: under a
    fake mode it runs on tensors without memory. Its code objects carry ``filename``.
    """
    tree = ast.fix_missing_locations(_WithoutKernels().visit(ast.parse(generated.source)))
    namespace: dict[str, Any] = {"_no_kernel": _NoKernel(), "__name__": filename}
    exec(compile(tree, filename, "exec"), namespace)
    for name in [n for n in namespace if n.startswith("empty_strided_")]:
        device = name.removeprefix("empty_strided_").removesuffix("_pinned")
        namespace[name] = _empty_like_generated(device)
    namespace |= {
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": _from_pool,
        "assert_size_stride": _NoKernel(),
        "assert_alignment": _NoKernel(),
        **constants,
    }
    call: Callable[[list[Any]], Any] = namespace["call"]
    return call


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen(op, args, kwargs, result)`` after each op."""

    def __init__(self, seen: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, result)
        return result


@contextmanager
def without_memory() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, tensors have sizes and devices but no memory; yields what makes one of a real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    with unset_fake_temporarily():
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            yield mode.from_tensor


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have sizes and devices but no memory; models of them can be traced."""
    from unittest import mock

    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    swap: Any = torch.utils.swap_tensors

    def swap_fake(one: torch.Tensor, other: torch.Tensor) -> None:
        # The mode holds weak references, which swap_tensors refuses; it can do without them.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    # ``model.to(dtype)`` swaps fake parameters for new ones.
    with mode, mock.patch.object(torch.utils, "swap_tensors", swap_fake):
        yield


# --- the backward that is running --------------------------------------------------------


def running_backward() -> int | None:
    """The number of the backward that autograd runs in this thread, None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def leaves_of_one_node() -> list[torch.Tensor]:
    """The leaves to which exactly one edge leads in the backward that is running.

    Those of all its nodes, also of those that will not run. It is known where the node that runs
    is the first of the backward; elsewhere the list is empty.
    """
    return _leaves_of_one_edge(_nodes_to_run())


def _leaves_of_one_edge(nodes: Sequence[Any]) -> list[torch.Tensor]:
    edges = [edge for node in nodes for edge in _following(node)]
    counts = Counter(map(id, edges))
    return [edge.variable for edge in edges if counts[id(edge)] == 1 and _is_leaf(edge)]


def leaves_of_this_node() -> list[torch.Tensor]:
    """The leaves that get a gradient from the node which autograd runs now, into ``grad``."""
    return [edge.variable for edge in accumulators_of(running_node())]


def running_node() -> Any:
    """The node that autograd runs now in this thread, None outside of a backward."""
    return torch._C._current_autograd_node()


def accumulators_of(node: Any) -> list[Any]:
    """What adds the gradients that ``node`` gives to the ``grad`` of each leaf in this backward.

    Each has the leaf as its ``variable``.
    """
    edges = [] if node is None else _following(node)
    return [edge for edge in edges if _is_leaf(edge) and _will_run(edge)]


@dataclass(frozen=True, eq=False)
class _Started:
    """A backward that runs: where it began, and whether it only adds to ``grad``."""

    outputs: tuple[Any, ...]
    only_adds: bool


_STARTED: list[_Started] = []
_STARTING = Lock()


def watch_backwards() -> None:
    """From now on `leaves_of_one_edge` knows where backwards begin."""
    original = getattr(torch.autograd, "_engine_run_backward", None)
    if original is None or hasattr(original, "watches"):
        return

    @wraps(original)
    def watched(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        create_graph = args[2] if len(args) > 2 else True
        only_adds = kwargs.get("accumulate_grad") is True and create_graph is False
        started = _Started(tuple(t_outputs), only_adds)
        with _STARTING:
            _STARTED.append(started)
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            _STARTED.remove(started)

    watched.watches = True  # type: ignore[attr-defined]
    compiler: Any = torch.compiler
    autograd: Any = torch.autograd
    autograd._engine_run_backward = compiler.disable(watched, recursive=False)


@contextmanager
def no_other_backward() -> Iterator[bool]:
    """Whether a single backward runs that is watched; inside, no other one begins."""
    with _STARTING:
        yield len(_STARTED) == 1


def leaves_of_one_edge() -> list[torch.Tensor]:
    """The leaves to which exactly one edge leads in the backward that is running.

    Those of all its nodes, also of those that will not run. It is known after `watch_backwards`,
    where one backward runs at a time, which ``torch.autograd.backward`` began without
    ``create_graph``; elsewhere the list is empty.
    """
    started = _STARTED[:]
    if len(started) != 1 or not started[0].only_adds:
        return []
    nodes = _reachable([getattr(t, "node", None) or t.grad_fn for t in started[0].outputs])
    return _leaves_of_one_edge(nodes) if running_node() in nodes else []


def _reachable(roots: Sequence[Any]) -> list[Any]:
    """All nodes of a backward; those that begin at a leaf are not looked into: none."""
    if any(root is None for root in roots):
        return []
    found: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack.extend(_following(node))
    return list(found.values())


def _nodes_to_run() -> list[Any]:
    """All nodes of the backward that is running, if none but the one that runs now has begun.

    torch gives them where autograd has one thread: then nothing changes what it looks at. It fails
    if a node has run already. On a machine without an accelerator there is only one thread.
    """
    single = not torch.accelerator.is_available()
    with torch.autograd.set_multithreading_enabled(False) if single else nullcontext():
        try:
            nodes: Any = torch._C._current_graph_task_execution_order()  # type: ignore[attr-defined]
            return list(nodes)
        except RuntimeError:
            return []


def _following(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _will_run(node: Any) -> bool:
    """Whether the node runs in this backward; torch refuses to say it of a result of `grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def hooks_on(leaf: torch.Tensor) -> int:
    """How many hooks a leaf has that see its gradient, before or after it is accumulated."""
    kinds = (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None))
    return sum(len(hooks) for hooks in kinds if hooks)


def hooks_on_node(node: Any) -> int:
    """How many hooks of Python a node of the backward has, before or after it."""
    handles = [register(_no_hook) for register in (node.register_prehook, node.register_hook)]
    count = sum(len(handle.hooks_dict_ref() or ()) - 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return count


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call()`` called at the end of the backward that is running, unless it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _no_hook(*_: Any) -> None:
    """Stands among the hooks of a node, to see them."""


def is_noop_to_inductor(node: fx.Node) -> bool:
    """Whether a call is one that Inductor may drop where it changes nothing, copies among them."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    return node.target in noop_registry


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """Whether Inductor will lay out what the module's convolutions read and write in that order."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def input_index(node: fx.Node) -> int | None:
    """Which argument of the compiled graph an input of the joint graph is, if it is one as such."""
    description = node.meta.get("desc")
    plain = type(description).__name__ == "PlainAOTInput"
    return int(description.idx) if plain else None  # type: ignore[union-attr]


# --- configuration -----------------------------------------------------------------------

CUDAGRAPHS = "triton.cudagraphs"
POST_GRAD_PASS = "post_grad_custom_post_pass"
_PARTITIONER = "custom_partitioner_fn"


def cache_directory() -> str:
    """Inductor's cache directory, which honours TORCHINDUCTOR_CACHE_DIR."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def caches_disabled() -> bool:
    """Whether Inductor is asked to keep nothing on disk and to read nothing from there."""
    return bool(getattr(inductor_config, "force_disable_caches", False))


def inductor_patches(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a torch.compile mode, with the user's options on top."""
    from torch._inductor import list_mode_options

    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(list_mode_options(mode))
    patches.update({key.replace("-", "_"): value for key, value in options.items()})
    return patches


def chain_passes(theirs: Any) -> Any:
    """What the user configured as post-grad pass as one callable; a list from torch 2.13 on."""
    if theirs is None or callable(theirs):
        return theirs
    return _Chain(tuple(theirs))


@dataclass(frozen=True)
class _Chain:
    passes: tuple[Any, ...]

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        parts = tuple(getattr(one, "uuid", lambda: None)() for one in self.passes)
        return parts if all(parts) else None


def fake_mode_of(graph: fx.Graph) -> AbstractContextManager[Any]:
    """The mode that the fake tensors of the graph's inputs belong to, to make more of them."""
    from torch._guards import detect_fake_mode

    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(values)
    return nullcontext() if mode is None else mode


@contextmanager
def outside_fake_mode() -> Iterator[None]:
    """Tensors made inside are real, also in the middle of a compilation."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever runs inside draws no number that the user's program would have drawn."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started else []
    with torch.random.fork_rng(devices=devices):
        yield


# --- small kernels of our own --------------------------------------------------------------


@contextmanager
def apart() -> Iterator[None]:
    """Inside, tensors are real, and nothing that is being compiled around it has a say."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    own = {CUDAGRAPHS: False, POST_GRAD_PASS: None, SCHEDULER_PASS: None, _PARTITIONER: None}
    with unset_fake_temporarily(), tracing(None), inductor_config.patch(own), torch.no_grad():
        yield


@contextmanager
def for_a_kernel() -> Iterator[None]:
    """Inside, tensors are fake and of one mode, which the inputs of a kernel's graph have to be.

    A kernel is made of a graph that writes into its inputs and returns nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode()
    with apart(), mode:
        yield


def decomposed(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in the operators that Inductor has kernels for; inside `for_a_kernel`."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    table = select_decomp_table()
    traced: fx.GraphModule = make_fx(module, decomposition_table=table)(*inputs)
    return traced


def kernel_allocates(module: fx.GraphModule) -> int:
    """Bytes that a kernel allocates beside its inputs, at its peak; compiles nothing."""
    with apart():
        generated = generate(module, is_backward=False)
    live: dict[int, tuple[int, Callable[[], bool]]] = {}
    peak = 0
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

        call = load_without_kernels(generated, generated.constants, "<kernel>")
        with Watching(count):
            call(list(given))
    return peak


def compile_kernel(module: fx.GraphModule) -> Callable[[list[torch.Tensor]], object]:
    """Called with a list of tensors, which it empties."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with apart(), V.set_fake_mode(detect_fake_mode(inputs)):
        compiled: Any = compile_fx_inner(module, inputs)
    return cast("Callable[[list[torch.Tensor]], object]", compiled)


def _like(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


# --- the profiler ------------------------------------------------------------------------


def profiler_memory_events(prof: profile) -> list[tuple[int, int, str]]:
    """(start in ns, bytes allocated or, negative, freed, "CPU" or other), in recorded order."""
    results: Any = prof.profiler.kineto_results if prof.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler holds no results; read them after its with block")
    return [
        (event.start_ns(), event.nbytes(), event.device_type().name)
        for event in results.events()
        if event.name() == "[memory]"
    ]
