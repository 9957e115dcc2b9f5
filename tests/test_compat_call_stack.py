"""What is running: the modules whose call it is in."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.compat.dynamo import calling_modules


def test_modules_whose_call_is_running() -> None:
    seen: list[dict[torch.nn.Module, Any]] = []

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(calling_modules())
            return x

    inner = Inner()
    outer = torch.nn.Sequential(torch.nn.Identity(), inner)
    x = torch.ones(1)
    outer(x)
    (found,) = seen
    assert list(found) == [outer, inner]
    assert all(given is x for (given,) in found.values())
    assert calling_modules() == {}
