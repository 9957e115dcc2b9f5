"""Whether stand-ins are the values that they stand for: both are computed, side by side.

What rounding may make is measured: the step is run again with its inputs moved by a rounding error,
and what that changes is allowed several times over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.joint_graph import module_of
from fxremat.passes.variants import insertion
from fxremat.passes.variants.insertion import Site
from tests.graphs import with_seeds
from tests.row_sites import Traced
from tests.variants import LOSSY, form, verify

SLACK = 16
"""Times the change that a rounding error of the inputs makes: what is allowed."""
ERRORS = {
    "saved_8bit": 0.1,
    "saved_4bit": 0.5,
    "saved_fp8": 0.2,
    "saved_bf16": 0.05,
    "few_bit_activation": 0.8,
}
"""What a lossy rule may be off by, in parts of the norm of the value."""
UNBOUNDED = LOSSY - ERRORS.keys() - {"masked_attention"}
"""Right in the mean only, or wrong where weights are near zero: no number tells."""


def check_sites(seen: Traced, sites: Sequence[Site]) -> None:
    """Fail where a site is wrong: refused by the verifier, or off from what it stands for."""
    for site in sites:
        verify(seen.joint, site)
    offered = insertion.insert_all(seen.joint, sites)
    old_of = {node.name: node for node in seen.joint.module.graph.nodes}
    pairs = [
        (form.rule, old_of[old.name], new)
        for form in offered.inserted
        for old, new in form.stand_ins.items()
        if isinstance(new.meta["val"], torch.Tensor) and form.rule not in UNBOUNDED
    ]
    rules, old, new = zip(*pairs, strict=True) if pairs else ((), (), ())
    eps = _rounding(seen.joint.module.graph.nodes)
    right = _values(seen.joint.module, old, seen.inputs)
    near = _values(seen.joint.module, old, _moved(seen.inputs, eps))
    found = _values(offered.joint.module, new, seen.inputs)
    for node, rule, *values in zip(new, rules, right, found, near, strict=True):
        what = _difference(values, eps, ERRORS.get(rule, 0.0))
        assert not what, f"{node.name} of {rule} {what}"


def _rounding(nodes: Iterable[fx.Node]) -> float:
    """The coarsest rounding among the values of a graph."""
    leaves = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)


def _values(
    module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """What nodes of a graph are on these inputs; random numbers are the same in each call."""
    graph, where = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, where)
    graph.output(tuple(where[node] for node in nodes))
    given = [inputs[node.name] for node in graph.nodes if node.op == "placeholder"]
    torch.manual_seed(0)
    with torch.no_grad():
        run = fx.Interpreter(with_seeds(module_of(module, graph))).run
        return list(run(*[copy.deepcopy(one) for one in given]))


def _moved(inputs: Mapping[str, Any], eps: float) -> dict[str, Any]:
    """The same numbers, each off by about a rounding error."""
    generator = torch.Generator().manual_seed(99)

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * eps
        return torch.empty_like(value).copy_(value.double() * (1 + noise))

    return {name: move(value) for name, value in inputs.items()}


def _difference(values: Sequence[torch.Tensor], eps: float, error: float) -> str:
    """How a stand-in differs from what it stands for; empty where it does not.

    ``values`` are what is right, the stand-in, and what is right for inputs that were moved. What
    is stored inexactly may be anything beside a number that is not finite.
    """
    right, found, near = values
    if form(right) != form(found):
        return f"lies in memory as {form(found)}, and what it stands for as {form(right)}"
    finite = right.isfinite()
    if error and not finite.all():
        return ""
    if not torch.equal(finite, found.isfinite()):
        return "is not finite in other places"
    right, found, near = (one.double()[finite].nan_to_num() for one in (right, found, near))
    allowed = SLACK * ((near - right).norm() + eps * right.norm()) + error * right.norm()
    off = (found - right).norm()
    return f"is off by {off:.3g} in norm, where {allowed:.3g} is allowed" if off > allowed else ""
