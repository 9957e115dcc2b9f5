"""Every private torch name that is used, tried once: a version that changes one is noticed here."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat import compat
from fxremat.passes.joint_graph import is_tensor
from tests import nets
from tests.graphs import Capture, batch, calls, capture, compiled, everything_again, linear, mlp
from tests.small import forward_code
from tests.test_joint_graph import ATEN, X, call


def dynamic(**bounds: int) -> Capture:
    """An MLP with a dynamic first size, seen as 6."""
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    return capture(mlp(), [x])


def sizes(seen: Capture) -> list[Any]:
    """Every symbolic size that a tensor of the graph has."""
    return [s for n in seen.joint.module.graph.nodes if is_tensor(n)
            for s in n.meta["val"].shape if isinstance(s, torch.SymInt)]  # fmt: skip


def test_classes_that_inductor_asks_for() -> None:
    @dataclass(frozen=True)
    class Pass(compat.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "one"

    @dataclass(frozen=True)
    class Cut(compat.CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any: ...

        def uuid(self) -> str:
            return "two"

    assert Pass().uuid() == "one"
    assert Cut().uuid() == "two"
    assert hasattr(compat.inductor_config, compat.POST_GRAD_PASS)
    assert hasattr(compat.inductor_config, "custom_partitioner_fn")
    assert hasattr(compat.functorch_config, "cse")


def test_without_donated_buffers() -> None:
    from torch._functorch._aot_autograd import graph_compile

    nothing: Any = None
    before = graph_compile.collect_bw_donated_buffer_idxs
    with compat.without_donated_buffers():
        assert graph_compile.collect_bw_donated_buffer_idxs(nothing, nothing, nothing) == []
    assert graph_compile.collect_bw_donated_buffer_idxs is before


def test_is_tangent() -> None:
    joint = nets.traced("mlp").joint
    placeholders = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders if compat.is_tangent(n)] == ["tangents_1"]
    assert not any(compat.is_tangent(n) for n in joint.module.graph.nodes if n.op != "placeholder")


def test_where_a_node_must_be() -> None:
    copy = call(ATEN.copy_.default, X, X.clone())
    assert compat.must_be_in_forward(copy)
    assert not compat.must_be_in_backward(copy)
    copy.meta["partitioner_tag"] = "is_backward"
    assert compat.must_be_in_backward(copy)
    assert not compat.must_be_in_forward(copy)
    plain = call(ATEN.sin.default, X)
    assert not compat.must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_forward"
    assert compat.must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_backward"
    assert compat.must_be_in_backward(plain)


def test_mutated_input_of() -> None:
    """Only inputs that are overwritten outside of the graph have such an output."""
    assert compat.mutated_input_of(object()) is None
    output = nets.traced("mlp").joint.module.graph.output_node()
    assert all(compat.mutated_input_of(d) is None for d in output.meta.get("desc") or [])


def overwrite_after(x: torch.Tensor) -> torch.Tensor:
    """The new content of the input has a gradient: AOTAutograd writes it after the graph."""
    result = x.exp()
    x.mul_(2)
    return result


def test_mutated_input_of_one_that_is_overwritten_after_the_graph() -> None:
    seen = Capture(everything_again)
    run = compiled(overwrite_after, seen)
    leaf = batch(4, 8).requires_grad_()
    given = leaf * 1
    (run(given).sum() + given.sum()).backward()
    torch.testing.assert_close(leaf.grad, batch(4, 8).exp() + 2)
    descriptions = seen.joint.module.graph.output_node().meta["desc"]
    assert any(compat.mutated_input_of(d) is not None for d in descriptions)
    assert len(seen.joint.mutated) == 1


def test_user_tag() -> None:
    seen = nets.traced("save addmms")
    tags = {compat.user_tag(n) for n in seen.joint.module.graph.nodes}
    assert {"MUST_SAVE", "MUST_RECOMPUTE", None} <= tags
    plain = {compat.user_tag(n) for n in nets.traced("checkpoint").joint.module.graph.nodes}
    assert "PREFER_RECOMPUTE" in plain
    assert compat.user_tag(call(ATEN.sin.default, X)) is None


def test_prepare_joint_graph_merges_and_drops() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x.sin() * x.sin()

    seen = Capture()
    compiled(twice, seen)(batch(4, 8).requires_grad_()).sum().backward()
    assert "exp" not in seen.joint_text or not seen.calls(ATEN.exp)
    assert len(seen.calls(ATEN.sin)) == 1


def test_symbols_and_opaque_objects() -> None:
    seen = dynamic(min=2, max=64)
    symbols = [n for n in seen.joint.primals if compat.is_symbol(n)]
    assert len(symbols) == 1
    assert not compat.is_symbol(seen.node("addmm"))
    assert not any(compat.is_opaque(n) for n in seen.joint.module.graph.nodes)


def test_default_partition() -> None:
    """torch's own partition takes the graph, and its halves train."""
    seen: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append(compat.default_partition(module, inputs, **kwargs))
        return seen[0]

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_with_aot_eager(gm, inputs, partition)

    model = mlp()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(batch(4, 8)).sum().backward()
    assert len(calls(seen[0][0].graph, ATEN.addmm)) == 2
    assert model[0].weight.grad is not None


def test_extract_forward_backward_cuts_at_the_nodes_given() -> None:
    seen = capture(mlp(8, 3), [batch(4, 8)], everything_again)
    read = [n.name for n in seen.backward.graph.nodes if n.op == "placeholder"]
    saved = [n.name for n in seen.rewritten.saved]
    assert sorted(read) == sorted([*saved, "tangents_1"])
    results = seen.forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    assert [r.name for r in results[1:]] == saved  # type: ignore[union-attr]


def test_size_bound_of_a_number() -> None:
    assert compat.size_bound(7) == 7
    assert compat.size_bound(True) == 1


def test_size_bound_is_the_declared_bound() -> None:
    found = sizes(dynamic(min=2, max=64))
    assert found
    assert {compat.size_bound(s) for s in found} == {64}
    assert compat.size_bound(found[0] * 8 + 1) == 513


def test_size_bound_without_a_bound_is_the_size_seen() -> None:
    assert {compat.size_bound(s) for s in sizes(dynamic())} == {6}


def test_size_bound_leaves_no_guard() -> None:
    seen = dynamic(min=2, max=64)
    size = sizes(seen)[0]
    before = len(size.node.shape_env.guards)
    compat.size_bound(size)
    assert len(size.node.shape_env.guards) == before


def test_plan_for_sizes_seen_guards_what_has_no_bound() -> None:
    for seen, guards in ((dynamic(), 1), (dynamic(min=2, max=64), 0)):
        env = sizes(seen)[0].node.shape_env
        before = len(env.guards)
        compat.plan_for_sizes_seen(seen.joint.module.graph)
        assert len(env.guards) == before + guards


def test_graphs_of_a_model_with_graph_breaks() -> None:
    """Each graph has a frame of its own; all but the last end in a graph break."""
    seen: list[tuple[int, bool]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append((compat.current_frame(), compat.ends_in_graph_break(gm)))
        return gm

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(X)
    frames, breaks = zip(*seen, strict=True)
    assert breaks == (True, False)
    assert frames[0] < frames[1]
    assert compat.current_frame() == -1


def test_profiler_memory_events() -> None:
    with torch.profiler.profile(profile_memory=True) as prof:
        with pytest.raises(RuntimeError, match="after its with block"):
            compat.profiler_memory_events(prof)
        tensor = torch.empty(1000)
        del tensor
    events = compat.profiler_memory_events(prof)
    assert [(size, device) for _, size, device in events] == [(4000, "CPU"), (-4000, "CPU")]
    assert events[0][0] <= events[1][0]


def test_storage_key() -> None:
    x = torch.zeros(4, 4)
    assert compat.storage_key(x) == compat.storage_key(x.t()[1:])
    assert compat.storage_key(x) != compat.storage_key(x.clone())


def test_compile_with_inductor() -> None:
    """Our partition is called from Inductor's own compiler, and the gradients are right."""
    seen = Capture(everything_again, fused=True)

    @dataclass(frozen=True)
    class Cut(compat.CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            return seen(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "tests.test_compat"

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_with_inductor(gm, inputs, {"custom_partitioner_fn": Cut()})

    model, reference = mlp(), mlp()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(model, backend=backend)(batch(4, 8)).sum().backward()
    reference(batch(4, 8)).sum().backward()
    assert seen.rewritten.recomputed
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_compile_with_aot_eager() -> None:
    model, inputs = nets.make("mlp")
    seen = Capture()
    compiled(model, seen)(*inputs).sum().backward()
    assert len(seen.calls(ATEN.gelu)) == 3  # not decomposed


def test_trace_as_inductor_decomposes() -> None:
    seen = nets.traced("mlp", fused=True)
    assert seen.calls(ATEN.gelu) == []
    assert len(seen.calls(ATEN.erf)) == 3


def test_trace_as_inductor_takes_random_numbers() -> None:
    seen = Capture()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.trace_as_inductor(gm, inputs, {}, seen)

    torch._dynamo.reset()
    model = nn.Sequential(linear(), nn.Dropout())
    torch.compile(model, backend=backend)(batch(4, 8)).sum().backward()


def test_fresh_dynamo_caches() -> None:
    import torch._dynamo.config as config

    before = config.recompile_limit
    with compat.fresh_dynamo_caches():
        assert config.recompile_limit >= before
    assert config.recompile_limit == before


class Shared(nn.Module):
    """A cheap result that two library calls, through loops of their own, read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = x.abs()
        first = (shared + 1) @ self.w
        return (first @ self.w) * shared


def test_write_results() -> None:
    """A result that would be computed in each of its readers is written instead."""

    def mark(graph: fx.Graph) -> None:
        compat.write_results(graph, [n for n in graph.nodes if n.target is ATEN.abs.default])

    plain = forward_code(Shared(), batch(32, 64))
    written = forward_code(Shared(), batch(32, 64), **{compat.POST_GRAD_PASS: mark})
    assert written.count("= empty_strided_cpu((32, 64)") == 1 + plain.count(
        "= empty_strided_cpu((32, 64)"
    )


class Masked(nn.Module):
    """A mask whose two readers stand on either side of a library call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        first = torch.where(mask, x, -1.0) @ self.w
        return (first @ self.w) + mask


def test_a_written_mask_is_stored_as_bytes_and_read_as_it_was() -> None:
    def mark(graph: fx.Graph) -> None:
        compat.write_results(graph, [n for n in graph.nodes if n.target is ATEN.gt.Scalar])

    x = torch.randn(32, 64)
    code = forward_code(Masked(), x, **{compat.POST_GRAD_PASS: mark})
    assert "(32, 64), (64, 1), torch.uint8)" in code
    torch._dynamo.reset()
    with compat.inductor_config.patch({compat.POST_GRAD_PASS: mark, "force_disable_caches": True}):
        compiled = torch.compile(Masked())(x)
    torch.testing.assert_close(compiled, Masked()(x))


class Apart(nn.Module):
    """Two loops that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(100))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), self.w.sin()


def test_run_each_alone() -> None:
    """Two functions, where Inductor would put both loops into one."""

    def alone(nodes: list[Any]) -> list[Any]:
        compat.run_each_alone(nodes)
        return nodes

    before = forward_code(Apart(), batch(32, 64))
    after = forward_code(Apart(), batch(32, 64), **{compat.SCHEDULER_PASS: alone})
    kernels = [code.count("async_compile.cpp_pybinding(") for code in (before, after)]
    assert kernels == [1, 2]


def test_run_after_reorders_what_has_to_wait() -> None:
    assert compat._delayed(4, {0: [2], 3: [0]}) == [1, 2, 0, 3]
    assert compat._delayed(3, {}) == [0, 1, 2]
    with pytest.raises(AssertionError, match="wait for one another"):
        compat._delayed(2, {0: [1], 1: [0]})


def test_scheduled_and_run_after() -> None:
    """What kernels are, and an order that no data asks for."""
    seen: list[list[compat.Scheduled]] = []
    names: list[str] = []

    def backwards(nodes: list[Any]) -> list[Any]:
        seen.append([compat.scheduled(node) for node in nodes])
        names.extend(compat.names_being_scheduled())
        compat.run_after(nodes, {len(nodes) - 1: [0]})
        return nodes

    forward_code(Shared(), batch(32, 64), **{compat.SCHEDULER_PASS: backwards})
    (kernels,) = seen
    assert [k.is_call for k in kernels] == [False, True, True, False]
    assert [k.is_loop for k in kernels] == [True, False, False, True]
    assert {k.written_bytes for k in kernels} == {32 * 64 * 4}
    assert kernels[0].read_bytes == 32 * 64 * 4
    assert any(name.startswith("mm") for name in names)


def half(model: nn.Module, step: Callable[[Any, Any], None], *inputs_: torch.Tensor) -> None:
    """Run a small model; ``step`` gets its forward and its backward as Inductor would."""

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        halves = compat.default_partition(module, inputs, **kwargs)
        step(*halves)
        return halves

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.trace_as_inductor(gm, inputs, {}, partition)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*(inputs_ or [batch(32, 64)])).sum().backward()


def linear_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_generate() -> None:
    """Inductor's code for a forward and a backward, and where its buffers come from."""
    seen: list[compat.Generated] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        text = str(forward.graph)
        seen.append(compat.generate(forward, is_backward=False))
        seen.append(compat.generate(backward, is_backward=True))
        assert str(forward.graph) == text  # the module itself is left alone

    half(linear_gelu(), step)
    forward, backward = seen
    assert "def call" in forward.source
    assert "extern_kernels.mm" in backward.source
    assert "addmm" in forward.origin_of.values()
    assert not any(name.startswith("primals") for name in forward.origin_of.values())
    assert forward.strides[0] == (64, 1)
    assert forward.constants == {}


def test_code_key() -> None:
    """One for each graph, layout and configuration; equal when the same model is compiled again."""
    keys: list[str | None] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        keys.append(compat.code_key(forward, is_backward=False))
        keys.append(compat.code_key(forward, is_backward=True))
        keys.append(compat.code_key(backward, is_backward=True))

    half(linear_gelu(), step)
    assert None not in keys
    assert len(set(keys)) == 3
    half(linear_gelu(), step)
    assert keys[3:] == keys[:3]
    half(linear_gelu(), step, batch(64, 32).detach().t())
    with compat.inductor_config.patch(max_fusion_size=3):
        half(linear_gelu(), step)
    half(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False)), step)
    assert len(set(keys[3:])) == 12


def test_code_key_is_none_where_nothing_is_kept() -> None:
    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        for module in (forward, backward):
            assert compat.code_key(module, is_backward=False) is None

    with compat.inductor_config.patch(force_disable_caches=True):
        half(linear_gelu(), step)
    with compat.inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
        half(linear_gelu(), step)
    x = batch(32, 64)
    torch._dynamo.mark_dynamic(x, 0)
    half(linear_gelu(), step, x)


def test_code_key_leaves_the_counters_of_inductor_alone() -> None:
    from torch._dynamo.utils import counters

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        before = counters["inductor"].copy()
        with compat.inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
            assert compat.code_key(forward, is_backward=False) is None
        assert counters["inductor"] == before

    half(linear_gelu(), step)


def test_generate_with_the_strides_that_the_forward_chose() -> None:
    seen: list[Any] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        saved = next(n for n in backward.graph.nodes
                     if n.op == "placeholder" and "addmm" in n.name)  # fmt: skip
        strides = {saved.name: (1, 32)}
        code = compat.generate(backward, is_backward=True, input_strides=strides)
        seen.append(code.source)
        seen.append(tuple(saved.meta["val"].stride()))

    half(linear_gelu(), step)
    assert "(32, 64), (1, 32)" in seen[0]
    assert seen[1] == (64, 1)  # the module itself is left alone


GENERATED = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
loop = async_compile.cpp_pybinding(['float*'], 'this is no C++')
triton_loop = async_compile.triton('triton_loop', 'nor this')
async_compile.wait(globals())
class Runner:
    def call(self, args):
        x, = args
        args.clear()
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(reinterpret_tensor(x, (4, 2), (2, 1), 0), factor, out=buf0)
        loop(buf0)
        triton_loop.run(buf0, 32, stream=0)
        return (buf0, )
call = Runner().call
"""


def test_load_without_kernels() -> None:
    """Neither kernel is compiled; allocations and library calls are seen, and have no memory."""
    generated = compat.Generated("import torch\n" + GENERATED, {}, {}, ())
    seen: list[Any] = []
    with compat.without_memory() as made:
        factor = made(torch.ones(2, 8))
        call = compat.load_without_kernels(generated, {"factor": factor}, "<test>")
        arguments = [torch.empty(8)]
        with compat.Watching(lambda op, args, kwargs, result: seen.append((op, result))):
            (result,) = call(arguments)
    assert arguments == []
    assert result.shape == (4, 8)
    assert type(result).__name__ == "FakeTensor"
    ops = [op for op, _ in seen]
    assert ops[0] == ATEN.empty_strided.default
    assert ATEN.as_strided.default in ops
    assert ops[-1] == ATEN.mm.out
    assert call.__code__.co_filename == "<test>"


def test_without_memory_inside_a_compilation() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    outer = FakeTensorMode()
    with outer, compat.without_memory():
        assert torch.empty(2).fake_mode is not outer  # type: ignore[attr-defined]


def test_storage_watch() -> None:
    with compat.without_memory():
        x = torch.empty(4, 4)
        key, is_gone = compat.storage_watch(x)
        view = x.as_strided((2,), (1,), 3)
        assert compat.storage_watch(view)[0] == key
        assert compat.storage_watch(torch.empty(4))[0] != key
        del x
        assert not is_gone()
        del view
        assert is_gone()


def test_fake_tensors() -> None:
    """A model is made, initialised and converted, tied weights and all, and has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    with compat.fake_tensors():
        first, second = nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 1 << 20)
        second.weight = first.weight
        model = nn.Sequential(first, second, nn.Embedding(8, 4), nn.BatchNorm1d(4))
        model.to(torch.bfloat16).double().half()
        nn.init.normal_(first.weight)
    assert isinstance(first.weight, FakeTensor)
    assert isinstance(first.weight, nn.Parameter)
    assert second.weight is first.weight
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not isinstance(torch.empty(1), FakeTensor)
    linear().half()  # outside, parameters are converted as ever


def test_fake_tensors_are_traced() -> None:
    with compat.fake_tensors():
        fake = nets.make("mlp")
        seen = Capture(fused=True)

        def backend(gm: fx.GraphModule, inputs: Any) -> Any:
            return compat.trace_as_inductor(gm, inputs, {}, seen)

        torch._dynamo.reset()
        model, inputs = fake
        torch.compile(model, backend=backend)(*inputs)
    assert seen.found.problem == nets.traced("mlp", fused=True).found.problem


def test_caches_disabled() -> None:
    assert not compat.caches_disabled()
    with compat.inductor_config.patch(force_disable_caches=True):
        assert compat.caches_disabled()


def test_cache_directory() -> None:
    import os

    directory = Path(compat.cache_directory())
    assert directory == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_inductor_patches() -> None:
    assert compat.inductor_patches(None, {}) == {}
    assert compat.inductor_patches("default", {"max-autotune": True}) == {"max_autotune": True}
    tuned = compat.inductor_patches("max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    assert tuned["max_autotune"] is True
    assert tuned["epilogue_fusion"] is False


class Recording:
    """A pass that says that it ran."""

    def __init__(self, name: str | None, ran: list[str | None]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str | None:
        return self.name


def test_chain_passes() -> None:
    ran: list[str | None] = []
    a, b, nameless = (Recording(name, ran) for name in ("a", "b", None))
    assert compat.chain_passes(None) is None
    assert compat.chain_passes(a) is a
    chain = compat.chain_passes([a, b])
    chain(fx.Graph())
    assert ran == ["a", "b"]
    assert chain.uuid() == ("a", "b")
    assert compat.chain_passes([a, nameless]).uuid() is None
    assert pickle.loads(pickle.dumps(chain)).uuid() == ("a", "b")


def test_outside_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.empty(1), FakeTensor)
        with compat.outside_fake_mode():
            assert not isinstance(torch.ones(1), FakeTensor)
        assert isinstance(torch.empty(1), FakeTensor)
    with compat.outside_fake_mode():
        assert float(torch.ones(1)) == 1.0


def test_random_state_kept() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with compat.random_state_kept():
        torch.rand(10)
    assert torch.equal(torch.rand(2), expected)


class Product(torch.autograd.Function):
    """Notes what is known of the backward while it runs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        known.append((compat.leaves_of_one_node(), compat.leaves_of_this_node()))
        watched.append(compat.leaves_of_one_edge())
        with compat.no_other_backward() as alone:
            assert alone or not watched[-1]
        assert compat.running_backward() is not None
        return gradient, gradient


known: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
watched: list[list[torch.Tensor]] = []


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Product.apply(a, b)  # type: ignore[no-untyped-call]
    return found


def test_leaves_of_the_backward_that_is_running() -> None:
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    several = torch.accelerator.is_available()
    with torch.autograd.set_multithreading_enabled(False) if several else nullcontext():
        torch.autograd.backward(product(a, b))
        assert known.pop() == ([a, b], [a, b])
        torch.autograd.backward(product(a, b), inputs=[b])
        assert known.pop() == ([a, b], [b])
        torch.autograd.grad(product(a, b), [a, b])
        assert known.pop()[1] == []
        torch.autograd.backward([b.exp(), product(a, b)])  # the one made last runs first
        assert known.pop() == ([a], [a, b])
        for loss in (product(a, b).exp(), product(a, b) + a, b + product(a, b)):
            loss.backward()  # type: ignore[no-untyped-call]
            assert known.pop()[0] == []
    assert compat.running_backward() is None
    assert compat.leaves_of_one_node() == compat.leaves_of_this_node() == []


@pytest.mark.filterwarnings("ignore:Using backward")
def test_leaves_of_the_backwards_that_are_watched() -> None:
    """Where a backward begins is known; so are its leaves, wherever the node is that asks."""
    autograd: Any = torch.autograd
    before = autograd._engine_run_backward
    autograd._engine_run_backward = inspect.unwrap(before)
    compat.watch_backwards()
    installed = autograd._engine_run_backward
    compat.watch_backwards()
    assert autograd._engine_run_backward is installed
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    try:
        for loss, expected in (
            (product(a, b), [a, b]),
            (product(a, b).exp(), [a, b]),
            (product(a, b) + a, [b]),
            (product(a, b) * product(a, torch.ones(())), [b]),
        ):
            torch.autograd.backward(loss)
            assert list(map(id, watched.pop())) == list(map(id, expected))
            watched.clear()
        torch.autograd.backward([product(a, b), b.exp()])
        assert list(map(id, watched.pop())) == [id(a)]
        torch.autograd.backward([product(a, b), a])
        torch.autograd.grad(product(a, b), [a, b])
        torch.autograd.backward(product(a, b), create_graph=True)
        assert watched == [[], [], []]
        autograd._engine_run_backward = inspect.unwrap(before)
        torch.autograd.backward(product(a, b))
        assert watched.pop() == []
        with compat.no_other_backward() as alone:
            assert not alone
    finally:
        watched.clear()
        autograd._engine_run_backward = before


def test_hooks_on_a_node() -> None:
    weight = nn.Parameter(torch.ones(1))
    node: Any = torch.autograd.graph.get_gradient_edge(weight).node
    assert compat.hooks_on_node(node) == 0
    handles = [node.register_hook(print), node.register_prehook(print)]
    assert compat.hooks_on_node(node) == 2
    handles[0].remove()
    assert compat.hooks_on_node(node) == 1


def test_the_end_of_a_backward() -> None:
    ended: list[int] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            compat.at_end_of_backward(lambda: ended.append(len(ended)))
            assert ended == []
            accumulators = compat.accumulators_of(compat.running_node())
            assert [one.variable is weight for one in accumulators] == [True]
            return gradient

    weight = nn.Parameter(torch.ones(()))
    asks: Any = Asks.apply
    asks(weight).backward()
    assert ended == [0]
    assert compat.running_node() is None
    assert compat.accumulators_of(None) == []


def test_inputs_of_the_joint_graph_are_arguments_of_the_compiled_one() -> None:
    captured = nets.traced("mlp")
    found = [compat.input_index(node) for node in captured.joint.primals]
    assert found == list(range(len(found)))
    assert compat.input_index(captured.joint.tangents[0]) is None


def test_copies_that_inductor_may_drop() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert compat.is_noop_to_inductor(graph.call_function(torch.ops.aten.clone.default, (x,)))
    assert not compat.is_noop_to_inductor(graph.call_function(torch.ops.aten.sin.default, (x,)))


def test_the_order_of_channels_that_inductor_prefers() -> None:
    """On CPUs with mkldnn channels go last wherever there is a convolution."""
    image, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    convolution = make_fx(torch.conv2d, tracing_mode="fake")(image, weight)
    assert compat.prefers_channels_last(convolution)
    with torch._inductor.config.patch(layout_optimization=False):
        assert not compat.prefers_channels_last(convolution)
    assert not compat.prefers_channels_last(make_fx(torch.sin, tracing_mode="fake")(image))


def test_hooks_on_a_leaf() -> None:
    weight: Any = nn.Parameter(torch.ones(1))
    assert compat.hooks_on(weight) == 0
    first = weight.register_hook(lambda gradient: None)
    weight.register_post_accumulate_grad_hook(lambda weight: None)
    assert compat.hooks_on(weight) == 2
    first.remove()
    assert compat.hooks_on(weight) == 1


def kernel_graph() -> fx.GraphModule:
    """Writes gelu(x) - 1 over x, and the row sums of that into y."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
        x.copy_(torch.nn.functional.gelu(x) - 1)
        y.copy_(x.sum(1))
        return ()

    return kernel_of(function, (16, 32), (16,))


def kernel_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    """The graph of a kernel for arguments of these shapes."""
    module = fx.symbolic_trace(function)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    with compat.for_a_kernel():
        for node, shape in zip(placeholders, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
        return compat.decomposed(module)


def test_decomposed() -> None:
    names = {str(n.target) for n in kernel_graph().graph.nodes}
    assert "aten.erf.default" in names
    assert not any("gelu" in name for name in names)


def test_kernel_allocates() -> None:
    """A sum of each row has memory of its own before it is written where it belongs."""
    assert compat.kernel_allocates(kernel_graph()) == 16 * 4

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
        y.copy_((x @ x).sum(1))
        return ()

    assert compat.kernel_allocates(kernel_of(function, (16, 16), (16,))) == 17 * 16 * 4


def test_compile_kernel() -> None:
    kernel = compat.compile_kernel(kernel_graph())
    x, y = torch.randn(16, 32), torch.zeros(16)
    best = torch.nn.functional.gelu(x) - 1
    kernel([x, y])
    torch.testing.assert_close(x, best)
    torch.testing.assert_close(y, best.sum(1))


def test_apart_from_what_is_being_compiled() -> None:
    with compat.inductor_config.patch({compat.POST_GRAD_PASS: print}), torch.device("cpu"):
        with compat.for_a_kernel():
            assert compat.inductor_config.post_grad_custom_post_pass is None
            assert type(torch.empty(1)) is not torch.Tensor
            with compat.apart():
                assert type(torch.empty(1)) is torch.Tensor
        assert compat.inductor_config.post_grad_custom_post_pass is print


def conv_pair() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


def test_inputs_are_returned_as_they_are() -> None:
    """What a convolution's backward reads of the graph's inputs is no copy with channels last."""
    kept: list[dict[str, bool]] = []

    def strides(marked: bool, forward: fx.GraphModule) -> dict[str, bool]:
        def mark(graph: fx.Graph) -> None:
            if marked:
                compat.return_inputs_as_they_are(graph)

        with torch._inductor.config.patch(post_grad_custom_post_pass=mark):
            code = compat.generate(forward, is_backward=False, seen_outputs=1)
        results: Any = forward.graph.output_node().args[0]
        return {
            node.name: stride == node.meta["val"].stride()
            for node, stride in zip(results, code.strides, strict=True)
            if isinstance(node, fx.Node) and node.meta["val"].dim() == 4
        }

    def step(forward: fx.GraphModule, _: fx.GraphModule) -> None:
        kept.extend(strides(marked, forward) for marked in (False, True))

    half(conv_pair(), step, torch.randn(2, 4, 16, 16))
    loose, tight = kept
    inputs = [name for name in loose if name.startswith("primals")]
    assert inputs
    assert not all(loose[name] for name in inputs)
    assert all(tight[name] for name in inputs)
    seen = next(name for name in loose if not name.startswith("primals"))
    assert loose[seen]  # the user's result keeps its strides either way
    assert tight[seen]
