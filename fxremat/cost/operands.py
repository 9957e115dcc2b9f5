"""What an op is given when it runs, by its node: tensors in the layout that they will have.

In the joint graph they lie as torch's eager ops would give them. Inductor may lay images out with
the channels last, and convolutions then take a fraction of the time, and other scratch memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.runtime.chunks import convolutions

_ATEN = torch.ops.aten
_LAID_OUT = {
    _ATEN.convolution.default: (0, 1),  # a weight is copied, too
    _ATEN.convolution_backward.default: (0, 1),
    convolutions.CONVOLUTION: (0, 1),
    convolutions.CONVOLUTION_BACKWARD: (0, 1),
}
"""Which operands Inductor lays out."""
_IMAGES = 4  # dimensions: batch, channels, height, width


def operands(node: fx.Node, *, images_last: bool) -> tuple[Any, Any]:
    """Arguments with the tensors (and symbols) that the nodes among them stand for.

    With ``images_last`` those of convolutions have their channels last.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if not images_last or node.target not in _LAID_OUT:
        return args, kwargs
    places = _LAID_OUT[node.target]
    given = [_laid_out(one) if place in places else one for place, one in enumerate(args)]
    return tuple(given), kwargs


def _laid_out(given: Any) -> Any:
    if not isinstance(given, torch.Tensor) or given.dim() != _IMAGES:
        return given
    return torch.empty_like(given, memory_format=torch.channels_last)
