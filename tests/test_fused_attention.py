"""Attention written by hand, by the fused kernels of the device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants import insertion
from fxremat.passes.variants.attention import fused
from fxremat.passes.variants.attention.fused import RULES, FlashOnCuda, Inputs
from tests import attentions
from tests.conftest import Golden
from tests.end_to_end import compiled_by_fxremat, least, measured, observed
from tests.fuzz.stand_ins import check_sites
from tests.fuzz.steps import attention, in_dtype
from tests.graphs import Net, capture, on_cuda
from tests.row_sites import assert_close, run_on
from tests.variants import form

pytestmark = pytest.mark.usefixtures("fresh")


# --- running them --------------------------------------------------------------------------------

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def assert_kernel_alone(joint: JointGraph) -> None:
    """Nothing is left of what it stands for."""
    found = [str(n.target) for n in joint.module.graph.nodes if n.op == "call_function"]
    assert sum("scaled_dot_product" in name for name in found) in (1, 2)
    assert not {"aten.bmm.default", "aten._softmax.default", "aten.exp.default"} & set(found)


EAGER = {"float16": ["plain", "finite"], "bfloat16": ["plain", "softmax in 32 bits", "grouped"],
         "float64": ["causal", "einsum", "added"], "float32": list(attentions.CASES)}  # fmt: skip
AS_INDUCTOR = {"bfloat16": ["softmax in 32 bits"], "float32": [
    "einsum", "three dimensions", "causal", "filled, rows without keys", "filled twice", "added",
    "fused projection"]}  # fmt: skip
ROWS = [
    (name, dtype, of is AS_INDUCTOR)
    for of in (EAGER, AS_INDUCTOR) for dtype, names in of.items() for name in names
]  # fmt: skip


def squared(function: attentions.Function) -> attentions.Function:
    """The backward reads the output, and the gradient that comes in is not the same everywhere."""
    return function if isinstance(function, nn.Module) else lambda *x: function(*x).square()


@pytest.mark.parametrize(("name", "kind", "fused"), ROWS)
def test_values_and_gradients(name: str, kind: str, fused: bool) -> None:
    """As near to float64 as the graph that it was; every stand-in lies where its value lay."""
    dtype = getattr(torch, kind)
    step = attention(name, dtype)
    step = replace(step, function=squared(step.function), as_inductor=fused)
    seen, exact = step.traced(), in_dtype(step, torch.float64).traced()
    (site,) = insertion.find_sites(seen.joint, RULES)
    check_sites(seen, [site])
    taken = insertion.take(seen.joint, [site])
    assert_kernel_alone(taken)
    values = (run_on(each, seen.inputs) for each in (taken, seen.joint))
    for one, other, best in zip(*values, exact.values(exact.joint), strict=True):
        assert_close(one, other, TOLERANCES[dtype])
        assert_close(one, best, TOLERANCES[dtype])


def drowned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A large negative constant, in which all scores of some rows are lost."""
    mask = torch.full((5, 7), torch.finfo(q.dtype).min).triu(-1)
    return (q @ k.mT + mask).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "inputs"),
    [attentions.CASES[n] for n in ("added", "added to keys", "padded, with slopes")]
    + [(drowned, attentions.heads)],
)
def test_lossy_where_a_mask_could_leave_a_row_without_keys(
    function: attentions.Function, inputs: Any
) -> None:
    joint = capture(function, inputs(torch.float32)).joint
    assert [site.rule for site in insertion.find_sites(joint, RULES)] == ["masked_attention"]
    assert [rule.lossy for rule in RULES] == [False, True]


# --- what is left alone --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*attentions.ALONE, "sizes that are no numbers"])
def test_left_alone(name: str) -> None:
    function, inputs = attentions.ALONE.get(name, (attentions.wide_softmax, attentions.heads))
    joint = capture(function, inputs(torch.float32), dynamic=name not in attentions.ALONE).joint
    assert insertion.find_sites(joint, RULES) == ()


# --- graphs --------------------------------------------------------------------------------------


def test_graph_of_fused_attention(golden: Golden) -> None:
    joint = capture(attentions.causal, attentions.heads(torch.float32, 7)).joint
    taken = insertion.take(joint, insertion.find_sites(joint, RULES))
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{taken.module.graph}\n")


def square(dtype: torch.dtype, width: int = 16) -> list[Tensor]:
    return attentions.heads(dtype, 32, 32, width)


FLASH, EFFICIENT = "flash", "memory-efficient"
KEYS = torch.zeros(2, 1, 1, 32)
ON_CUDA: list[tuple[attentions.Function, Sequence[Any], list[str]]] = [
    (attentions.plain, square(torch.bfloat16), [FLASH, EFFICIENT]),
    (attentions.causal, square(torch.float16), [FLASH, EFFICIENT]),
    (attentions.block(torch.float16), [torch.randn(2, 8, 16, dtype=torch.float16)], []),
    (attentions.block(torch.float32, 16, 32), [torch.randn(2, 32, 16)], [EFFICIENT]),
    (attentions.plain, square(torch.float32), [EFFICIENT]),
    (attentions.plain, square(torch.bfloat16, 12), []),
    (attentions.plain, square(torch.float64), []),
    (attentions.filled, [*square(torch.bfloat16), KEYS == 0], [EFFICIENT]),
    (attentions.filled, [*attentions.heads(torch.bfloat16), attentions.hidden()], []),
    (attentions.added, [*square(torch.float32), KEYS], [EFFICIENT]),
]


@pytest.mark.parametrize(("function", "inputs", "names"), ON_CUDA)
def test_kernels_of_a_gpu(
    function: attentions.Function, inputs: Sequence[Any], names: list[str]
) -> None:
    joint = on_cuda(capture(function, inputs).joint)
    sites = insertion.find_sites(joint, RULES)
    assert [site.name.split()[-1] for site in sites] == names
    replaced = [set(form.stand_ins) for form in insertion.insert_all(joint, sites).inserted]
    assert not replaced or set.intersection(*replaced)  # so one of them at most is taken
    for site in sites:
        taken = insertion.take(joint, [site])
        assert_kernel_alone(taken)
        for old, new in zip(joint.results, taken.results, strict=True):
            if isinstance(old, fx.Node):
                assert form(old.meta["val"]) == form(new.meta["val"])


# --- the whole way -------------------------------------------------------------------------------


def test_the_whole_way() -> None:
    layer, inputs = attentions.block(width=32, most=192), (torch.randn(6, 192, 32),)
    model = Net(lambda m, x: (x + m.layer(x)).square().mean(), layer=layer)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy"}
    budget = least(model, inputs, variants=["fused_attention"], **options)
    assert budget < 0.8 * least(model, inputs, variants="none", **options)
    call = compiled_by_fxremat(model, variants=["fused_attention"], memory_budget=budget, **options)
    ours, eager = observed(model, call, inputs), observed(twin, twin, inputs)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-6)
    assert any("fused_attention" in row.what for row in fxremat.reports()[-1].variants)
    assert measured(model, call, inputs) <= budget


@pytest.mark.parametrize(
    ("capability", "width", "is_taken"),
    [
        ((8, 0), 256, True), ((9, 0), 208, True), ((8, 9), 192, True), ((8, 9), 208, False),
        ((8, 6), 224, False), ((12, 0), 200, False), ((8, 9), 256, True), ((9, 0), 264, False),
        ((7, 5), 64, False),
    ],
)  # fmt: skip
def test_widths_that_flash_attention_takes(
    capability: tuple[int, int], width: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it trains: there is no backward for some of them on cards with little shared memory."""
    monkeypatch.setattr(fused, "_capability", lambda: capability)
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(1, 2, 8, width, dtype=torch.bfloat16, device="meta")
    given = Inputs(node, node, node, None, is_causal=False, scale=1.0)
    assert FlashOnCuda().takes(given) is is_taken
