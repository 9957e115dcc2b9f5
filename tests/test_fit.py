"""What fits: sizes along a line, and blocks that are planned for the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.cli import main
from fxremat.cli.fit import table
from fxremat.cost.device import card_named
from fxremat.errors import CannotVary
from fxremat.memory.optimizers import held_by
from fxremat.training.blocks import are_alike, checkpointed, repeated_blocks, shortened
from fxremat.whatif.device import absent
from fxremat.whatif.fit import fit
from fxremat.whatif.largest_size import WAYS, largest_within
from fxremat.whatif.symbolic_step import SymbolicStep
from tests.absent_nets import net_and_tokens
from tests.graphs import Net

# --- fit ----------------------------------------------------------------------------------

BATCH = {"batch": [(0, 0), (1, 0)]}
BUDGET = "242MiB"


@given(
    st.integers(0, 50),
    st.integers(1, 1000),
    st.integers(0, 5),
    st.integers(0, 100_000),
    st.integers(1, 300),
)
def test_largest_is_the_last_that_is_within(
    fixed: int, slope: int, bend: int, budget: int, first: int
) -> None:
    """Whatever is asked first, for lines and for what bends upwards."""

    def peak(size: int) -> int:
        return fixed + slope * size + bend * size * size // 7

    found = largest_within(peak, budget, first)
    assert found == 0 or peak(found) <= budget
    assert peak(found + 1) > budget


def _weights() -> list[nn.Parameter]:
    matrix = nn.Parameter(torch.zeros(100, 200, dtype=torch.bfloat16))
    vector = nn.Parameter(torch.zeros(30))
    frozen = nn.Parameter(torch.zeros(7, 7), requires_grad=False)
    return [matrix, vector, frozen]


OPTIMIZERS: dict[str, tuple[int, Any]] = {
    # what it holds, and the one of torch that does
    "none": (0, None),
    "sgd": (0, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd-momentum": (40_000 + 120, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": (2 * (40_000 + 120), torch.optim.Adam),
    "adamw": (2 * (40_000 + 120), torch.optim.AdamW),
    "adamw-master": (20_000 * 12 + 30 * 8, None),
    "adamw-8bit": (2 * (20_000 + 79 * 4) + 2 * 120, None),
    "adafactor": (300 * 4 + 120, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_by_hand_and_those_that_torch_makes(name: str) -> None:
    """Counted after a step; what counts the steps is left out."""
    weights, (states, make) = _weights(), OPTIMIZERS[name]
    assert held_by(name, weights).states == states
    if make is None:
        return
    optimizer = make([w for w in weights if w.requires_grad])
    for weight in weights[:2]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    assert sum(v.nbytes for v in held) == states


def test_blocks_are_the_list_with_the_most_weights() -> None:
    model = nn.ModuleDict(
        {
            "few": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "many": nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
            "mixed": nn.Sequential(nn.Linear(50, 50), nn.ReLU()),
        }
    )
    many = model["many"]
    assert isinstance(many, nn.Sequential)
    assert repeated_blocks(model) == list(many)
    x = torch.randn(4, 8, requires_grad=True)
    before = many(x)
    with checkpointed(model) as count:
        after = many(x)
        assert all("forward" in vars(block) for block in many)
    assert count == 5  # the few, too
    torch.testing.assert_close(after, before)
    assert all("forward" not in vars(block) for block in many)
    with checkpointed(nn.Linear(2, 2)) as count:
        assert count == 0


def test_blocks_inside_of_blocks_are_not_checkpointed_by_themselves() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    model = nn.ModuleDict({"down": nn.ModuleList(blocks), "up": nn.ModuleList(blocks[:2])})
    with checkpointed(model) as count:
        assert all("forward" in vars(block) for block in blocks)
        assert all("forward" not in vars(inner) for block in blocks for inner in block)
    assert count == 3


@pytest.mark.slow
def test_what_fits_on_a_card() -> None:
    """Ours is the largest; the plan at that size is within the budget, by itself."""
    with torch.device("meta"):
        model, inputs = net_and_tokens()
    options: dict[str, Any] = {"variants": "none", "solver": "greedy", "memory_budget": BUDGET}
    found = fit(model, inputs, vary=BATCH, device="H100", optimizer="adamw", options=options)
    plain, ours = found.largest("batch", "torch.compile"), found.largest("batch")
    assert 0 < plain.size < ours.size
    assert plain.time_us > 0
    assert ours.per_second > 0
    cublas, cache = 2 * 32 * 2**20, card_named("H100").l2_cache
    mib = 2**20
    assert found.weights_bytes < 2 * mib  # cut from one segment, with the batch
    given = found.weights_bytes + sum(one.nbytes for one in inputs)
    assert found.held_bytes + given == found.optimizer.states + cublas + cache + 2 * mib
    assert found.tuning_bytes == 0
    seen = [one.size for one in found.points if one.way == "fxremat"]
    assert seen == sorted(set(seen))
    assert seen[-1] == ours.size
    assert plain.size in seen
    assert found.fastest("batch").per_second == max(
        one.per_second for one in found.points if one.way == "fxremat"
    )
    assert all(one.peak_bytes <= found.budget_bytes - found.held_bytes for one in found.points)
    drawn = ElementTree.fromstring(found.picture())
    texts = [element.text for element in drawn.iter() if element.text]
    assert {"batch", "torch.compile", "fxremat", "budget: 242.00 MiB"} <= set(texts)
    size = ours.size
    with absent("H100"):
        tokens = torch.zeros(size, inputs[0].shape[1], dtype=torch.long)
        options["optimizer"] = "adamw"
        [report] = fxremat.explain(model, tokens, tokens.clone(), options=options).graphs
    reserved = report.predicted_reserved_bytes
    assert reserved is not None
    assert reserved <= found.budget_bytes  # by a plan that may be slower to find, and better
    assert ours.peak_bytes + found.held_bytes + found.tuning_bytes <= found.budget_bytes


@pytest.fixture
def command_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A function that makes a model, in a module that can be imported."""
    monkeypatch.setenv("FXREMAT_VARIANTS", "none")
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    return "tests.small:two_layers_in_bfloat16"


def test_command(tmp_path: Path, command_model: str, capsys: Any) -> None:
    asked = ["fit", command_model, "--device", "A100", "--vary", "rows=0:0"]
    asked += ["--budget", "128MiB"]
    picture = tmp_path / "fit.svg"
    assert main([*asked, "--picture", str(picture)]) == 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    text = capsys.readouterr().out
    assert text.startswith("fits: planned ")
    assert "fxremat" in text
    assert "torch.compile" in text


def test_command_with_figures(command_model: str, capsys: Any) -> None:
    """On the CPU; a step that does not fit still says what is the least, and what plain takes."""
    asked = ["fit", command_model, "--device", "cpu", "--vary", "rows=0:0", "--json"]

    def figures(budget: int, status: int) -> Any:
        assert main([*asked, "--budget", f"{budget}B"]) == status
        return json.loads(capsys.readouterr().out)

    fits = figures(2**20, 0)
    assert fits["fits"]
    assert fits["least_bytes"] <= fits["planned_bytes"] <= 2**20
    assert fits["least_bytes"] <= fits["plain_bytes"]
    assert fits["step_ms"] > 0
    assert fits["largest_rows"] >= 16
    assert {row["way"] for row in fits["rows"]} >= {"torch.compile", "fxremat"}
    refused = figures(fits["least_bytes"] - 1, 1)
    assert not refused["fits"]
    assert refused["planned_bytes"] is refused["step_ms"] is None
    assert refused["least_bytes"] == fits["least_bytes"]
    assert refused["plain_bytes"] == fits["plain_bytes"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--device", "H10O"], "did you mean 'H100'"),
        (["--vary", "depth=0:5"], "no dimension 5 of input 0"),
        (["--vary", "depth=9:0"], "no dimension 0 of input 9"),
        (["--vary", "depth"], "pairs of an input and a dimension"),
        (["--optimizer", "adamx"], "did you mean 'adam"),
        (["--budget", "lots"], "memory_budget"),
    ],
)
def test_mistakes_are_told(
    change: list[str], expected: str, command_model: str, capsys: Any
) -> None:
    asked = ["fit", command_model, "--device", "A100", "--vary", "rows=0:0", *change]
    assert main(asked) == 2
    assert expected in capsys.readouterr().err


def test_what_the_model_fixes_cannot_vary() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    net = Net(lambda net, x: (x.view(8, 4) @ net.weight).sum(), weight=weight)  # its batch is fixed
    with pytest.raises((CannotVary, fxremat.errors.NotTraceable)):
        fit(net, [torch.zeros(8, 4)], vary={"batch": [(0, 0)]}, device="H100")


def test_without_a_card_it_is_the_cpu() -> None:
    """The model stays as it was, and takes no more memory."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    before = [weight.data_ptr() for weight in model.parameters()]
    found = fit(model, [torch.zeros(16, 64)], vary={"rows": [(0, 0)]}, memory_budget="1MiB")
    assert found.device == "here"
    assert found.budget_bytes == 2**20
    assert 0 < found.largest("rows", "torch.compile").size <= found.largest("rows").size
    assert [weight.data_ptr() for weight in model.parameters()] == before


# --- fit blocks ---------------------------------------------------------------------------

BLOCKS = 6


def _whole(net: Any, x: Tensor) -> Any:
    """Rows in, a number out."""
    x = net.first(x)
    for block in net.blocks:
        x = block(x)
    return net.last(x).float().logsumexp(-1).sum()


def _net(forward: Callable[..., Any] = _whole) -> Net:
    """Blocks of two layers, between two others."""

    def block(net: Any, x: Tensor) -> Any:
        return x + net.down(nn.functional.gelu(net.up(x)))

    parts = (Net(block, up=nn.Linear(64, 256), down=nn.Linear(256, 64)) for _ in range(BLOCKS))
    blocks = nn.ModuleList(parts)
    return Net(forward, first=nn.Linear(32, 64), last=nn.Linear(64, 512), blocks=blocks)


def test_blocks_are_fewer_inside_and_as_before_after() -> None:
    model: Any = _net()
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


OPTIONS: dict[str, Any] = {"variants": "none", "solver": "greedy", "memory_budget": "700MiB"}
OPTIONS["count"] = "allocated"


@pytest.mark.slow
def test_few_blocks_say_what_the_whole_says() -> None:
    """The same of torch's partition; ours is not better than of the whole, and not far below."""
    model, inputs = _net().to(torch.bfloat16), [torch.zeros(4096, 32, dtype=torch.bfloat16)]
    few, whole = (
        fit(
            model, inputs, vary={"rows": [(0, 0)]}, device="H100", optimizer="adamw",
            options=OPTIONS, whole=all_of_them,
        )
        for all_of_them in (False, True)
    )  # fmt: skip
    assert (few.blocks, few.studied_blocks) == (BLOCKS, (2, 3))
    assert (whole.blocks, whole.studied_blocks) == (BLOCKS, (BLOCKS,))
    assert len(repeated_blocks(model)) == BLOCKS
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
    model = _net(lambda net, x: net.last(net.blocks[BLOCKS - 1](net.first(x))).float().sum())
    found = fit(model, [torch.zeros(128, 32)], vary={}, device="H100", options=OPTIONS)
    assert found.studied_blocks == (found.blocks,) == (BLOCKS,)


def test_weights_that_do_not_fit_are_told_at_once() -> None:
    """No code is generated for it."""
    options = {**OPTIONS, "memory_budget": "512KiB"}
    with patch.object(SymbolicStep, "torch_peaks", side_effect=AssertionError):
        found = fit(_net(), [torch.zeros(8, 32)], vary={"rows": [(0, 0)]}, options=options)
    assert [(row.way, row.size) for row in found.rows] == [(way, 0) for way in WAYS]
    assert found.points == ()
    assert "-" in table(found)
