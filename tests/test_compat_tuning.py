"""Memory in which kernels are tuned."""

from __future__ import annotations

import pytest
from torch._inductor.codegen.triton import TritonKernel

from fxremat import compat


@pytest.mark.skipif(not compat.has_triton(), reason="asks Triton for its version")
def test_tuned_below_the_peak() -> None:
    before = TritonKernel.inductor_meta_common()
    with compat.tuned_below_the_peak():
        assert TritonKernel.inductor_meta_common() == {**before, "optimize_mem": True}
        with compat.tuned_below_the_peak():
            pass
        assert TritonKernel.inductor_meta_common()["optimize_mem"] is True
    assert TritonKernel.inductor_meta_common() == before
