"""Few of a model's repeated blocks: kept and restored, continued to the whole, or not used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxremat.cli.fit import table
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.training.blocks import are_alike, repeated_blocks, shortened
from fxremat.whatif.extrapolation import Line, TorchSteps
from fxremat.whatif.fit import fit
from fxremat.whatif.largest_size import WAYS
from fxremat.whatif.symbolic_step import PeaksBySize, SymbolicStep

BLOCKS = 6


class _Block(nn.Module):
    """Two layers, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + hidden


class _Net(nn.Module):
    """Rows in, a number out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 512)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.last(x).float().logsumexp(-1).sum()
        return loss


def test_blocks_are_fewer_inside_and_as_before_after() -> None:
    model = _Net()
    before = list(model.blocks)
    with shortened(model, 2):
        assert list(model.blocks) == before[:2]
        with shortened(model, 1):
            assert list(model.blocks) == before[:1]
    assert list(model.blocks) == before
    with pytest.raises(RuntimeError, match="stop"), shortened(model, 3):
        raise RuntimeError("stop")
    assert repeated_blocks(model) == before
    with pytest.raises(ValueError, match="7 of 6 blocks"), shortened(model, 7):
        pass


class _Numbered(nn.Module):
    """A block with a number and a way to go."""

    def __init__(self, number: int, way: str = "full", width: int = 4) -> None:
        super().__init__()
        self.number, self.way, self.linear = number, way, nn.Linear(4, width)


def test_blocks_are_alike_but_for_values_and_numbers() -> None:
    first = _Numbered(0)
    assert are_alike([first, _Numbered(1)])
    assert not are_alike([first, _Numbered(1, "sliding")])
    assert not are_alike([first, _Numbered(1, width=5)])
    assert not are_alike([first, _Numbered(1).to(torch.bfloat16)])
    frozen = _Numbered(1)
    frozen.linear.weight.requires_grad_(False)
    assert not are_alike([first, frozen])
    buffered = _Numbered(1)
    buffered.register_buffer("mask", torch.zeros(3))
    assert not are_alike([first, buffered])


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 50), st.integers(4, 40))
def test_the_peak_is_continued_where_all_have_saved_and_where_all_have_gradients(
    saved: int, left: int, scratch: int, whole: int
) -> None:
    """Of a step whose blocks are all the same, every number is met."""

    def shown(blocks: int) -> DryRun:
        forward = [100 + saved * (k + 1) for k in range(blocks)]
        backward = [100 + saved * (blocks - k) + left * k + scratch for k in range(blocks)]
        live = (*forward, *backward, 100 + left * blocks)
        return DryRun(
            max(live), live, (), {},
            forward_steps=blocks, saved_bytes=100 + saved * blocks, left_bytes=live[-1],
        )  # fmt: skip

    def step(blocks: int) -> Any:
        peaks = PeaksBySize(lambda size: shown(blocks), lambda one: one.peak_bytes)
        return SimpleNamespace(torch_peaks=lambda *_: peaks, torch_time_us=lambda _: 3.0 * blocks)

    steps = TorchSteps(Line((2, 3), whole), [step(2), step(3)], {"batch": 1}, "batch")
    if saved >= left:
        assert steps.peak_bytes(7) == shown(whole).peak_bytes
    assert steps.peak_bytes(7) >= shown(whole).peak_bytes - abs(saved - left)
    assert steps.time_us(7) == 3.0 * whole
    assert steps.bytes_per_block(7) == max(saved, left)


class _Indexing(_Net):
    """Takes its last block by its number."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[BLOCKS - 1](self.first(x))
        loss: Tensor = self.last(x).float().sum()
        return loss


OPTIONS: dict[str, Any] = {"variants": "none", "solver": "greedy", "memory_budget": "700MiB"}
OPTIONS["count"] = "allocated"


@pytest.mark.slow
def test_few_blocks_say_what_the_whole_says() -> None:
    """The same of torch's partition; ours is not better than of the whole, and not far below."""
    model, inputs = _Net().to(torch.bfloat16), [torch.zeros(4096, 32, dtype=torch.bfloat16)]
    few, whole = (
        fit(
            model, inputs, vary={"rows": [(0, 0)]}, device="H100", optimizer="adamw",
            options=OPTIONS, whole=all_of_them,
        )
        for all_of_them in (False, True)
    )  # fmt: skip
    assert (few.blocks, few.studied_blocks) == (BLOCKS, (2, 3))
    assert (whole.blocks, whole.studied_blocks) == (BLOCKS, (BLOCKS,))
    assert len(model.blocks) == BLOCKS
    assert few.optimizer == whole.optimizer
    assert few.weights_bytes == whole.weights_bytes
    assert (few.held_bytes, few.tuning_bytes) == (whole.held_bytes, whole.tuning_bytes)
    for way in WAYS:
        one, other = few.largest("rows", way), whole.largest("rows", way)
        if way == "fxremat":
            assert 0.85 * other.size <= one.size <= 1.02 * other.size
            continue
        assert one.size == pytest.approx(other.size, rel=0.02)
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)
        assert one.time_us / one.size == pytest.approx(other.time_us / other.size, rel=0.02)
    assert few.largest("rows", "checkpointed blocks").size < few.largest("rows").size
    assert few.fastest("rows").per_second >= few.fastest("rows", "checkpointed blocks").per_second
    assert f"extrapolated from steps with 2 and 3 of {BLOCKS} blocks." in table(few)
    assert "extrapolated" not in table(whole)


def test_a_model_that_names_its_blocks_by_number_is_studied_as_a_whole() -> None:
    found = fit(_Indexing(), [torch.zeros(128, 32)], vary={}, device="H100", options=OPTIONS)
    assert found.studied_blocks == (found.blocks,) == (BLOCKS,)


def test_weights_that_do_not_fit_are_told_at_once() -> None:
    """No code is generated for it."""
    options = {**OPTIONS, "memory_budget": "512KiB"}
    with patch.object(SymbolicStep, "_as_torch", side_effect=AssertionError):
        found = fit(_Net(), [torch.zeros(8, 32)], vary={"rows": [(0, 0)]}, options=options)
    assert [(row.way, row.size) for row in found.rows] == [(way, 0) for way in WAYS]
    assert found.points == ()
    assert "-" in table(found)
