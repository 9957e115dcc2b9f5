"""The code that Inductor generates, and its key."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxremat.compat.configuration import inductor_config, inductor_patches
from fxremat.compat.inductor import generated_code
from fxremat.compat.inductor.generated_code import (
    Generated,
    code_key,
    generate,
    load_without_kernels,
)
from fxremat.compat.tensors import Watching, without_memory
from tests.compat_graphs import ATEN, half
from tests.graphs import batch


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
    seen: list[Generated] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        seen.append(generate(backward, is_backward=True))

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    half(model, step, torch.randn(2, 3, 8, 8))
    (backward,) = seen
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

    known, sources = vars(cpp)["cpu_vec_isa"], []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        for module in (forward, backward):
            sources.append(generate(module, is_backward=module is backward).source)

    net = nn.Sequential(linear_gelu(), nn.LayerNorm(64), nn.Softmax(1))
    half(net, step)
    assert vars(cpp)["cpu_vec_isa"] is known
    monkeypatch.setattr(generated_code, "_without_vectors", nullcontext)
    half(net, step)
    assert ["at::vec" in source for source in sources] == [False, False, True, True]
    assert [memory_lines(one) for one in sources[:2]] == [memory_lines(one) for one in sources[2:]]
    assert all(memory_lines(source) for source in sources)


def test_code_key() -> None:
    """One for each graph, layout and configuration; equal when the same model is compiled again."""
    keys: list[str | None] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        keys.append(code_key(forward, is_backward=False))
        keys.append(code_key(forward, is_backward=True))
        keys.append(code_key(backward, is_backward=True))

    half(linear_gelu(), step)
    assert None not in keys
    assert len(set(keys)) == 3
    half(linear_gelu(), step)
    assert keys[3:] == keys[:3]
    half(linear_gelu(), step, batch(64, 32).detach().t())
    with inductor_config.patch(max_fusion_size=3):
        half(linear_gelu(), step)
    half(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False)), step)
    assert len(set(keys[3:])) == 12


def test_code_key_is_none_where_nothing_is_kept() -> None:
    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        for module in (forward, backward):
            assert code_key(module, is_backward=False) is None

    with inductor_config.patch(force_disable_caches=True):
        half(linear_gelu(), step)
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
        half(linear_gelu(), step)
    x = batch(32, 64)
    torch._dynamo.mark_dynamic(x, 0)
    half(linear_gelu(), step, x)


def test_generate_with_the_strides_that_the_forward_chose() -> None:
    seen: list[Any] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        saved = next(n for n in backward.graph.nodes
                     if n.op == "placeholder" and "addmm" in n.name)  # fmt: skip
        strides = {saved.name: (1, 32)}
        code = generate(backward, is_backward=True, input_strides=strides)
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
