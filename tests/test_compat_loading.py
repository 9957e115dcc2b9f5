"""Generated code that runs without its kernels."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.inductor.loading import load_without_kernels
from fxremat.compat.tensors import Watching, without_memory
from tests.compat_graphs import ATEN

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
