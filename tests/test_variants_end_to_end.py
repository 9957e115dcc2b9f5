"""Operator variants the whole way: torch.compile, a budget, and a step that takes other forms."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.backend import fxremat as backend
from fxremat.cli import main
from fxremat.errors import InvalidOption
from fxremat.options import parse_options
from fxremat.passes.variants.table import ALL, RULES, rules_named
from fxremat.runtime.chunks import call as rows_call
from fxremat.whatif.explanation import Explanation
from tests.conftest import Golden
from tests.end_to_end import compiled_by_fxremat, least, measured, observed, step
from tests.fuzz.steps import Squares
from tests.graphs import Net

WORDS, WIDTH, IGNORED = 3000, 16, 0


pytestmark = pytest.mark.usefixtures("fresh")


def losses(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Tokens in, the mean loss of the next ones out; a large vocabulary."""
    scores = net.layers(tokens).view(-1, WORDS)
    return F.cross_entropy(scores, targets.view(-1), ignore_index=IGNORED)


def words() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *inner, nn.Linear(WIDTH, WORDS))
    batch = torch.randint(0, WORDS, (4, 64)), torch.randint(0, WORDS, (4, 64))
    return Net(losses, layers=layers), batch


def pictures() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Convolutions with BatchNorm, ReLU and a pool."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    pooled = (first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*pooled, second, nn.ReLU(), Squares()), (torch.randn(8, 3, 32, 32),)


def layers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Linear layers and activations, of which all but the ends is saved."""
    torch.manual_seed(0)
    inner = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)]
    return nn.Sequential(*inner, Squares()), (torch.randn(2048, 32),)


def assert_alike(
    new: list[Tensor], old: list[Tensor], rtol: float = 2e-5, atol: float = 1e-7, nan: bool = False
) -> None:
    torch.testing.assert_close(new, old, rtol=rtol, atol=atol, equal_nan=nan)


@pytest.mark.parametrize(
    "executor", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_vocabulary_fits_where_its_logits_do_not_and_its_peak_is_predicted(executor: str) -> None:
    model, inputs = words()
    quick: dict[str, Any] = {"executor": executor, "solver": "greedy"}
    budget = least(model, inputs, **quick)
    if executor == "aot_eager":
        assert budget < 0.8 * least(model, inputs, variants="none", **quick)
    twin = copy.deepcopy(model)
    call = compiled_by_fxremat(model, memory_budget=f"{budget}B", **quick)
    assert_alike(observed(model, call, inputs), observed(twin, twin, inputs))
    report = fxremat.reports()[-1]
    assert measured(model, call, inputs) == report.predicted_peak_bytes <= budget
    assert any("chunked_" in row.what for row in report.variants)
    assert "operator variants taken" in str(report)
    for part in (0.0, 0.5, 0.9, 1.0):
        tokens, targets = inputs
        batch = tokens, torch.where(torch.rand(targets.shape) < part, IGNORED, targets)
        with mock.patch.object(rows_call, "rows_to_run", wraps=rows_call.rows_to_run) as run:
            new, old = (observed(*pair, batch) for pair in ((model, call), (twin, twin)))
        assert_alike(new, old, nan=True)
        assert measured(model, call, batch) == report.predicted_peak_bytes
        count = int((batch[1] != IGNORED).sum())
        leaves_out = count and executor == "inductor"  # eager graphs have the loss as one op
        assert {one.args[0] for one in run.call_args_list} == ({count} if leaves_out else set())


def test_with_room_nothing_takes_another_form() -> None:
    model, inputs = words()
    call = compiled_by_fxremat(model, executor="aot_eager", memory_budget="1GiB")
    step(model, call, inputs)
    assert fxremat.reports()[-1].variants == ()


def test_running_statistics_and_pictures_are_the_same() -> None:
    model, inputs = pictures()
    options = {"solver": "greedy"}
    explained = fxremat.explain(model, *inputs, options=options)
    budget = explained.store_all_peak_bytes * 65 // 100
    twin = copy.deepcopy(model)
    call = compiled_by_fxremat(model, memory_budget=budget, **options)
    assert_alike(observed(model, call, inputs), observed(twin, twin, inputs), 1e-4, 1e-6)
    assert fxremat.reports()[-1].variants
    assert measured(model, call, inputs) <= budget


def rows_of(found: Explanation) -> list[str]:
    """What takes another form."""
    return [row.what for graph in found.graphs for row in graph.variants]


def test_lossy_forms_are_taken_only_if_allowed() -> None:
    model, inputs = layers()
    eager = {"executor": "aot_eager"}
    exact = least(model, inputs, **eager)
    assert least(model, inputs, allow_lossy=True, **eager) <= exact
    rows = rows_of(fxremat.explain(model, *inputs, memory_budget=exact, options=eager))
    assert rows
    assert not any("inexact" in what for what in rows)


@pytest.mark.slow
def test_lossy_forms_are_said_to_be() -> None:
    model, inputs = layers()
    only: dict[str, Any] = {"allow_lossy": True, "variants": ["saved_bf16"], "solver": "greedy"}
    budget = least(model, inputs, **only)
    assert budget <= least(model, inputs, variants="none", solver="greedy")
    rows = rows_of(fxremat.explain(model, *inputs, memory_budget=budget, options=only))
    assert rows
    assert all("inexact" in what for what in rows)


def test_names_of_the_table_are_distinct_and_described() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.line and "\n" not in rule.line for rule in RULES)


def test_lossy_rules_are_left_out_unless_allowed() -> None:
    exact = rules_named([ALL], allow_lossy=False)
    assert exact == tuple(rule for rule in RULES if not rule.lossy)
    assert rules_named([ALL], allow_lossy=True) == RULES
    tried = rules_named(None, allow_lossy=True)
    assert {*RULES} - {*tried} == {rule for rule in RULES if not rule.by_default}
    assert [rule.name for rule in rules_named(["packed_masks"], allow_lossy=False)] == [
        "packed_masks"
    ]


def parse(**options: object) -> Any:
    return parse_options(options, device_total_bytes=None).variants


def test_names_are_read_as_a_list_or_as_text() -> None:
    assert parse(variants=["packed_masks", "chunked_loss"]) == ("packed_masks", "chunked_loss")
    assert parse(variants="packed_masks, chunked_loss") == ("packed_masks", "chunked_loss")
    assert parse(variants=None) is parse() is None
    assert parse(variants="all") == parse(variants=(ALL,)) == (ALL,)
    assert parse(variants="none") == parse(variants=[]) == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["packed_mask"], "did you mean 'packed_masks'"),
        (3, "a list of names"),
        (["saved_8bit"], "allow_lossy=True"),
    ],
)
def test_refused_names(value: object, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        parse(variants=value)


def test_the_table(golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variants"]) == 0
    golden(capsys.readouterr().out)


def test_sizes_that_change_are_no_obstacle() -> None:
    model, (tokens, targets) = words()
    budget = least(model, (tokens, targets), executor="aot_eager", variants="none")
    options: dict[str, Any] = {"executor": "aot_eager", "memory_budget": budget}
    call = torch.compile(model, backend=backend, options=options, dynamic=True)
    for length in (64, 48, 32):
        inputs = (tokens[:, :length].contiguous(), targets[:, :length].contiguous())
        assert_alike(observed(model, call, inputs), observed(model, model, inputs))
