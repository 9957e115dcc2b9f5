"""Models whose graphs DDP splits: they share one budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxremat
from fxremat.compat.backward import backward_drops_gradients
from fxremat.compat.dynamo import splits_for_ddp
from fxremat.compat.ranks import parts_split_for_ddp
from fxremat.compile import session
from fxremat.report.report import Report
from fxremat.sizes import MIB

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

BUDGET = 16 * MIB


class Layers(nn.Module):
    """Each layer's weights fill a bucket of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[None]:
    """The only rank of a job."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch.distributed.destroy_process_group()


def split_reports(executor: str, rows: int) -> tuple[list[Report], int, int]:
    """Of the parts of a graph, which share the budget, bytes of DDP's buckets, and the peak."""
    own = Layers()
    model = nn.parallel.DistributedDataParallel(own, bucket_cap_mb=1, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"memory_budget": BUDGET, "executor": executor, "solver": "greedy"}
    assert not splits_for_ddp()
    call: Any = torch.compile(model, backend="fxremat", options=options)
    x = torch.randn(rows, 600)

    def step() -> None:
        own.zero_grad(set_to_none=True)
        call(x).backward()

    for _ in range(3):
        step()
    own.zero_grad(set_to_none=True)
    buckets = sum(p.nbytes for p in own.parameters())
    peak = fxremat.measure_peak(step, held=(own, x)).peak_bytes + buckets
    reports = fxremat.reports()
    assert len(reports) > 1
    return reports, buckets, peak


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    "executor", [pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"]
)
def test_parts_of_a_split_graph_are_planned_together(executor: str) -> None:
    """One step of all of them, before the first is compiled: no part counts the peak of another."""
    reports, buckets, measured = split_reports(executor, 512)
    (predicted,) = {report.step_peak_bytes for report in reports}
    assert predicted is not None
    assert measured <= predicted <= BUDGET
    if backward_drops_gradients():
        assert measured == pytest.approx(predicted, rel=0.001)
    own = [report.counted_peak_bytes - report.held_bytes for report in reports]
    assert predicted < buckets + sum(own)
    assert len({id(seen) for seen, _ in session.STATE.seen.values()}) == 1
    assert [index for _, index in session.STATE.seen.values()] == [*range(len(reports))]


@pytest.mark.usefixtures("rank")
def test_parts_that_cannot_be_looked_at_are_planned_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then each counts the whole peaks of those before it, and the next step is planned as one."""

    def fail() -> Any:
        raise RuntimeError("no memory to look into")

    monkeypatch.setattr("fxremat.step.ddp.parts_split_for_ddp", fail)
    reports, buckets, measured = split_reports("aot_eager", 128)
    assert measured <= BUDGET
    assert "planned one by one: no memory to look into" in caplog.text
    own = [report.predicted_peak_bytes - report.held_bytes for report in reports[:3]]
    assert buckets + sum(own) <= BUDGET


@pytest.mark.usefixtures("rank")
def test_parts_are_those_that_a_backend_is_given() -> None:
    """Code, sizes, and which inputs are parameters; all of them when the first is compiled."""
    shown, given = list[tuple[str, ...]](), list[str]()

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        parts = parts_split_for_ddp()
        shown.append(tuple(session.signature(*part) for part in parts))
        given.append(session.signature(gm, inputs))
        if parts:
            parameters = [isinstance(x, nn.Parameter) for _, each in parts for x in each]
            assert sum(parameters) == len(list(Layers().parameters()))
        return gm.forward

    model = nn.parallel.DistributedDataParallel(Layers(), bucket_cap_mb=1)
    torch.compile(model, backend=backend)(torch.randn(128, 600)).backward()
    assert len(given) > 1
    assert shown == [tuple(given)] + [()] * (len(given) - 1)
    assert parts_split_for_ddp() == []
