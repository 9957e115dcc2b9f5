"""Memory in which kernels are tuned."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codegen import triton
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics

from fxremat.compat import compilers
from fxremat.compat.compilers import compile_with_inductor

TritonKernel: Any = triton.TritonKernel


def test_only_marked_kernels_are_tuned_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two arguments that are overwritten, one finds a piece beside that for the cache."""
    before: list[str] = []

    class Tuner:
        """As far as it is changed."""

        fn = SimpleNamespace(arg_names=("a", "b", "c", "n"))
        mutated_arg_names = ("a", "b")

        def __init__(self, **meta: Any) -> None:
            self.inductor_meta = meta

        def benchmark_all_configs(self, *args: Any) -> Any:
            before.append("benchmark")
            return self.copy_args_to_cpu_if_needed(*args)

        def copy_args_to_cpu_if_needed(self, *args: Any) -> dict[str, Any]:
            before.append("copy")
            return {}

    class OnDevice(torch.Tensor):
        is_cuda = True

    def pool(*_: object) -> AbstractContextManager[None]:
        before.append("pool")
        return nullcontext()

    monkeypatch.setattr(triton_heuristics, "CachingAutotuner", Tuner)
    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(compilers, "_on_host", lambda tensor: "on the host")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", pool)
    sizes = [1400, 700]
    blocks = [{"state": "inactive", "size": size} for size in sizes]
    blocks.append({"state": "active_allocated", "size": 1 << 20})
    segments = [
        {"device": 0, "blocks": blocks},
        {"device": 1, "blocks": [{"state": "inactive", "size": 1 << 20}]},
        {"device": 0, "segment_pool_id": (0, 1), "blocks": [{"state": "inactive", "size": 9000}]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert compilers.free_pieces(torch.device("cuda")) == [700, 1400]
    compilers.tune_in_the_step()
    a, b, c = (torch.ones(n).as_subclass(OnDevice) for n in (150, 110, 500))
    assert Tuner().benchmark_all_configs(a, b, c, 5) == {}
    assert before == ["benchmark", "copy"]
    marked: Any = Tuner(fxremat=True)
    assert marked.benchmark_all_configs(a, b, c, 5) == {"b": (b, "on the host")}
    sizes[0] = blocks[0]["size"] = 999
    assert list(marked.benchmark_all_configs(a, b, c, 5)) == ["a", "b"]
    assert before == ["benchmark", "copy", "benchmark", "pool", "benchmark"]
    compilers.tune_in_the_step()
    marked.benchmark_all_configs(torch.ones(3))
    assert before[5:] == ["benchmark", "copy"]


def test_a_backward_that_is_compiled_when_it_runs_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was handed over for it, so that Inductor lowers it after the forward has run."""
    marked: list[tuple[bool, bool]] = []
    before = GraphLowering.codegen

    def codegen(self: Any) -> Any:
        meta = TritonKernel.__dict__["inductor_meta_common"]
        marked.append((bool(self.is_backward), meta.__func__.__qualname__.startswith("tuned_in")))
        return before(self)

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        weight = torch.ones(8, 8, requires_grad=True)
        gm = torch.fx.symbolic_trace(lambda w, x: ((x @ w).relu().sum(),))
        compiled = compile_with_inductor(gm, [weight, torch.ones(4, 8)], {})
        result = compiled(weight, torch.ones(4, 8))
        assert marked == [(False, True)]
        result[0].backward()
    assert marked == [(False, True), (True, True)]


def test_names_that_tuning_relies_on() -> None:
    tuner: Any = triton_heuristics.CachingAutotuner
    compilers.tune_in_the_step()
    source = inspect.getsource(triton_heuristics)
    assert hasattr(tuner.benchmark_all_configs, "__wrapped__")
    for name in (
        "self.mutated_arg_names",
        "self.fn.arg_names",
        "arg, cpu_arg = pair",
        "timings = self.benchmark_all_configs(",
        "self.copy_args_to_cpu_if_needed(",
    ):
        assert name in source
