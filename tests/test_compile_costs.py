"""What ops take, and which variants are offered: those whose calls run here."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxremat.compile.cost_model import cost_model
from fxremat.compile.request import Policy, Request
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.variants import insertion
from tests.test_variants_insertion import RULES, seen


@pytest.mark.parametrize("raises", [False, True])
def test_a_variant_whose_call_does_not_run_is_withdrawn(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail in the first step."""

    def of_node(spaces: Workspaces, node: fx.Node) -> int:
        spaces.refused += raises and node.target is torch.ops.aten.clone.default
        return 0

    monkeypatch.setattr(Workspaces, "of_node", of_node)
    joint = seen().joint
    offered = insertion.insert_all(joint, insertion.find_sites(joint, RULES))
    costs = cost_model(Request(policy=Policy(executor="aot_eager")), joint.module.graph, "test")
    found = costs.estimate(offered.joint, offered.inserted).problem
    left = {variant.name.partition(":")[0] for variant in found.variants}
    assert left == ({"doubled"} if raises else {"doubled", "transposed"})
