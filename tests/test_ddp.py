"""DDP: its buckets are counted, and the graphs that it splits share one budget."""

from __future__ import annotations

from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxremat
from fxremat.compat.backward import backward_drops_gradients
from fxremat.compat.dynamo import splits_for_ddp
from fxremat.compile import session
from fxremat.report.report import Report
from fxremat.sizes import MIB
from tests.graphs import Net

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from tests.ranks import LEAST, PERCENTS, Blocks, Found, Trained, compared, kept, on_ranks

BUDGET = 16 * MIB
RANKS, WIDTH = 2, 128


def layers() -> nn.Module:
    """Each layer's weights fill a bucket of 1 MiB."""
    return Net(
        lambda net, x: reduce(lambda x, layer: F.gelu(layer(x)), net.layers, x).square().mean(),
        layers=nn.ModuleList(nn.Linear(600, 600) for _ in range(3)),
    )


def split_reports(executor: str, rows: int) -> tuple[list[Report], int, int]:
    """Of the parts of a graph, which share the budget, bytes of DDP's buckets, and the peak."""
    own = layers()
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


@pytest.mark.usefixtures("only_rank")
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


@pytest.mark.usefixtures("only_rank")
def test_parts_that_cannot_be_looked_at_are_planned_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then each counts the whole peaks of those before it, and the next step is planned as one."""

    def fail() -> Any:
        raise RuntimeError("no memory to look into")

    monkeypatch.setattr("fxremat.step.context.parts_split_for_ddp", fail)
    reports, buckets, measured = split_reports("aot_eager", 128)
    assert measured <= BUDGET
    assert "planned one by one: no memory to look into" in caplog.text
    own = [report.predicted_peak_bytes - report.held_bytes for report in reports[:3]]
    assert buckets + sum(own) <= BUDGET


# --- two ranks ----------------------------------------------------------------------------


class Parallel(Trained):
    """One rank's copy of a model in DDP, with small buckets."""

    def __init__(self, rank: int, way: str, split: bool, views: bool, **how: Any) -> None:
        torch._dynamo.config.optimize_ddp = split
        torch.manual_seed(0)
        self.model = Blocks(4, WIDTH)
        parallel = nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=1, gradient_as_bucket_view=views
        )
        self.compile(parallel, way, **how)
        numbers = torch.Generator().manual_seed(rank)
        self.x = torch.randn(16, 32, WIDTH, generator=numbers)

    def beside_bytes(self) -> int:
        """Of the buckets, which hold each gradient."""
        return sum(p.nbytes for p in self.model.parameters())


def parallel(
    rank: int, way: str, split: bool, views: bool, percents: tuple[int, ...]
) -> dict[str, Found]:
    exactly = not split or backward_drops_gradients()
    return {way: compared(partial(Parallel, rank, way, split, views), percents, exactly=exactly)}


SLOW: list[tuple[str, bool, bool, tuple[int, ...]]] = [
    ("the whole", False, False, PERCENTS),
    ("the whole", True, True, PERCENTS),
    ("the whole", True, False, (70,)),
    ("each block", False, True, (LEAST,)),
]


@pytest.mark.parametrize(
    ("way", "split", "views", "percents"),
    [
        ("each block", False, True, (60,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_each_rank_keeps_its_budget_with_the_buckets(
    tmp_path: Path, way: str, split: bool, views: bool, percents: tuple[int, ...]
) -> None:
    work = partial(parallel, way=way, split=split, views=views, percents=percents)
    kept(on_ranks(RANKS, tmp_path, work))
