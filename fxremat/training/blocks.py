"""The repeated blocks of a model: checkpointing of each, as trainers offer it; fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Blocks = nn.ModuleList | nn.Sequential


def repeated_blocks(model: object) -> list[nn.Module]:
    """The modules of one class, in one list, that have the most weights together.

    Lists are `torch.nn.ModuleList` and `torch.nn.Sequential` of two blocks and more.
    """
    return list(_list_of_blocks(model) or ())


def _list_of_blocks(model: object) -> Blocks | None:
    def weights(blocks: Blocks) -> int:
        return sum(weight.numel() for block in blocks for weight in block.parameters())

    return max(_lists(model), key=weights, default=None)


def _lists(model: object) -> list[Blocks]:
    """The lists of two modules and more, all of one class."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    lists = (m for m in modules if isinstance(m, (nn.ModuleList, nn.Sequential)))
    return [one for one in lists if len(one) > 1 and len(set(map(type, one))) == 1]


def _outermost_blocks(model: object) -> list[nn.Module]:
    """The modules of all these lists, but for what lies in another such module."""
    lists = _lists(model)
    inside = {id(m) for one in lists for block in one for m in block.modules()}
    found = (block for one in lists if id(one) not in inside for block in one)
    return list(dict.fromkeys(found))


@contextmanager
def checkpointed(model: object) -> Iterator[int]:
    """Inside, each block keeps only its inputs and runs again in the backward; yields how many.

    Blocks are the modules of all lists as `repeated_blocks` looks for: a U-Net has several.
    """
    blocks = _outermost_blocks(model)
    for block in blocks:
        own: Callable[..., Any] = block.forward
        block.forward = partial(checkpoint, own, use_reentrant=False)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def shortened(model: object, count: int) -> Iterator[None]:
    """Inside, the model has only the first ``count`` of its repeated blocks.

    Raises `ValueError` where it has not so many.
    """
    blocks = _list_of_blocks(model)
    whole = blocks._modules if blocks is not None else {}
    if blocks is None or not 0 < count <= len(whole):
        raise ValueError(f"{count} of {len(whole)} blocks: there are not so many")
    blocks._modules = dict(list(whole.items())[:count])
    try:
        yield
    finally:
        blocks._modules = whole


def are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in nothing but the values of their tensors and numbers.

    Their modules are of the same classes, parameters and buffers of the same names, shapes and
    types, and other attributes of the same types; words and switches are the same. So what one
    computes is what the others do, but for numbers as that of a layer.
    """
    return len({_form(block) for block in blocks}) <= 1


def _form(block: nn.Module) -> tuple[Any, ...]:
    """What is the same for blocks that are alike."""
    return tuple(
        (name, type(one), _tensors(one), _told(one)) for name, one in block.named_modules()
    )


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    tables = sorted(module._parameters.items()), sorted(module._buffers.items())
    return tuple(
        (name, None if x is None else (tuple(x.shape), x.dtype, x.requires_grad))
        for table in tables
        for name, x in table
    )


def _told(module: nn.Module) -> tuple[Any, ...]:
    """Types of the attributes, and the values of words and switches."""
    return tuple(
        (name, type(value), value if isinstance(value, (str, bool)) else None)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
    )
