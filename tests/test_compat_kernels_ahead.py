"""Kernels, and what is asked about vectors, begun before Inductor waits for them."""

from __future__ import annotations

import platform
import threading
from typing import Any

import pytest
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor import kernels_ahead
from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.inductor.kernels_ahead import begin_kernels, look_for_vectors
from tests.test_compat_loading import GENERATED


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
    monkeypatch.setattr(kernels_ahead, "_looking", [])
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", kinds)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["one", "two", "broken"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: sorted(found))
    with inductor_config.patch(max_fusion_size=7):
        look_for_vectors()
        look_for_vectors()
        answer: Any = cpu_vec_isa.valid_vec_isa_list()  # configurations may be of the process
    assert answer == ["broken", "one two"]
    assert found == {"broken": 7, "one two": 7}


def test_where_inductor_asks_for_no_kind_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    find = cpu_vec_isa.valid_vec_isa_list
    monkeypatch.setattr(kernels_ahead, "_looking", [])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", list)
    look_for_vectors()
    assert cpu_vec_isa.valid_vec_isa_list is find
    assert not kernels_ahead._looking


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
    assert kernels_ahead._kinds(cpu_vec_isa) == valid


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
