"""Mixed precision on the CPU: oneDNN's scratch memory in 16 bits is counted, bytes are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxremat
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_call
from tests.small import Stack, seeded

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scratch_of_a_matmul(dtype: torch.dtype) -> None:
    x, y = (torch.randn(1024, 64).to(dtype) for _ in range(2))
    out = torch.empty(64, 64, dtype=dtype)
    taken = measure_call(lambda: torch.mm(x.t(), y, out=out), torch.device("cpu"))
    spaces = Workspaces(torch.device("cpu"))
    assert spaces.of_call(torch.ops.aten.mm.out, (x.t(), y), {"out": out}) == taken
    assert spaces.of_call(torch.ops.aten.mm.default, (x.t(), y), {}) == taken


@pytest.mark.slow
def test_the_predicted_peak_is_the_measured_one() -> None:
    model, x = seeded(lambda: Stack(2), 4096, 32)

    def compiled(**options: Any) -> Any:
        torch._dynamo.reset()
        made = torch.compile(model, backend="fxremat", options=options)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = made(x)
            loss.backward()
            model.zero_grad()

        step()
        return step

    compiled()
    (full,) = fxremat.reports()
    step = compiled(memory_budget=int(0.7 * full.store_all_peak_bytes), variants="none")
    (report,) = fxremat.reports()
    measured = fxremat.measure_peak(step, held=(model, x))
    assert report.predicted_peak_bytes == measured.peak_bytes
