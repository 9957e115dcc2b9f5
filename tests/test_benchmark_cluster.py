"""Plans for a cluster on paper: the order of a stage, what it holds, and a tiny one as a whole."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from benchmarks import cluster
from benchmarks.cluster_model import Job
from fxremat.compat.absent.pretending import has_triton

TINY = Job(
    layers=4, width=64, heads=4, kv_heads=2, hidden=128, words=256, tokens=32, sequences=2,
    micro_batches=3, shards=2, tensor=2, stages=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "micro_batches", "expected"),
    [(0, 6, "FFFFBFBFBBBB"), (2, 6, "FFBFBFBFBFBB"), (3, 6, "FBFBFBFBFBFB"), (0, 2, "FFBB")],
)
def test_the_order_of_a_stage_under_1f1b(stage: int, micro_batches: int, expected: str) -> None:
    """Where there are fewer micro-batches than stages, all wait."""
    order = cluster.order_of(stage, 4, micro_batches)
    assert order == tuple((each == "F", 0) for each in expected)


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="an absent card needs triton")
def test_stages_of_a_tiny_job() -> None:
    budget, stages = cluster.stages_of(TINY)
    assert [stage.in_flight for stage in stages] == [2, 1]
    for stage in stages:
        plain, checkpointed, ours = (stage.ways[way] for way in cluster.WAYS)
        assert plain is not None
        assert checkpointed is not None
        assert ours is not None
        assert stage.resident_bytes < checkpointed.peak_bytes < plain.peak_bytes
        assert stage.least_bytes <= ours.peak_bytes <= budget
        assert plain.time_us < checkpointed.time_us
        assert ours.time_us <= plain.time_us  # all fits
    *_, whole = cluster.lines(TINY, budget, stages)
    assert whole[0] == "all"
    assert not torch.distributed.is_initialized()
