"""Kernels, and what is asked about vectors, begun before Inductor waits for them."""

from __future__ import annotations

import platform
import subprocess
import threading
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder

from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor import kernels
from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.inductor.kernels import begin_kernels, look_for_vectors
from tests.test_compat_generated_code import GENERATED


class Kind:
    """Vector instructions; what is found out about them takes until all kinds are asked."""

    def __init__(self, name: str, together: threading.Barrier, found: dict[str, Any]) -> None:
        self.name, self.together, self.found = name, together, found

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.together.wait(10)
        self.found[self.name] = inductor_config.max_fusion_size
        if self.name == "broken":
            raise ValueError(self.name)
        return True


def test_look_for_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of this processor at the same time, with the configuration of now, and once.

    Inductor waits for them where it asks.
    """
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
    found: dict[str, Any] = {}
    alone = threading.Barrier(1)
    names = [str(kind) for kind in cpu_vec_isa.supported_vec_isa_list]
    kinds = [Kind(name, alone, found) for name in names]
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
