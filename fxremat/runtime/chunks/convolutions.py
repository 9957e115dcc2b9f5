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
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxremat.runtime.kernels import Inside, LibraryCall, define, pieces

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


def _put(
    whole: torch.Tensor | None, count: int, at: tuple[int, int], part: torch.Tensor
) -> torch.Tensor:
    """The results of ``count`` images, those of a part put in; laid out as these are."""
    if whole is None:
        shape = (count, *part.shape[1:])
        form = torch.contiguous_format
        if not part.is_contiguous() and part.dim() in (4, 5):
            form = torch.channels_last if part.dim() == 4 else torch.channels_last_3d
        whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=form)
    whole[slice(*at)].copy_(part)
    return whole


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """A sum over parts, which rounds to the type of the parts once, at the end."""
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return total.add_(part)


def _convolution(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    *how, images, algorithm = how  # type: ignore[assignment]
    whole: torch.Tensor | None = None
    with _asked_for(algorithm):
        if images >= len(given):
            return _ATEN.convolution.default(given, weight, bias, *how)  # type: ignore[no-any-return]
        for at in pieces(len(given), images):
            made = _ATEN.convolution.default(given[slice(*at)], weight, bias, *how)
            whole = _put(whole, len(given), at, made)
            del made
    assert whole is not None
    return whole


def _fake_convolution(*args: Any) -> torch.Tensor:
    found: torch.Tensor = _ATEN.convolution.default(*args[:-2])
    return found


def _convolution_backward(
    gradient: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, ...]:
    *how, mask, images, algorithm = how  # type: ignore[assignment]
    backward, count = _ATEN.convolution_backward.default, len(given)
    found: list[torch.Tensor | None] = [None, None, None]
    with _asked_for(algorithm):
        if images >= count:
            return _without_none(backward(gradient, given, weight, *how, mask), given)
        for at in pieces(count, images):
            part = slice(*at)
            results = backward(gradient[part], given[part], weight, *how, mask)
            if mask[0]:
                found[0] = _put(found[0], count, at, results[0])
            for place in (1, 2):
                if mask[place]:
                    found[place] = _added(found[place], results[place])
            del results
    dtype = gradient.dtype
    return _without_none([None if one is None else one.to(dtype) for one in found], given)


def _without_none(
    results: Sequence[torch.Tensor | None], like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """An operator returns tensors only: an empty one for what is not wanted."""
    return tuple(like.new_empty(0) if result is None else result for result in results)


def _inside(*args: Any, **_: Any) -> Inside:
    """Each part is computed and copied; a native call writes and reads columns image by image."""
    given, weight, result = *args[:2], _fake_convolution(*args)
    sides = (result, given) if args[6] else (given, result)
    return _of(_ATEN.convolution.default, args, (0,), sides, weight, result.nbytes, matmuls=1)


def _inside_gradients(*args: Any, **_: Any) -> Inside:
    """Like `_inside`; the gradient of the weight is read and written by each part."""
    gradient, given, weight, (mask, images, _) = *args[:3], args[-3:]
    sides = (gradient, given) if args[7] else (given, gradient)
    target, copied = _ATEN.convolution_backward.default, given.nbytes if mask[0] else 0
    found = _of(target, args, (0, 1), sides, weight, copied, matmuls=sum(mask[:2]))
    added = 2 * (len(pieces(len(given), images)) - 1) * weight.nbytes * mask[1]
    return found + Inside(0, 0, added)


def _of(
    target: Any, args: Sequence[Any], with_images: Sequence[int],
    sides: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, copied: int, *, matmuls: int,
) -> Inside:  # fmt: skip
    """Of a call in parts; ``with_images`` are the places of arguments of which each has its own.

    Columns are all patches: a kernel full of the channels of one side for each place of the other.
    No library's calls are named where another algorithm than the usual is asked for.
    """
    *usual, images, algorithm = args
    wide, places = sides
    parts = len(pieces(len(wide), images))
    found = Inside(parts, 0)
    if parts > 1:
        found += Inside(parts, 2 * copied, (parts - 1) * weight.nbytes)
    if algorithm == "native":
        patch = wide.shape[1] * prod(weight.shape[2:]) * wide.dtype.itemsize
        columns = len(wide) * prod(places.shape[2:]) * patch
        found += Inside(2 * matmuls * len(wide), 0, 2 * matmuls * columns)
    if not algorithm:
        for place in with_images:
            usual[place] = args[place][:images]
        found += Inside(0, 0, library=(LibraryCall(target, tuple(usual), parts),))
    return found


def _flops(of: Any, *args: Any, out_val: Any = None, **_: Any) -> int:
    return int(flop_registry[of](*args[:-2], out_val=out_val))


_HOW = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,"
    " SymInt[] output_padding, SymInt groups"
)
CONVOLUTION = define(
    f"(Tensor input, Tensor weight, Tensor? bias, {_HOW}, int images, str algorithm) -> Tensor",
    _fake_convolution,
    flops=partial(_flops, _ATEN.convolution),
    inside=_inside,
)(_convolution)
"""``aten.convolution`` by ``algorithm``, of ``images`` images at a time."""

CONVOLUTION_BACKWARD = define(
    f"(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_HOW},"
    " bool[3] output_mask, int images, str algorithm) -> (Tensor, Tensor, Tensor)",
    lambda *args: _without_none(_ATEN.convolution_backward.default(*args[:-2]), args[1]),
    flops=partial(_flops, _ATEN.convolution_backward),
    inside=_inside_gradients,
)(_convolution_backward)
"""``aten.convolution_backward`` so; the result that is not wanted is empty."""
