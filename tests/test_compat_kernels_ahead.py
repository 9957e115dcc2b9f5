"""Kernels that are compiled ahead, code that is lowered ahead, and the sizes that are tuned."""

from __future__ import annotations

import inspect
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor import config as torch_inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen import triton
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics

from fxremat.compat import compilers
from fxremat.compat.compilers import compile_with_inductor
from fxremat.compat.configuration import POST_GRAD_PASS, inductor_config
from fxremat.compat.inductor import kernels, lowered_ahead
from fxremat.compat.inductor.generated_code import Generated, generate
from fxremat.compat.inductor.kernels import apart, begin_kernels, for_a_kernel, look_for_vectors
from fxremat.compat.inductor.lowered_ahead import forget_lowered, hand_over
from fxremat.compat.joint_graph import torch_partition
from tests.compat_graphs import half, inductor_by
from tests.graphs import batch
from tests.test_compat_tensors import GENERATED

# --- kernels ahead ------------------------------------------------------------------------


@dataclass
class Kind:
    """Vector instructions; what is found out about them takes until all kinds are asked."""

    name: str
    together: threading.Barrier
    found: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.together.wait(10)
        self.found[self.name] = inductor_config.max_fusion_size
        if self.name == "broken":
            raise ValueError(self.name)
        return True


def test_look_for_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of this processor at the same time, with the configuration of now, and once."""
    found: dict[str, Any] = {}
    together = threading.Barrier(2)
    kinds = [Kind(name, together, found) for name in ("one two", "broken", "none of ours")]
    monkeypatch.setattr(kernels, "_looking", [])
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", kinds)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["one", "two", "broken"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: sorted(found))
    with inductor_config.patch(max_fusion_size=7):
        look_for_vectors()
        look_for_vectors()
        answer: Any = cpu_vec_isa.valid_vec_isa_list()  # configurations may be of the process
    assert answer == ["broken", "one two"]
    assert found == {"broken": 7, "one two": 7}


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="x86 has several kinds")
def test_what_is_looked_for_is_what_inductor_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all that it asks for can be used, as here, these are those that it finds."""
    names = map(str, cpu_vec_isa.supported_vec_isa_list)
    kinds = [Kind(name, threading.Barrier(1), {}) for name in names]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", kinds)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        valid: Any = cpu_vec_isa.valid_vec_isa_list()
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert valid
    assert kernels._kinds(cpu_vec_isa) == valid


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of kernels that are given to compilers."""
    sources: list[str] = []
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, *args: sources.append(args[1]))
    monkeypatch.setattr(
        CppPythonBindingsCodeCache, "load_pybinding_async", lambda *a, **_: sources.append(a[1])
    )
    monkeypatch.setattr(AsyncCompile, "wait", lambda *_: pytest.fail("it waits"))
    return sources


def test_begin_kernels(begun: list[str]) -> None:
    """All of them, and nothing else of the code runs."""
    begin_kernels(Generated("import torch\n" + GENERATED, {}, {}, ()))
    assert begun == ["this is no C++", "nor this"]


@pytest.mark.parametrize("source", ["this is no Python", "raise ValueError", "1 / 0"])
def test_what_cannot_be_begun_is_left(source: str) -> None:
    begin_kernels(Generated(source, {}, {}, ()))


SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
static float helper() {{ return {number}; }}
extern "C" void kernel(const float* x, float* out)
{{
    out[0] = x[0] + helper();
}}
"""
TYPES = ["const float*", "float*"]


@pytest.fixture
def fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran the compiler to make a kernel."""
    seen: list[str] = []
    run, build = subprocess.run, CppBuilder.build

    def ours(*args: Any, **kwargs: Any) -> Any:
        if any(str(one).endswith("all.cpp") for one in args[0]):
            seen.append("ours")
        return run(*args, **kwargs)

    def theirs(self: CppBuilder) -> None:
        if self.get_target_file_path().endswith(".so"):  # headers are compiled as well
            seen.append("Inductor")
        build(self)

    monkeypatch.setattr(subprocess, "run", ours)
    monkeypatch.setattr(CppBuilder, "build", theirs)
    return seen


def generated(sources: list[str]) -> Generated:
    lines = "\n".join(f"k = async_compile.cpp_pybinding({TYPES}, {one!r})" for one in sources)
    head = "from torch._inductor.async_compile import AsyncCompile\nasync_compile = AsyncCompile()"
    return Generated(f"{head}\n{lines}", {}, {}, ())


def results(sources: list[str]) -> list[float]:
    """What the kernels give when Inductor loads them."""
    found = []
    for source in sources:
        out = torch.zeros(1)
        CppPythonBindingsCodeCache.load_pybinding(TYPES, source)(torch.ones(1), out)
        found.append(out.item())
    return found


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("workers", [1, 2])
def test_kernels_of_a_graph_are_compiled_together_and_once(
    workers: int, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [SOURCE.format(number=number) for number in (2.0, 3.0, 4.0)]
    with monkeypatch.context() as several:
        several.setattr(async_compile, "get_compile_threads", lambda: workers)
        begin_kernels(generated(sources))
        begin_kernels(generated(sources))
    assert results(sources) == [3.0, 4.0, 5.0]
    assert runs == ["ours"] * (1 if workers == 1 else 3)


@pytest.mark.usefixtures("fresh")
def test_what_cannot_be_compiled_together_inductor_compiles(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "joined", lambda kernels: "this is no C++")
    sources = [SOURCE.format(number=number) for number in (2.0, 3.0)]
    begin_kernels(generated(sources))
    assert results(sources) == [3.0, 4.0]
    assert runs == ["ours", "Inductor", "Inductor"]


def test_threads_that_begin_kernels_wait_for_one_another() -> None:
    """Else one could put back what the other had put there, and kernels would never be done."""
    inductors = async_compile.AsyncCompile.cpp_pybinding
    entered = threading.Event()

    def enter() -> None:
        with kernels.compiled_together():
            entered.set()

    other = threading.Thread(target=enter)
    with kernels.compiled_together():
        other.start()
        assert not entered.wait(0.05)
    other.join()
    assert entered.is_set()
    assert async_compile.AsyncCompile.cpp_pybinding is inductors


# --- kernels ------------------------------------------------------------------------------


def test_apart_from_what_is_being_compiled() -> None:
    with inductor_config.patch({POST_GRAD_PASS: print}), torch.device("cpu"):
        with for_a_kernel():
            assert inductor_config.post_grad_custom_post_pass is None
            assert type(torch.empty(1)) is not torch.Tensor
            with apart():
                assert type(torch.empty(1)) is torch.Tensor
        assert inductor_config.post_grad_custom_post_pass is print


# --- lowered ahead ------------------------------------------------------------------------


Step = Callable[[fx.GraphModule, fx.GraphModule], None]


@pytest.fixture(autouse=True)
def _nothing_handed_over() -> Iterator[None]:
    torch._dynamo.reset()
    forget_lowered()
    yield
    forget_lowered()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each graph that Inductor lowers from here on: whether it is a backward."""
    seen, run = [], GraphLowering.run

    def watched(self: GraphLowering, *inputs: Any) -> Any:
        seen.append(self.is_backward)
        return run(self, *inputs)

    monkeypatch.setattr(GraphLowering, "run", watched)
    return seen


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 64))


def trained(model: nn.Module, between: Step) -> list[torch.Tensor]:
    """Gradients of one step, compiled by Inductor; ``between`` sees the halves before it does."""

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        halves = torch_partition(module, inputs, **kwargs)
        between(*halves)
        return halves

    torch._dynamo.reset()
    torch.manual_seed(1)
    torch.compile(model, backend=inductor_by(partition))(batch(32, 64)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def ahead(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Generates both and hands them over."""
    first = generate(forward, is_backward=False, seen_outputs=1, with_kernels=True)
    names = [str(node) for node in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    strides = {n: s for n, s in zip(names, first.strides, strict=True) if s is not None}
    second = generate(backward, is_backward=True, input_strides=strides, with_kernels=True)
    for one in (first, second):
        assert one.lowered is not None
        hand_over(one.lowered)


def nothing(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    pass


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_lowered_once_and_computes_the_same(lowered: list[bool], threads: int) -> None:
    """However many threads compile kernels; Inductor counts it once."""
    with inductor_config.patch(fx_graph_cache=False, compile_threads=threads):
        counters.clear()
        expected, counted = trained(net(), nothing), dict(counters["inductor"])
        assert lowered == [False, True]
        counters.clear()
        found = trained(net(), ahead)
    assert dict(counters["inductor"]) == counted
    assert lowered == [False, True] * 2
    assert not lowered_ahead._ready  # each is taken once
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("other", ["configuration", "graph"])
def test_what_is_another_is_lowered_anew(lowered: list[bool], other: str) -> None:
    def between(*halves: fx.GraphModule) -> None:
        with inductor_config.patch({"max_fusion_size": 1} if other == "configuration" else {}):
            ahead(*halves)
        for module in halves if other == "graph" else ():
            call = next(n for n in module.graph.nodes if n.op == "call_function")
            call._rename(call.name + "_other")

    with inductor_config.patch(fx_graph_cache=False):
        trained(net(), between)
    assert lowered == [False, True] * 2


def test_who_wants_to_see_inductor_at_work_does() -> None:
    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        with inductor_config.patch({"trace.enabled": True}):
            code = generate(forward, is_backward=False, with_kernels=True)
            assert code.lowered is not None
            hand_over(code.lowered)

    half(net(), step)
    assert not lowered_ahead._ready


def test_inputs_that_are_checked(lowered: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the code is taken where what calls it checks, lowered anew where it does."""
    expected = trained(net(), nothing)
    lowered.clear()

    def checked(inputs: Any, static: Any) -> list[int]:
        return [k for k, x in enumerate(inputs) if isinstance(x, torch.Tensor)]

    monkeypatch.setattr("torch._inductor.compile_fx.get_input_idxs_to_check", checked)
    with inductor_config.patch(fx_graph_cache=False):
        found = trained(net(), ahead)
    assert lowered == [False, True] * (2 if lowered_ahead.checks_are_written() else 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- autotune -----------------------------------------------------------------------------


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
    with torch_inductor_config.patch(force_disable_caches=True):
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
