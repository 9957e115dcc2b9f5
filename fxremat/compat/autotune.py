"""Memory in which Triton kernels are tuned when they run for the first time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

_MARK = "fxremat"
"""In what Inductor notes of a kernel: tuned without more memory than the step has."""


@contextmanager
def tuned_in_the_step() -> Iterator[None]:
    """Inside, kernels are written to be tuned where the step has room, but for a cache to flush.

    Each run that is timed gets copies of what the kernel overwrites. In the backward and for
    inference Inductor keeps a copy in host memory where it would exceed what has been allocated
    before, but not in the forward of a training step; and what was allocated at most may be in
    other pieces now. So copies of these kernels are made on the device only where a free piece of
    the allocator is as large, and the cache is flushed in a pool of its own if there is none for it
    (`tune_in_the_step`).
    """
    from torch._inductor.codegen import triton

    tune_in_the_step()
    kernels: Any = triton.TritonKernel
    before = kernels.__dict__["inductor_meta_common"]

    def more(cls: Any) -> dict[str, Any]:
        return {**before.__func__(cls), "optimize_mem": True, _MARK: True}

    kernels.inductor_meta_common = classmethod(more)
    try:
        yield
    finally:
        kernels.inductor_meta_common = before


def tune_in_the_step() -> None:
    """Have Inductor tune marked kernels so, in this process; others as ever."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner: Any = CachingAutotuner
    if hasattr(tuner.benchmark_all_configs, _MARK):
        return
    benchmark, copy = tuner.benchmark_all_configs, tuner.copy_args_to_cpu_if_needed

    @wraps(benchmark)
    def benchmark_in_the_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None or not self.inductor_meta.get(_MARK):
            return benchmark(self, *args, **kwargs)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        if take_piece(free_pieces(device), cache):
            return benchmark(self, *args, **kwargs)
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            return benchmark(self, *args, **kwargs)

    @wraps(copy)
    def copy_to_the_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None or not self.inductor_meta.get(_MARK):
            return copy(self, *args, **kwargs)
        pieces = free_pieces(device)
        if not take_piece(pieces, torch.cuda.get_device_properties(device).L2_cache_size):
            pieces = []  # the pool is for the cache alone
        named = [*zip(self.fn.arg_names, args, strict=False), *kwargs.items()]
        return {
            name: (arg, _on_host(arg))
            for name, arg in named
            if name in self.mutated_arg_names and isinstance(arg, torch.Tensor) and arg.is_cuda
            if not take_piece(pieces, storage_length(arg) * arg.element_size())
        }

    setattr(benchmark_in_the_step, _MARK, True)
    tuner.benchmark_all_configs = benchmark_in_the_step
    tuner.copy_args_to_cpu_if_needed = copy_to_the_host


def free_pieces(device: torch.device) -> list[int]:
    """The bytes of each free piece that the allocator has, in order."""
    snapshot: Any = torch.cuda.memory_snapshot
    index = torch.cuda.current_device() if device.index is None else device.index
    return sorted(
        block["size"]
        for segment in snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )


def take_piece(pieces: list[int], nbytes: int) -> bool:
    """Cut so many bytes from the smallest piece that has them; false where there is none."""
    place = bisect_left(pieces, nbytes)
    if place == len(pieces):
        return False
    insort(pieces, pieces.pop(place) - nbytes)
    return True


def storage_length(tensor: torch.Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _device_of(values: tuple[Any, ...]) -> torch.device | None:
    """The GPU that the arguments of a kernel lie on."""
    return next((x.device for x in values if isinstance(x, torch.Tensor) and x.is_cuda), None)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's storage in pinned host memory."""
    flat = tensor.as_strided((storage_length(tensor),), (1,))
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)
