"""What models of transformers do that would end a graph, and that training can do without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fxremat.compat.dynamo import leave_out_logs


class NoLayerDrop(float):
    """0, of which it is known that no probability is below it, whatever number was drawn.

    In training these models draw a number for each layer and leave it out where that is less than
    ``layerdrop``. Dynamo ends a graph where the value of a tensor decides; here none does.
    """

    def __gt__(self, drawn: object) -> bool:
        return False if isinstance(drawn, Tensor) else super().__gt__(drawn)  # type: ignore[operator]


def keep_graphs_whole(models: Iterable[nn.Module], transformers_logging: Any) -> None:
    """Leave out what the module ``transformers.utils.logging`` logs once, and LayerDrops of 0."""
    leave_out_logs([transformers_logging.warning_once, transformers_logging.info_once])
    modules = {each for model in models for each in model.modules()}
    several: list[Any] = [*modules, *(getattr(each, "config", None) for each in modules)]
    for one in several:
        if isinstance(drop := getattr(one, "layerdrop", None), int | float) and drop == 0:
            one.layerdrop = NoLayerDrop()
