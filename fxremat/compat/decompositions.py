"""The operators that Inductor takes apart before it lowers a graph."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table; some of its functions look up lowerings, which nothing else may import."""
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")
    return dict(select_decomp_table())
