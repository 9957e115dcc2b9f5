"""A strided tensor as one run of memory, which a copy moves whole.

From the first element to the last, gaps included: so every layout arrives as it left, transposed,
sliced or expanded, and the copy is one contiguous one.
"""

from __future__ import annotations

import torch


def check_copyable(x: torch.Tensor) -> None:
    """ValueError unless the bytes of ``x``, with its strides, are all there is to it."""
    if x.layout != torch.strided:
        raise ValueError(
            f"only strided tensors can be copied to host memory and back, not {x.layout}"
        )


def extent(x: torch.Tensor) -> int:
    """Elements from the first to the last in memory, 0 if there is none."""
    if x.numel() == 0:
        return 0
    sizes = zip(x.size(), x.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def extent_bytes(x: torch.Tensor) -> int:
    """Bytes from the first element to the last; those of the elements if ``x`` has no gaps."""
    return extent(x) * x.element_size()


def run_of_memory(x: torch.Tensor) -> torch.Tensor:
    """The elements from the first to the last in memory, as a view with one dimension."""
    return x.as_strided((extent(x),), (1,))


def storage_address(x: torch.Tensor) -> int:
    """Where the storage of ``x`` begins, equal for tensors that share one."""
    return x.untyped_storage().data_ptr()
