"""Gradients of convolutions, written as convolutions."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxremat.passes.nodes import fake


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def of_input(node: fx.Node) -> tuple[Any, ...]:
    """What follows gradient, weight and bias in the convolution that gives an input's gradient.

    It is transposed where the one of ``node`` (a call of convolution_backward) is not, and not
    where it is. Along each axis the result of a transposed one has
    (o - 1) s - 2 p + d (k - 1) + 1 + output_padding elements.
    """
    gradient, given, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    out, size, kernel = ([*fake(n).shape[2:]] for n in (gradient, given, weight))  # type: ignore[arg-type]
    steps, pads, gaps = map(_numbers, (stride, padding, dilation))
    short = [0] * len(size)
    if not transposed:
        short = [
            size[i] - ((out[i] - 1) * steps[i] - 2 * pads[i] + gaps[i] * (kernel[i] - 1) + 1)
            for i in range(len(size))
        ]
    return steps, pads, gaps, not transposed, short, groups
