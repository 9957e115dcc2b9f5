"""Tensors without memory, sizes, optimizers, and code that Inductor generates."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn, optim
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.optim import optimizer as base

from fxremat.compat.configuration import inductor_config, inductor_patches
from fxremat.compat.inductor import generated_code
from fxremat.compat.inductor.generated_code import (
    Generated,
    code_key,
    generate,
    load_without_kernels,
)
from fxremat.compat.optimizers import live_optimizers, note_optimizers, steps_as_with, wrapped_by
from fxremat.compat.sizes import (
    plan_for_sizes_seen,
    size_bound,
    size_ranges,
    sizes_at,
    with_settled_sizes,
)
from fxremat.compat.tensors import (
    Watching,
    fake_tensors,
    is_fake,
    is_view,
    on_device_without_memory,
    places_in_joint,
    storage_watch,
    without_memory,
)
from fxremat.passes.joint_graph import is_tensor
from tests.compat_graphs import ATEN, dynamic, half
from tests.graphs import Capture, batch, linear

# --- tensors ------------------------------------------------------------------------------


def test_storage_watch() -> None:
    with without_memory():
        x = torch.empty(4, 4)
        key, is_gone = storage_watch(x)
        view = x.as_strided((2,), (1,), 3)
        assert storage_watch(view)[0] == key
        assert storage_watch(torch.empty(4))[0] != key
        del x
        assert not is_gone()
        del view
        assert is_gone()


def test_fake_tensors() -> None:
    """A model is made, initialised and converted, tied weights and all, and has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    with fake_tensors():
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


def test_fake_tensors_that_are_seen_leave_compiled_parts_compiled() -> None:
    sizes, counted = list[int](), CompileCounter()

    def seen(result: Any) -> None:
        sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)

    torch._dynamo.reset()
    with fake_tensors(seen):
        x = torch.empty(6)
        assert sizes == [6]
        torch.compile(lambda x: x.sin(), backend=counted)(x)
    assert counted.frame_count == 1


def test_on_device_without_memory() -> None:
    """Everything is where it lies, has no memory, and is back at the end; what is tied stays so."""
    first, tied = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    tied.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(3), tied)
    before = dict(model.named_parameters())
    with fake_tensors(), on_device_without_memory(model, torch.ones(2, 3)) as x:
        assert is_fake(x)
        assert all(is_fake(p) for p in model.parameters())
        assert all(is_fake(b) for b in model.buffers())
        assert isinstance(first.weight, torch.nn.Parameter)
        assert first.weight is tied.weight
        assert x.device.type == "cpu"
    assert all(one is before[name] for name, one in model.named_parameters())


def test_a_tensor_of_a_subclass_becomes_its_parts_in_the_joint_graph() -> None:
    from torch.testing._internal import two_tensor

    two: Any = two_tensor.TwoTensor
    plain = torch.ones(2)
    both = two(plain, plain.clone())
    given = [plain, 3, both, two(both, both), plain]
    expected = [range(1), range(1, 2), range(2, 4), range(4, 8), range(8, 9)]
    assert places_in_joint(given) == expected


# --- sizes --------------------------------------------------------------------------------


def sizes(seen: Capture) -> list[Any]:
    """Every symbolic size that a tensor of the graph has."""
    return [s for n in seen.joint.module.graph.nodes if is_tensor(n)
            for s in n.meta["val"].shape if isinstance(s, torch.SymInt)]  # fmt: skip


def test_the_bound_of_a_size_is_the_declared_one_or_else_the_size_seen() -> None:
    """Ranges, named by their source, end there. What was seen is guarded when it is planned for."""
    for bounds, expected, guards in (({"min": 2, "max": 64}, 64, 0), ({}, 6, 1)):
        seen = dynamic(**bounds)
        graph, found = seen.joint.module.graph, sizes(seen)
        env = found[0].node.shape_env
        before = len(env.guards)
        assert {size_bound(size) for size in found} == {expected}
        assert size_bound(found[0] * 8 + 1) == 8 * expected + 1
        assert list(size_ranges(graph).values()) == [("args[0].size()[0]", 2, expected)]
        [symbol] = size_ranges(graph)
        with sizes_at({symbol: 40}):
            assert size_ranges(graph)[symbol][1:] == (2, expected)
        assert len(env.guards) == before
        plan_for_sizes_seen(graph)
        assert len(env.guards) == before + guards


def test_a_symbol_that_came_to_stand_for_one_number_is_that_number() -> None:
    """As where a module is given another width than one of its class before."""
    recorded = EagerAndRecordGraphs()
    torch._dynamo.reset()
    compiled: Any = torch.compile(torch.matmul, backend=recorded)
    compiled(torch.ones(4, 3), torch.ones(3, 2))
    compiled(torch.ones(6, 5), torch.nn.Parameter(torch.ones(5, 2)))
    given = recorded.graphs[-1].graph.find_nodes(op="placeholder")
    seen = [node.meta["example_value"] for node in given]
    x, weight = (next(one for one in seen if isinstance(one, torch.Tensor) and one.is_leaf
                      and one.requires_grad is needs) for needs in (False, True))  # fmt: skip
    assert any(isinstance(size, torch.SymInt) for size in (*x.shape, *weight.shape))
    for value in (x, weight):
        found = with_settled_sizes(value)
        assert 5 in [size for size in found.shape if type(size) is int]
        assert (found.requires_grad, type(found)) == (value.requires_grad, type(value))
        assert (found.dtype, found.stride()) == (value.dtype, value.stride())
        assert with_settled_sizes(found) is found
    torch._dynamo.reset()


# --- optimizers ---------------------------------------------------------------------------


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


@pytest.fixture(autouse=True)
def noted() -> None:
    note_optimizers()


def test_the_newest_comes_first_and_nothing_is_kept_alive() -> None:
    first, second = optim.SGD([weight()]), optim.AdamW([weight()])
    assert live_optimizers()[:2] == [second, first]
    copied = copy.deepcopy(first)
    assert live_optimizers()[0] is copied
    first.load_state_dict(copied.state_dict())
    assert live_optimizers().count(copied) == 1
    del copied, second
    assert live_optimizers()[0] is first


def test_private_names_are_as_they_were_when_this_was_written() -> None:
    assert hasattr(base.Optimizer, "_patch_step_function")
    assert base._foreach_supported_types[:2] == [torch.Tensor, nn.Parameter]
    made = base.Optimizer._patch_step_function
    note_optimizers()
    assert base.Optimizer._patch_step_function is made
    assert optim.SGD.step.hooked  # type: ignore[attr-defined]


EARLIER = """
import torch
early = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
from fxremat.compat.optimizers import live_optimizers, note_optimizers
assert live_optimizers() == [early]
note_optimizers()
late = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
assert live_optimizers() == [late, early]
"""


def test_one_that_was_made_before_is_found() -> None:
    subprocess.run([sys.executable, "-c", EARLIER], check=True)


class Wrapper(optim.Optimizer):
    """As those of trainers: it has an optimizer, and shows its groups."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        self.inner = inner


def test_of_a_wrapper_what_it_wraps_is_found() -> None:
    inner = optim.SGD([weight()])
    wrapper = Wrapper(inner)
    assert wrapped_by(wrapper) == [inner]
    assert live_optimizers()[0] is inner
    several: Any = Wrapper(inner)
    several.inner, several.all = None, [inner, {"an": "option"}]
    assert wrapped_by(several) == [inner]
    several.all = {"one": inner}
    assert wrapped_by(several) == [inner]
    del wrapper, several
    gc.collect()


def seen_in_step(kind: type[Any], device: str) -> list[str]:
    """The ops of a step of tensors without memory, as with those of a kind."""
    seen: list[str] = []
    with without_memory(), steps_as_with([kind], lambda op, *_: seen.append(str(op))):
        made = torch.ones(4, device=device)
        made.grad = torch.ones(4, device=device)
        optim.SGD([made], lr=0.1).step()
    return seen


def test_inside_a_step_is_one_of_many_tensors_as_with_real_ones() -> None:
    """By default on CUDA, where the step of these is taken to be."""
    before = list(base._foreach_supported_types)
    assert any("_foreach_add_" in name for name in seen_in_step(nn.Parameter, "cuda"))
    assert not any("_foreach" in name for name in seen_in_step(Wrapper, "cuda"))
    assert base._foreach_supported_types == before


def test_hooks_for_all_optimizers_are_not_told_of_steps_without_memory() -> None:
    weight, told = nn.Parameter(torch.ones(4)), list[Any]()
    weight.grad = torch.ones(4)
    handle = base.register_optimizer_step_post_hook(lambda one, *_: told.append(one))
    optimizer = optim.SGD([weight], lr=0.1)
    try:
        seen_in_step(nn.Parameter, "cpu")
        assert not told
        optimizer.step()
        assert told == [optimizer]
    finally:
        handle.remove()


def test_inside_nothing_is_compiled_and_a_value_that_nobody_knows_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with without_memory() as made, steps_as_with([], lambda *_: None):
        assert not torch.compiler.is_compiling()
        one = made(torch.zeros(3))
        assert one.sum().item() == 1.0
        assert bool(one.isnan().any())
        assert int(made(torch.zeros(3, dtype=torch.int64)).sum()) == 1
        with pytest.raises(Exception, match="nonzero"):
            one.nonzero()
    assert torch.compiler.is_compiling()


# --- generated code -----------------------------------------------------------------------


def linear_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_nothing_is_tuned_on_tensors_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor found of them would be kept on disk."""
    from torch._inductor.graph import GraphLowering
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    seen: list[Any] = []
    codegen = GraphLowering.codegen

    def noted(lowering: GraphLowering) -> Any:
        config: Any = inductor_config
        tunes = config.max_autotune or config.max_autotune_gemm or config.benchmark_fusion
        seen.append((tunes, _get_current_dispatch_mode_stack()))
        return codegen(lowering)

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        assert _get_current_dispatch_mode_stack() != []
        with inductor_config.patch(inductor_patches("max-autotune", {})):
            generate(forward, is_backward=False)

    monkeypatch.setattr(GraphLowering, "codegen", noted)
    half(linear_gelu(), step)
    assert seen == [(False, [])]


def test_a_call_of_several_results_has_its_node() -> None:
    """Not only its results have one: its scratch memory is known by that node."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    backward: Generated = half(
        model, lambda _, backward: generate(backward, is_backward=True), torch.randn(2, 3, 8, 8)
    )
    calls = re.findall(r"(\w+) = torch.ops.aten.convolution_backward", backward.source)
    assert len(calls) == 2
    names = {backward.origin_of[buffer] for buffer in calls}
    assert names == {"convolution_backward", "convolution_backward_1"}


def memory_lines(source: str) -> list[str]:
    """Where the code allocates and lets go."""
    return [line.strip() for line in source.splitlines() if re.search(r"= empty|reuse|del ", line)]


@pytest.mark.usefixtures("vectors")
def test_kernels_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scalar loops; what is allocated and when it is freed is that of real kernels."""
    from torch._inductor.codegen import cpp

    known = vars(cpp)["cpu_vec_isa"]

    def step(*modules: fx.GraphModule) -> list[str]:
        return [generate(one, is_backward=one is modules[1]).source for one in modules]

    net = nn.Sequential(linear_gelu(), nn.LayerNorm(64), nn.Softmax(1))
    sources = half(net, step)
    assert vars(cpp)["cpu_vec_isa"] is known
    monkeypatch.setattr(generated_code, "_without_vectors", nullcontext)
    sources += half(net, step)
    assert ["at::vec" in source for source in sources] == [False, False, True, True]
    assert [memory_lines(one) for one in sources[:2]] == [memory_lines(one) for one in sources[2:]]
    assert all(memory_lines(source) for source in sources)


def test_code_key() -> None:
    """One for each graph, layout and configuration; equal when the same model is compiled again."""

    def keys(model: nn.Module, *inputs: torch.Tensor) -> list[str | None]:
        found: list[str | None] = half(model, lambda forward, backward: [
            code_key(forward, is_backward=False),
            code_key(forward, is_backward=True),
            code_key(backward, is_backward=True),
        ], *inputs)  # fmt: skip
        return found

    first = keys(linear_gelu())
    assert None not in first
    assert len({*first}) == 3
    assert keys(linear_gelu()) == first
    others = [first, keys(linear_gelu(), batch(64, 32).detach().t())]
    with inductor_config.patch(max_fusion_size=3):
        others.append(keys(linear_gelu()))
    unbiased = nn.Linear(64, 64, bias=False)
    others.append(keys(nn.Sequential(nn.Linear(64, 64), nn.GELU(), unbiased)))
    assert len({key for each in others for key in each}) == 12


def test_code_key_is_none_where_nothing_is_kept() -> None:
    def step(*halves: fx.GraphModule) -> list[str | None]:
        return [code_key(one, is_backward=False) for one in halves]

    patches = {"force_disable_caches": True}, {"post_grad_custom_post_pass": lambda graph: None}
    for patch in patches:
        with inductor_config.patch(patch):
            assert half(linear_gelu(), step) == [None, None]
    x = batch(32, 64)
    torch._dynamo.mark_dynamic(x, 0)
    assert half(linear_gelu(), step, x) == [None, None]


def test_generate_with_the_strides_that_the_forward_chose() -> None:

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> Any:
        saved = next(n for n in backward.graph.nodes
                     if n.op == "placeholder" and "addmm" in n.name)  # fmt: skip
        code = generate(backward, is_backward=True, input_strides={saved.name: (1, 32)})
        return code.source, tuple(saved.meta["val"].stride())

    source, stride = half(linear_gelu(), step)
    assert "(32, 64), (1, 32)" in source
    assert stride == (64, 1)  # the module itself is left alone


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
    generated = Generated("import torch\n" + GENERATED, {}, {}, ())
    seen: list[Any] = []
    with without_memory() as made:
        factor = made(torch.ones(2, 8))
        call = load_without_kernels(generated, {"factor": factor}, "<test>")
        arguments = [torch.empty(8)]
        with Watching(lambda op, args, kwargs, result: seen.append((op, result))):
            (result,) = call(arguments)
    assert arguments == []
    assert result.shape == (4, 8)
    assert type(result).__name__ == "FakeTensor"
    ops = [op for op, _ in seen]
    assert ops[0] == ATEN.empty_strided.default
    assert ATEN.as_strided.default in ops
    assert ops[-1] == ATEN.mm.out
    assert call.__code__.co_filename == "<test>"


def test_which_tensors_are_views() -> None:
    x = torch.ones(4, 4, requires_grad=True) * 2
    views, others = (x[:1], x.t(), x.chunk(2)[0]), (x, x + 1, x.clone())
    assert all(map(is_view, views))
    assert not any(map(is_view, others))
