"""Kernels, and what is asked about vectors, begun before Inductor waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from fxremat import compat
from tests.test_compat_loading import GENERATED


def test_look_for_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, with the configuration of now."""
    seen: list[Any] = []
    ended = threading.Event()

    def pick() -> None:
        seen.extend([threading.current_thread(), compat.inductor_config.max_fusion_size])
        ended.set()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", pick)
    with compat.inductor_config.patch(max_fusion_size=7):
        compat.look_for_vectors()
        assert ended.wait(10)
    assert seen[0] is not threading.current_thread()
    assert seen[1] == 7


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of kernels that are given to compilers."""
    sources: list[str] = []
    for kind in ("cpp_pybinding", "triton"):
        monkeypatch.setattr(AsyncCompile, kind, lambda self, *args: sources.append(args[1]))
    monkeypatch.setattr(AsyncCompile, "wait", lambda *_: pytest.fail("it waits"))
    return sources


def test_begin_kernels(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and nothing else of the code runs."""
    generated = compat.Generated("import torch\n" + GENERATED, {}, {}, ())
    compat.begin_kernels(generated)
    assert not begun  # kernels are compiled in this process, one after the other
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    compat.begin_kernels(generated)
    assert begun == ["this is no C++", "nor this"]


@pytest.mark.parametrize("source", ["this is no Python", "raise ValueError", "1 / 0"])
def test_what_cannot_be_begun_is_left(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    compat.begin_kernels(compat.Generated(source, {}, {}, ()))


def test_what_is_begun_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor finds it on disk, or waits for it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder

    built: list[str] = []
    build = CppBuilder.build

    def watched(self: CppBuilder) -> None:
        target = str(self.get_target_file_path())
        if target.endswith(".so"):  # the first kernel of a machine has its headers compiled as well
            built.append(target)
        build(self)

    source = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 7.5; }
"""
    code = f"""
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
kernel = async_compile.cpp_pybinding(['float*'], {source!r})
"""
    monkeypatch.setattr(CppBuilder, "build", watched)
    with monkeypatch.context() as several:
        several.setattr(async_compile, "get_compile_threads", lambda: 2)
        compat.begin_kernels(compat.Generated(code, {}, {}, ()))
    out = torch.zeros(1)
    CppPythonBindingsCodeCache.load_pybinding(["float*"], source)(out)
    assert out.item() == 7.5
    assert len(built) == len(set(built)) == 1
