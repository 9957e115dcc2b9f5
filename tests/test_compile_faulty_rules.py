"""A rule, a pass or a solver that fails is left out, with a warning that names it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call
from fxremat.passes.variants import table
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS
from fxremat.passes.variants.insertion import Rule, Site, StandIns
from fxremat.whatif.explanation import Explanation
from tests.small import Classifier, seeded

OPTIONS = {"variants": ["chunked_loss"]}


pytestmark = pytest.mark.usefixtures("fresh")


def widened(site: Site) -> Site:
    """The site, with gradients in another dtype than those they stand for."""

    def insert(graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        found, convert = dict(site.insert(graph, copies)), torch.ops.prims.convert_element_type
        for old, new in found.items():
            if new.meta["val"].dim():
                with graph.inserting_after(new):
                    found[old] = add_call(graph, convert.default, (new, torch.float64), new)
        return found

    return replace(site, insert=insert)


def find_widened(joint: JointGraph) -> Iterator[Site]:
    """All sites of the rule, each wrong."""
    return map(widened, CHUNKED_LOSS.find(joint))


def fail(joint: JointGraph) -> Iterator[Site]:
    """A rule that does not get to its sites."""
    raise KeyError("no such node")


def use(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Have this rule in the table, and no other."""
    monkeypatch.setattr(table, "RULES", (rule,))


def explained(budget: str = "6MiB", **options: object) -> Explanation:
    """A classifier under a budget that its logits do not fit."""
    model, x = seeded(Classifier, 512, 16)
    options = {**OPTIONS, **options}
    return fxremat.explain(model, x, memory_budget=budget, options=options)


def test_a_wrong_gradient_is_left_out_with_the_name_of_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the budget needs it, the error is that of a budget; elsewhere the run goes on."""
    use(monkeypatch, replace(CHUNKED_LOSS, find=find_widened))
    model, x = seeded(Classifier, 512, 16)
    given: dict[str, Any] = {**OPTIONS, "memory_budget": "6MiB"}
    step = torch.compile(model, backend="fxremat", options=given)
    with (
        pytest.warns(fxremat.LeftOut, match=r"the variant chunked_loss is left out"),
        pytest.raises(BackendCompilerFailed) as refused,
    ):
        step(x)
    error = refused.value.inner_exception
    assert isinstance(error, fxremat.InfeasibleBudget)
    assert error.minimum_bytes is not None
    torch.compiler.reset()
    given = {**given, "memory_budget": error.minimum_bytes}
    with pytest.warns(fxremat.LeftOut) as said:
        loss = torch.compile(model, backend="fxremat", options=given)(x)
    torch.testing.assert_close(loss, model(x))
    (one,) = [each.message for each in said if isinstance(each.message, fxremat.LeftOut)]
    assert "VerificationFailed" in one.reason
    text = Path(one.file).read_text(encoding="utf-8")
    assert "variant chunked_loss" in text
    assert "def forward" in text


def test_a_rule_that_raises_is_left_out_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: graphs that come later do not try it again."""
    use(monkeypatch, replace(CHUNKED_LOSS, find=fail))
    with (
        pytest.warns(fxremat.LeftOut, match=r"variant chunked_loss.*no such node"),
        pytest.raises(fxremat.InfeasibleBudget),
    ):
        explained()
    with pytest.raises(fxremat.InfeasibleBudget):
        explained()


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    ("place", "what", "executor"),
    [
        ("fxremat.passes.inplace.WriteInPlace.call", "the pass inplace, sums", "aot_eager"),
        ("fxremat.passes.gradient_sums.GradientSums.call", "the pass inplace, sums", "inductor"),
        ("fxremat.passes.variants.insertion.TakeVariants.call", "every variant", "inductor"),
        ("fxremat.planner.auto._best_of_solvers", "every variant", "inductor"),
        ("fxremat.compile.verification.check_in_place", "the pass inplace, sums", "aot_eager"),
    ],
)
def test_what_is_broken_on_purpose_is_left_out(
    monkeypatch: pytest.MonkeyPatch, place: str, what: str, executor: str
) -> None:
    """The run goes on, with the same gradients."""
    model, x = seeded(Classifier, 512, 16)
    expected: Any = model(x)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(place, broken)
    budget = "28MiB" if executor == "aot_eager" else "14MiB"
    options: dict[str, Any] = {"memory_budget": budget, "executor": executor}
    call = torch.compile(model, backend="fxremat", options=options)
    with pytest.warns(fxremat.LeftOut) as said:
        loss: Any = call(x)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    told = [each.message.what for each in said if isinstance(each.message, fxremat.LeftOut)]
    assert what in told


def test_what_fails_without_us_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of ours is blamed for it."""
    model, x = seeded(Classifier, 512, 16)
    monkeypatch.setattr("fxremat.compile.driver.compile_with_inductor", broken)
    call = torch.compile(model, backend="fxremat", options={"memory_budget": "14MiB"})
    with pytest.raises(BackendCompilerFailed, match="broken on purpose"):
        call(x)


def test_without_verification_it_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, replace(CHUNKED_LOSS, find=fail))
    with caplog.at_level(logging.WARNING), pytest.raises(fxremat.InfeasibleBudget):
        explained(verify=False)
    assert "the rule chunked_loss is left out: finding its sites raised KeyError" in caplog.text


def test_what_is_compiled_takes_what_was_explained() -> None:
    """With the rule as it is, which the other tests break."""
    told = explained()
    assert [row.what.split()[0] for row in told.graphs[0].variants] == ["chunked_loss"]
    model, x = seeded(Classifier, 512, 16)
    given: dict[str, Any] = {**OPTIONS, "memory_budget": "6MiB"}
    torch.compile(model, backend="fxremat", options=given)(x)
    assert fxremat.reports()[-1].predicted_peak_bytes == told.predicted_peak_bytes
