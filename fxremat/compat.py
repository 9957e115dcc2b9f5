"""Every private torch name that fxremat uses, for torch 2.11, 2.13 and 2.15.

The one place where versions differ. Each function is covered by ``tests/test_compat.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "OpOverload",
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


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share one storage."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


# --- Inductor ----------------------------------------------------------------------------


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's whole compiler with ``patches`` in its configuration, backward included."""
    from torch._inductor.compile_fx import compile_fx

    # Donated buffers would save a little and make backward(retain_graph=True) an error.
    with functorch_config.patch(donated_buffer=False):
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

    with inductor_config.patch(dict(patches)), functorch_config.patch(donated_buffer=False):
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


def preserve_order(graph: fx.Graph, after: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each key after its values, by ordering-only dependencies."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})


def current_fake_mode() -> AbstractContextManager[Any]:
    """The fake mode of the compilation under way."""
    from torch._guards import detect_fake_mode

    return cast("AbstractContextManager[Any]", detect_fake_mode() or nullcontext())


# --- lowering without code generation ------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One launch of Inductor's schedule: buffers read and written, in-place pairs, origins.

    ``call`` is (op, args, kwargs) of a library call, its tensors fake and in the layout that
    Inductor chose, and ``origin`` its node; generated loops have neither.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inplace: tuple[tuple[str, str], ...]
    origins: tuple[str, ...]
    is_loop: bool = True
    origin: str = ""
    call: tuple[Any, Any, Any] | None = None


@dataclass(frozen=True)
class Lowered:
    """Inductor's final schedule for one graph, before code generation.

    ``bytes_of`` gives every buffer's bytes, ``origin_of`` its FX node; ``outputs`` the buffer (or
    input) each result of the graph lives in, None where it is no tensor; ``strides`` those of
    the results.
    """

    kernels: tuple[Kernel, ...]
    bytes_of: Mapping[str, int]
    origin_of: Mapping[str, str]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[Any, ...] | None, ...]


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes have their own ``meta``: lowering must not touch the original."""
    graph, copies = fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
    result = graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    result.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def lower(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    input_strides: Mapping[str, tuple[Any, ...]] | None = None,
) -> Lowered:
    """Post-grad passes, lowering and scheduling of ``module`` under the current configuration.

    ``input_strides`` replaces the strides of inputs, by placeholder name: the backward reads
    what the forward saved in the layout that Inductor chose there.
    """
    from torch._dynamo.utils import counters
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    counted = {key: value.copy() for key, value in counters.items()}
    module = _copy_module(module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode([n.meta.get("val") for n in placeholders])
    assert mode is not None, "a graph without tensor inputs cannot be lowered"
    with V.set_fake_mode(mode):
        for node in placeholders:
            strides = (input_strides or {}).get(node.name)
            if strides is not None:
                old = node.meta["val"]
                with mode:
                    node.meta["val"] = torch.empty_strided(
                        old.shape, strides, dtype=old.dtype, device=old.device
                    )
        inputs = [n.meta["val"] for n in placeholders]
        view_to_reshape(module)  # type: ignore[no-untyped-call]
        _recursive_post_grad_passes(module, is_inference=False)
        lowering = GraphLowering(
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
        ):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            result = _read_schedule(lowering)
    for key, value in counted.items():
        counters[key] = value
    return result


def _read_schedule(lowering: Any) -> Lowered:
    from torch._inductor.memory import compute_size_for_scheduler_buffer

    scheduler = lowering.scheduler
    sizes = compute_size_for_scheduler_buffer(scheduler.name_to_buf)
    reader = _ScheduleReader(scheduler, {k: max(pair) for k, pair in sizes.items()})
    kernels = tuple(reader.kernel(node) for node in scheduler.nodes)
    sized = {name: reader.bytes(name) for name in sizes}
    if set(lowering.device_types) == {"cpu"}:
        kernels, sized = _merge_loops(kernels, sized)
    outputs = [_output_buffer(o) for o in lowering.graph_outputs]
    return Lowered(
        kernels=kernels,
        bytes_of=sized,
        origin_of={
            name: str(node.name)
            for name, buffer in scheduler.name_to_buf.items()
            if (node := buffer.node.get_origin_node()) is not None
        },
        outputs=tuple(reader.real(n) if n is not None else None for n in outputs),
        strides=tuple(_output_strides(o) for o in lowering.graph_outputs),
    )


def _merge_loops(
    kernels: Sequence[Kernel], sizes: Mapping[str, int]
) -> tuple[tuple[Kernel, ...], dict[str, int]]:
    """The C++ backend makes one function of all loops between two library calls.

    What any of them writes is allocated before it, and what any of them reads for the last
    time is freed after it. A temporary that a later loop overwrites takes no bytes of its own.
    """
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.is_loop and groups and groups[-1][-1].is_loop:
            groups[-1].append(kernel)
        else:
            groups.append([kernel])
    sized = dict(sizes)
    for group in groups:
        written = {w for kernel in group for w in kernel.writes}
        for kernel in group:
            for read, _ in kernel.inplace:
                if read in written:
                    sized[read] = 0
    return tuple(group[0] if len(group) == 1 else _merged(group) for group in groups), sized


def _merged(group: Sequence[Kernel]) -> Kernel:
    writes = dict.fromkeys(w for kernel in group for w in kernel.writes)
    reads = dict.fromkeys(r for kernel in group for r in kernel.reads if r not in writes)
    return Kernel(
        name="+".join(kernel.name for kernel in group),
        reads=tuple(reads),
        writes=tuple(writes),
        inplace=tuple(p for kernel in group for p in kernel.inplace if p[0] not in writes),
        origins=tuple(sorted({o for kernel in group for o in kernel.origins})),
    )


def _output_buffer(output: Any) -> str | None:
    from torch._inductor import ir

    if isinstance(output, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        return None
    return str(output.get_name()) if hasattr(output, "get_name") else None


def _output_strides(output: Any) -> tuple[Any, ...] | None:
    from torch._inductor import ir

    if not hasattr(output, "get_stride") or isinstance(output, ir.ShapeAsConstantBuffer):
        return None
    try:
        return tuple(int(s) for s in output.get_stride())
    except (TypeError, NotImplementedError, AttributeError):
        return None


class _ScheduleReader:
    """Turns scheduler nodes into kernels over real buffers (aliases and mutations resolved)."""

    def __init__(self, scheduler: Any, sizes: dict[str, int]) -> None:
        self.scheduler, self.sizes = scheduler, sizes
        self.place = {
            n.get_name(): index
            for index, group in enumerate(scheduler.nodes)
            for n in group.get_nodes()
        }
        self.members = {
            name: group
            for group in scheduler.nodes
            for name in (n.get_name() for n in group.get_nodes())
        }

    def real(self, name: str) -> str:
        """The buffer whose memory ``name`` is."""
        from torch._inductor import ir

        name = self.scheduler.mutation_real_name.get(name, name)
        buffer = self.scheduler.name_to_buf.get(name)
        layout = getattr(buffer.node, "layout", None) if buffer is not None else None
        if isinstance(layout, ir.NonOwningLayout):
            return self.real(layout.view.get_name())
        return str(name)

    def bytes(self, name: str) -> int:
        """Bytes of a buffer; those that live in another one or in no memory have none."""
        from torch._inductor import ir

        buffer = self.scheduler.name_to_buf[name]
        if self.real(name) != name or isinstance(buffer.node.layout, ir.MultiOutputLayout):
            return 0
        return self.sizes[name] if not self.is_local(buffer) else 0

    def is_local(self, buffer: Any) -> bool:
        """Whether all readers are in the loop that writes it: then it is never stored.

        One kernel may hold several loops: a reduction's readers are in a later one, and so are
        those that run over more elements than the writer.
        """
        group = self.members.get(buffer.defining_op.get_name())
        if group is None:  # dropped as dead code
            return True
        if buffer.defining_op.is_reduction():
            return False
        extent = _extent(buffer.defining_op)
        if any(_extent(user.node) != extent for user in buffer.users):
            return False
        nodes = [getattr(u.node, "get_name", lambda: None)() for u in buffer.users]
        return (
            len(group.get_nodes()) > 1
            and bool(nodes)
            and all(n is not None and self.members.get(n) is group for n in nodes)
        )

    def kernel(self, node: Any) -> Kernel:
        from torch._inductor.dependencies import WeakDep

        deps = [*node.read_writes.reads, *node.unmet_dependencies]
        reads = [
            self.real(d.name) for d in deps if not (isinstance(d, WeakDep) and _is_ordering(d))
        ]
        writes = [self.real(b.get_name()) for b in node.get_outputs()]
        writes += [self.real(name) for name in self.multi_outputs(node)]
        origins = {o.name for n in node.get_nodes() for o in getattr(n.node, "origins", ())}
        return Kernel(
            name=node.get_name(),
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(dict.fromkeys(writes)),
            inplace=tuple(self.inplace(node)),
            origins=tuple(sorted(origins)),
            is_loop=not (node.is_extern() or node.is_template()),
            origin=_origin(node),
            call=_library_call(node),
        )

    def multi_outputs(self, node: Any) -> list[str]:
        """Results of a call that returns several: they exist from the call on."""
        from torch._inductor import ir

        names = []
        for buffer in node.get_outputs():
            if isinstance(buffer.node.layout, ir.MultiOutputLayout):
                for user in buffer.users:
                    outputs: list[Any] = getattr(user.node, "get_outputs", list)()
                    names += [b.get_name() for b in outputs if isinstance(b.node, ir.MultiOutput)]
        return names

    def inplace(self, node: Any) -> list[tuple[str, str]]:
        """Pairs for which Inductor's generated code would write over its input."""
        from torch._inductor.codegen.wrapper import can_match_buffer_size
        from torch._inductor.scheduler import SchedulerNode

        pairs = []
        for member in node.get_nodes():
            if not isinstance(member, SchedulerNode) or not inductor_config.inplace_buffers:
                continue
            for out in member.get_outputs():
                if not out.node.should_allocate() or out.node.get_mutation_names():
                    continue
                for dep in member.read_writes.reads:
                    source = self.scheduler.name_to_buf.get(dep.name)
                    if (
                        source is not None
                        and self.is_owned(source)
                        and self.is_last_use(source, member)
                        and can_match_buffer_size(source.node, out.node)
                    ):
                        pairs.append((self.real(dep.name), self.real(out.get_name())))
                        break
        return pairs

    def is_last_use(self, buffer: Any, member: Any) -> bool:
        """Whether ``member`` reads ``buffer`` index by index and nobody depends on it later.

        A dependency that only orders counts too: Inductor does not tell them apart here.
        """
        here = self.place[member.get_name()]
        before = member.ancestors
        later = [
            u
            for u in buffer.users
            if u.node.get_name() not in before
            and self.place.get(u.node.get_name(), len(self.place)) >= here
        ]
        return len(later) == 1 and later[0].node is member and bool(later[0].can_inplace)

    def is_owned(self, buffer: Any) -> bool:
        from torch._inductor import ir
        from torch._inductor.scheduler import NopKernelSchedulerNode

        spec = buffer.node.get_output_spec()
        return not isinstance(
            spec, (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)
        ) and not isinstance(buffer.defining_op, NopKernelSchedulerNode)


def _origin(node: Any) -> str:
    kernel = getattr(node, "node", None)
    origin = kernel.get_origin_node() if kernel is not None else None
    return str(origin.name) if origin is not None else ""


def _library_call(node: Any) -> tuple[Any, Any, Any] | None:
    """The op a library kernel came from, with its operands as Inductor lays them out."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    kernel = getattr(node, "node", None)
    if not isinstance(kernel, ir.ExternKernel):
        return None
    origin = kernel.get_origin_node()
    if origin is None or origin.op != "call_function":
        return None
    laid_out = iter(kernel.inputs)

    def operand(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        source: Any = next(laid_out, None)
        try:
            strides = [int(s) for s in source.get_stride()]
            same = [int(s) for s in source.get_size()] == [int(s) for s in value.shape]
        except (AttributeError, TypeError, NotImplementedError):
            return value
        if not same:
            return value
        with V.fake_mode:
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)

    args, kwargs = fx.map_arg((origin.args, origin.kwargs), operand)
    return origin.target, args, kwargs


def _extent(node: Any) -> Any:
    """How many times the body of a loop runs, reduction included; None for other nodes."""
    import sympy
    from torch.utils import _pytree as pytree

    sizes = getattr(node, "group", (None, None))[1]
    return None if sizes is None else sympy.prod(pytree.tree_leaves(list(sizes)))


def _is_ordering(dep: Any) -> bool:
    """Whether a weak dependency orders kernels without keeping a buffer alive."""
    return bool(getattr(dep, "is_fake", True))


# --- configuration -----------------------------------------------------------------------

POST_GRAD_PASS = "post_grad_custom_post_pass"


def cache_directory() -> str:
    """Inductor's cache directory, which honours TORCHINDUCTOR_CACHE_DIR."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


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
