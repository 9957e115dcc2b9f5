"""What a training case is: models, a batch, and what one iteration does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., None]
"""Forward and backward of one iteration, given the compiled models."""


@dataclass(frozen=True)
class Case:
    """Models in training mode, their batch, and one iteration: forward and backward.

    ``run`` is called with the compiled models in the order of ``models`` and leaves gradients in
    their parameters. ``held`` is what else lives on the device: the batch.
    """

    models: tuple[nn.Module, ...]
    run: Run
    held: tuple[Any, ...]


def backward(loss: Tensor) -> None:
    """Take the gradients of a loss."""
    loss.backward()  # type: ignore[no-untyped-call]


def with_loss(model: nn.Module, *batch: Tensor) -> Case:
    """A model that returns its loss."""

    def run(model: Callable[..., Tensor]) -> None:
        backward(model(*batch))

    return Case((model,), run, batch)


def from_hub(model: nn.Module, *, autocast: bool = False, **batch: Any) -> Case:
    """A model of transformers: its output carries the loss beside logits and other results."""

    def run(model: Callable[..., Any]) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        backward(loss)

    return Case((model,), run, tuple(batch.values()))


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules that stand beside another one of their class in a list, the outermost ones.

    They are what users checkpoint: the layers of a Transformer, the blocks of a stage.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        children = list(module.children())
        kinds = [type(child) for child in children]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        for child, kind in zip(children, kinds, strict=True):
            if is_list and kinds.count(kind) > 1 and any(True for _ in child.children()):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def checkpoint_blocks(models: Sequence[nn.Module]) -> int:
    """Have each repeated block run under torch's checkpoint; how many there are."""
    from torch.utils.checkpoint import checkpoint

    blocks = [block for model in models for block in repeated_blocks(model)]
    for block in blocks:
        block.forward = _checkpointed(block.forward, checkpoint)
    return len(blocks)


def _checkpointed(forward: Callable[..., Any], checkpoint: Callable[..., Any]) -> Any:
    def run(*positional: Any, **named: Any) -> Any:
        return checkpoint(forward, *positional, use_reentrant=False, **named)

    return run


Cases = Mapping[str, Callable[[], Case]]
