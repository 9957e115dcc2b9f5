"""Memory in which Triton kernels are tuned when they run for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tuned_below_the_peak() -> Iterator[None]:
    """Inside, kernels are written to be tuned without new memory, but for a cache to flush.

    Each run that is timed gets copies of what the kernel overwrites. Where these would exceed what
    has been allocated before, Inductor keeps one in host memory instead: so it does in the backward
    and for inference, but not in the forward of a training step.
    """
    from torch._inductor.codegen import triton

    kernels: Any = triton.TritonKernel
    before = kernels.__dict__["inductor_meta_common"]

    def more(cls: Any) -> dict[str, Any]:
        return {**before.__func__(cls), "optimize_mem": True}

    kernels.inductor_meta_common = classmethod(more)
    try:
        yield
    finally:
        kernels.inductor_meta_common = before
