"""The repeated blocks of a model, and checkpointing of each, as trainers offer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: object) -> list[nn.Module]:
    """The modules of one class, in one list, that have the most weights together.

    Lists are `torch.nn.ModuleList` and `torch.nn.Sequential` of two blocks and more.
    """
    lists = [m for m in _modules(model) if isinstance(m, (nn.ModuleList, nn.Sequential))]
    groups = [list(one) for one in lists if len(one) > 1 and len(set(map(type, one))) == 1]
    return max(groups, key=_weights, default=[])


def _modules(model: object) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _weights(blocks: list[nn.Module]) -> int:
    return sum(weight.numel() for block in blocks for weight in block.parameters())


@contextmanager
def checkpointed(model: object) -> Iterator[int]:
    """Inside, each block keeps only its inputs and runs again in the backward; yields how many."""
    blocks = repeated_blocks(model)
    for block in blocks:
        own: Callable[..., Any] = block.forward
        block.forward = partial(checkpoint, own, use_reentrant=False)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.forward
