"""A bug in a rule is refused when compiling, by the rule's name; or the rule is left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from fxremat.passes.variants.rule import Rule, Site, StandIns
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


def explained(**options: object) -> Explanation:
    """A classifier under a budget that its logits do not fit."""
    model, x = seeded(Classifier, 512, 16)
    options = {**OPTIONS, **options}
    return fxremat.explain(model, x, memory_budget="6MiB", options=options)


def test_a_wrong_gradient_is_refused_with_the_name_of_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, replace(CHUNKED_LOSS, find=find_widened))
    with pytest.raises(fxremat.VerificationFailed, match="variant chunked_loss"):
        explained()
    model, x = seeded(Classifier, 512, 16)
    given: dict[str, Any] = {**OPTIONS, "memory_budget": "6MiB"}
    step = torch.compile(model, backend="fxremat", options=given)
    with pytest.raises(BackendCompilerFailed) as refused:
        step(x)
    error = refused.value.inner_exception
    assert isinstance(error, fxremat.VerificationFailed)
    assert "variant chunked_loss" in str(error)


def test_a_rule_that_raises_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replace(CHUNKED_LOSS, find=fail))
    with pytest.raises(fxremat.VerificationFailed, match=r"variant chunked_loss.*no such node"):
        explained()


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
