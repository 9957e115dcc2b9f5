"""Convolutions with less scratch memory: a few images at a time, or by another algorithm.

A library may lay all patches of a batch out as columns, or transform what it is given first. Such
scratch memory grows with the number of images, so a part of the batch needs a part of it. Images
do not depend on each other; the gradients of weight and bias are the sums of those of the parts,
added up in at least 32 bits.

On CUDA some algorithms can be asked for: those whose results are the same every time
("deterministic"), and torch's own, a matmul for each image ("native"). All others are cuDNN's to
choose. No GPU has run these yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxremat.runtime import kernels
from fxremat.runtime.chunks.call import pieces
from fxremat.runtime.kernels import Inside, LibraryCall

_ATEN = torch.ops.aten


@contextmanager
def _asked_for(algorithm: str) -> Iterator[None]:
    """cuDNN's flags while a call runs."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.deterministic
    if algorithm == "native":
        cudnn.enabled = False
    elif algorithm == "deterministic":
        cudnn.deterministic = True
    try:
        yield
    finally:
        if algorithm:
            cudnn.enabled, cudnn.deterministic = before


def _parts(count: int, images: int) -> list[slice]:
    return [slice(*ends) for ends in pieces(count, images)]


def _like(part: torch.Tensor, count: int) -> torch.Tensor:
    """Room for the results of ``count`` images, in the layout of those of a part."""
    shape = (count, *part.shape[1:])
    if part.is_contiguous() or part.dim() not in (4, 5):
        return part.new_empty(shape)
    last = torch.channels_last if part.dim() == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=last)


class _Whole:
    """The results of all parts, one part after the other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.result: torch.Tensor | None = None

    def put(self, at: slice, part: torch.Tensor) -> None:
        if self.result is None:
            self.result = _like(part, self.count)
        self.result[at].copy_(part)


class _ImageSum:
    """A sum over parts; it rounds to the type of the parts once, at the end."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.dtype = torch.float32

    def add(self, part: torch.Tensor) -> None:
        if self.total is None:
            self.dtype = part.dtype
            self.total = part.to(torch.promote_types(part.dtype, torch.float32))
        else:
            self.total.add_(part)

    @property
    def result(self) -> torch.Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)


def _convolution(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    *how, images, algorithm = how  # type: ignore[assignment]
    whole = _Whole(len(given))
    with _asked_for(algorithm):
        if images >= len(given):
            return _ATEN.convolution.default(given, weight, bias, *how)  # type: ignore[no-any-return]
        for part in _parts(len(given), images):
            whole.put(part, _ATEN.convolution.default(given[part], weight, bias, *how))
    assert whole.result is not None
    return whole.result


def _fake_convolution(*args: Any) -> torch.Tensor:
    found: torch.Tensor = _ATEN.convolution.default(*args[:-2])
    return found


def _gradients(
    gradient: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, ...]:
    *how, mask, images, algorithm = how  # type: ignore[assignment]
    count = len(given)
    with _asked_for(algorithm):
        if images >= count:
            found = _ATEN.convolution_backward.default(gradient, given, weight, *how, mask)
            return _without_none(found, given)
        of_input, of_weight, of_bias = _Whole(count), _ImageSum(), _ImageSum()
        for part in _parts(count, images):
            results = _ATEN.convolution_backward.default(
                gradient[part], given[part], weight, *how, mask
            )
            if mask[0]:
                of_input.put(part, results[0])
            for total, wanted, result in zip(
                (of_weight, of_bias), mask[1:], results[1:], strict=True
            ):
                if wanted:
                    total.add(result)
            del results
    return _without_none((of_input.result, of_weight.result, of_bias.result), given)


def _without_none(
    results: Sequence[torch.Tensor | None], like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """An operator returns tensors only: an empty one for what is not wanted."""
    return tuple(like.new_empty(0) if result is None else result for result in results)


def _fake_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    return _without_none(_ATEN.convolution_backward.default(*args[:-2]), args[1])


def _columns(wide: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes of all patches as columns: a kernel full of the channels of one side for each place
    of the other."""
    patch = wide.shape[1] * prod(weight.shape[2:])
    return len(wide) * prod(places.shape[2:]) * patch * wide.dtype.itemsize


def _inside(*args: Any, on_cpu: bool, by_inductor: bool = False) -> Inside:
    """Each part is computed and copied; a native call writes and reads columns image by image."""
    del on_cpu, by_inductor
    given, weight, (images, algorithm) = args[0], args[1], args[-2:]
    result = _fake_convolution(*args)
    wide, places = (result, given) if args[6] else (given, result)
    found = _of(wide, places, weight, images, algorithm, copied=result.nbytes, matmuls=1)
    return found + _library(_ATEN.convolution.default, args, (0,))


def _inside_gradients(*args: Any, on_cpu: bool, by_inductor: bool = False) -> Inside:
    """Like `_inside`; the gradient of the weight is read and written by each part."""
    del on_cpu, by_inductor
    gradient, given, weight, (mask, images, algorithm) = *args[:3], args[-3:]
    copied = given.nbytes if mask[0] else 0
    wide, places = (gradient, given) if args[7] else (given, gradient)
    matmuls = sum(mask[:2])
    found = _of(wide, places, weight, images, algorithm, copied=copied, matmuls=matmuls)
    added = 2 * (len(pieces(len(given), images)) - 1) * weight.nbytes * mask[1]
    return found + Inside(0, 0, added) + _library(_ATEN.convolution_backward.default, args, (0, 1))


def _library(target: Any, args: Sequence[Any], with_images: Sequence[int]) -> Inside:
    """The calls of the parts; none are named where another algorithm than the usual is asked for.

    ``with_images`` are the places of the arguments that have a part's images only.
    """
    *usual, images, algorithm = args
    if algorithm:
        return Inside(0, 0)
    parts = len(pieces(len(args[0]), images))
    for place in with_images:
        usual[place] = args[place][:images]
    return Inside(0, 0, library=(LibraryCall(target, tuple(usual), parts),))


def _of(
    wide: torch.Tensor, places: torch.Tensor, weight: torch.Tensor, images: int, algorithm: str,
    *, copied: int, matmuls: int,
) -> Inside:  # fmt: skip
    count = len(wide)
    parts = len(pieces(count, images))
    found = Inside(parts, 0)
    if parts > 1:
        found += Inside(parts, 2 * copied, (parts - 1) * weight.nbytes)
    if algorithm == "native":
        moved = 2 * matmuls * _columns(wide, places, weight)
        found += Inside(2 * matmuls * count, 0, moved)
    return found


def _flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    found: int = flop_registry[_ATEN.convolution](*args[:-2], out_val=out_val)
    return found


def _flops_of_gradients(*args: Any, out_val: Any = None, **_: Any) -> int:
    found: int = flop_registry[_ATEN.convolution_backward](*args[:-2], out_val=out_val)
    return found


_HOW = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,"
    " SymInt[] output_padding, SymInt groups"
)
CONVOLUTION = kernels.define(
    "convolution",
    f"(Tensor input, Tensor weight, Tensor? bias, {_HOW}, int images, str algorithm) -> Tensor",
    _convolution,
    _fake_convolution,
    flops=_flops,
    inside=_inside,
)
"""``aten.convolution`` by ``algorithm``, of ``images`` images at a time."""

CONVOLUTION_BACKWARD = kernels.define(
    "convolution_backward",
    f"(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_HOW},"
    " bool[3] output_mask, int images, str algorithm) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
    flops=_flops_of_gradients,
    inside=_inside_gradients,
)
"""``aten.convolution_backward`` so; the result that is not wanted is empty."""
