"""What Dynamo knows of the graph that is being compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo ended the graph because it could not go on, so that another follows."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def current_frame() -> int:
    """The number of the frame that Dynamo is compiling; graphs of one frame replace each other."""
    from torch._guards import CompileContext

    identifier = CompileContext.current_compile_id()
    frame = getattr(identifier, "frame_id", None)
    return -1 if frame is None else int(frame)


@contextmanager
def fresh_dynamo_caches() -> Iterator[None]:
    """Compilations inside are not counted against the recompile limit outside."""
    import torch._dynamo.config as dynamo_config

    with dynamo_config.patch(recompile_limit=64):
        yield


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Have Dynamo trace a dimension as a symbol; it fails where the model fixes the size."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dimension)
