"""The judge tries what is said of ignored rows: true sayings pass, and untrue ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS
from fxremat.passes.variants.rule import Site
from fxremat.runtime.chunks import counted_rows
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Ignored, dump, parse
from fxremat.verify import spot_checks
from tests.graphs import Net, calls
from tests.row_nets import D, head, labels, rows
from tests.row_sites import sites, trace
from tests.test_checking_variants import broken, judge


def shifted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Labels are computed from what the step is given."""
    logits = m.head(x).view(-1, m.head.out_features)
    return F.cross_entropy(logits, F.pad(y, (0, 1), value=-100)[..., 1:].reshape(-1))


def masked(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(m.head(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


STEPS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "label": (shifted, (labels(4, 16),)),
    "mask": (masked, (labels(4, 16), torch.ones(4, 16))),
}


@cache
def joint_of(name: str) -> JointGraph:
    loss, given = STEPS[name]
    return trace(Net(loss, head=head()), (rows(4, 16, D), *given)).joint


@pytest.fixture(params=["as it is", "in small"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in small":
        monkeypatch.setattr(spot_checks, "WHOLE_BYTES", 0)
        monkeypatch.setattr(spot_checks, "MOST_BYTES", 0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing found before counts."""
    monkeypatch.setattr(spot_checks, "_right", {})
    monkeypatch.setattr(spot_checks, "_unchecked", {})


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("name", STEPS)
def test_rows_are_left_out_while_numbers_are_tried(name: str) -> None:
    for site in sites(CHUNKED_LOSS, joint_of(name))[:2]:
        with mock.patch.object(counted_rows, "rows_to_run", wraps=counted_rows.rows_to_run) as run:
            assert judge(joint_of(name), site).checked
        assert any(call.args[0] > 0 for call in run.call_args_list)


def saying(change: Callable[[Ignored], Ignored]) -> Callable[[Any, Any], None]:
    """Calls that say something else of ignored rows."""

    def apply(graph: Any, found: dict[Any, Any]) -> None:
        for call in calls(graph, ROWS):
            program = parse(str(call.args[2]))
            assert program.ignored is not None
            text = dump(replace(program, ignored=change(program.ignored)))
            call.args = (*call.args[:2], text, *call.args[3:])

    return apply


@pytest.mark.parametrize(
    "change",
    [
        lambda said: replace(said, number=said.number + 101),
        lambda said: replace(said, results=(*said.results[:-3], 1.0, *said.results[-2:])),
    ],
    ids=["rows that count", "results that are others"],
)
def test_untrue_sayings_are_refused(change: Callable[[Ignored], Ignored]) -> None:
    joint = joint_of("label")
    site: Site = next(s for s in sites(CHUNKED_LOSS, joint) if "at once" in s.name)
    with pytest.raises(VerificationFailed, match="on random numbers"):
        judge(joint, broken(site, saying(change)))
