"""The peak as an expression: equal to the maximum at every size, and solved for what fits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxremat
from fxremat.errors import CannotVary
from fxremat.sizes import parse_bytes
from fxremat.whatif.peak_expression import SizeRange, Sizes, peak_expression
from tests.end_to_end import measured

BATCH, SEQUENCE = SizeRange("batch", 2, 40), SizeRange("sequence", 3, 21)
Terms = tuple[int, int, int, int]


def _live(moments: list[Terms], sizes: Sizes) -> list[int]:
    batch, sequence = sizes["batch"], sizes.get("sequence", 7)
    return [
        a + b * batch + c * batch * sequence + d * batch * sequence**2 for a, b, c, d in moments
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 9**5), *(st.integers(0, top) for top in (9999, 99, 9))),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None, max_examples=25)
def test_equal_to_the_maximum_at_every_size(moments: list[Terms]) -> None:
    found = peak_expression(lambda sizes: _live(moments, sizes), (BATCH, SEQUENCE))
    assert found.multiple_of == 1
    for batch, sequence in itertools.product((2, 3, 11, 23, 39, 40), (3, 4, 9, 20, 21)):
        sizes = {"batch": batch, "sequence": sequence}
        assert found.at(sizes) == max(_live(moments, sizes))


def test_what_is_below_everywhere_is_left_out() -> None:
    moments = [(100, 5, 0, 0), (90, 5, 0, 0), (0, 9, 0, 0), (0, 7, 0, 0)]
    found = peak_expression(lambda sizes: _live(moments, sizes), (BATCH,))
    assert str(found) == "Max(9*batch, 5*batch + 100) for 2 <= batch <= 40"


def test_the_largest_size_within_a_budget() -> None:
    moments = [(100, 5, 0, 0), (0, 9, 0, 0)]
    found = peak_expression(lambda sizes: _live(moments, sizes), (BATCH,))
    fits = {budget: found.largest("batch", budget) for budget in (109, 110, 225, 226, 359, 10**6)}
    assert fits == {109: 0, 110: 2, 225: 25, 226: 25, 359: 39, 10**6: 40}


def test_allocators_round_so_multiples_are_exact_and_others_take_the_next() -> None:
    """64 bytes a size, rounded up to 512: exact at multiples of 8."""

    def live(sizes: Sizes) -> list[int]:
        return [1000 + -(-64 * sizes["batch"] // 512) * 512]

    found = peak_expression(live, (SizeRange("batch", 8, 800),))
    assert found.multiple_of == 8
    assert found.at({"batch": 16}) == 1000 + 1024
    assert found.at({"batch": 17}) == 1000 + 1536
    assert all(found.at({"batch": n}) == live({"batch": n})[0] for n in range(8, 801))


def test_without_symbols_it_is_a_number() -> None:
    found = peak_expression(lambda sizes: [3, 7, 5], ())
    assert found.at({}) == 7
    assert str(found) == "7"


def test_what_is_no_polynomial_is_refused() -> None:
    with pytest.raises(CannotVary, match="batch"):
        peak_expression(lambda sizes: [2 ** sizes["batch"]], (BATCH,))


def test_what_was_not_planned_for_is_refused() -> None:
    found = peak_expression(lambda sizes: [sizes["batch"]], (BATCH,))
    with pytest.raises(CannotVary, match="41 is not from 2 to 40"):
        found.at({"batch": 41})


class _Net(nn.Module):
    """A residual net; scores of a row with every other one make the bytes quadratic in rows."""

    def __init__(self, *, scores: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            if self.scores:
                x = x + torch.softmax(x @ x.transpose(0, 1), -1) @ x
        return x.square().mean()


def _dynamic(rows: int, bound: int) -> torch.Tensor:
    x = torch.randn(rows, 32)
    torch._dynamo.mark_dynamic(x, 0, min=130, max=bound)
    return x


@pytest.mark.parametrize(
    ("executor", "bound", "budget"),
    [("aot_eager", 512, "5MiB"), pytest.param("inductor", 4096, "3MiB", marks=pytest.mark.slow)],
)
def test_of_a_plan_it_is_what_a_step_of_each_size_takes(
    executor: str, bound: int, budget: str
) -> None:
    """One plan for all sizes; the peak of real steps at sizes that were not looked at.

    With scores Inductor does not take the whole range: it chooses loops by it.
    """
    torch._dynamo.reset()
    model = _Net(scores=executor == "aot_eager")
    options: dict[str, Any] = {"executor": executor, "memory_budget": budget}
    found = fxremat.explain(model, _dynamic(bound // 3, bound), options=options)
    expression = found.peak_expression
    [size] = expression.ranges
    assert (size.low, size.high) == (130, bound)
    assert expression.at({size.name: bound}) == found.predicted_peak_bytes <= parse_bytes(budget)
    call = torch.compile(model, backend="fxremat", options=options)
    call(_dynamic(bound // 3, bound)).backward()
    for rows in (131, 137, 158, 200, 255, 301, 388, 467, 508, bound - 1):
        peak = measured(model, call, (torch.randn(rows, 32),))
        assert peak == expression.at({size.name: rows}), rows
    assert len(fxremat.reports()) == 1
    assert fxremat.reports()[0].recomputed
    torch._dynamo.reset()  # it has learnt that rows vary
    fixed = fxremat.explain(model, torch.randn(200, 32), options=options)
    assert fixed.peak_expression.at({}) == fixed.predicted_peak_bytes
