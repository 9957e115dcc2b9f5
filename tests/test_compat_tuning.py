"""Memory in which kernels are tuned."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.codegen import triton

from fxremat import compat

TritonKernel: Any = triton.TritonKernel


def test_tuned_below_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own answer needs a card."""
    assert isinstance(TritonKernel.__dict__["inductor_meta_common"], classmethod)
    mine = classmethod(lambda cls: {"optimize_mem": False, "name": cls.__name__})
    monkeypatch.setattr(TritonKernel, "inductor_meta_common", mine)
    expected = {"optimize_mem": True, "name": "TritonKernel"}
    with compat.tuned_below_the_peak():
        assert TritonKernel.inductor_meta_common() == expected
        with compat.tuned_below_the_peak():
            pass
        assert TritonKernel.inductor_meta_common() == expected
    assert TritonKernel.__dict__["inductor_meta_common"] is mine
