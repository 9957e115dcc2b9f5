"""The judge of variants: it takes every real rule, and no broken one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call, last_of
from fxremat.passes.variants import insertion
from fxremat.passes.variants.rule import Site
from fxremat.passes.variants.table import RULES
from fxremat.verify import spot_checks
from fxremat.verify.variants import NumbersTried, TakenVariant, check_variants
from tests import attentions
from tests.graphs import Net, capture
from tests.variants import small_values

ATEN = torch.ops.aten
LOSSY = {rule.name for rule in RULES if rule.lossy}


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test tries its numbers itself, and small values have other forms too."""
    monkeypatch.setattr(spot_checks, "_right", {})
    with small_values():
        yield


def told(
    inserted: Sequence[insertion.InsertedVariant], lossy: frozenset[str]
) -> list[TakenVariant]:
    """What the judge is told of variants."""
    return [
        TakenVariant(
            rule=form.rule,
            site=form.name,
            pairs=tuple(
                (old.name, one.name)
                for old, new in form.stand_ins.items()
                for one in dict.fromkeys((new, form.backward_stand_ins.get(new, new)))
            ),
            lossy=form.rule in lossy,
            backward_only=frozenset(new.name for new in form.backward_only),
        )
        for form in inserted
    ]


def judge(
    joint: JointGraph, *chosen: Site, lossy: frozenset[str] = frozenset(LOSSY)
) -> NumbersTried:
    """Take sites, and compare the graphs before and after."""
    after, inserted = insertion.take_with_inserted(joint, chosen)
    return check_variants(
        joint.module.graph,
        after.module.graph,
        told(inserted, lossy),
        num_forward_outputs=joint.num_forward_outputs,
    )


def mlp(dtype: torch.dtype, layers: int = 1) -> tuple[Any, list[Tensor]]:
    parts = [(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(layers)]
    net = nn.Sequential(*(p for three in parts for p in three)).to(dtype)
    return net, [torch.randn(32, 16, dtype=dtype)]


class Words(nn.Module):
    """A large head and its loss."""

    def __init__(self, words: int = 300, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.embedding(tokens).tanh())
        return F.cross_entropy(scores.float(), tokens, ignore_index=0)


class Pictures(nn.Module):
    """Convolutions, norm, activation and pool."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.max_pool2d(F.relu(self.second(y)), 3, 2, 1).square().mean()


class Normed(nn.Module):
    """Norms and activations whose outputs are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.plain = nn.RMSNorm(16, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(F.leaky_relu(self.norm(self.first(x)), 0.1))
        out: Tensor = self.last(F.elu(self.first(F.softplus(self.last(self.plain(y))))))
        return out


def dropped(dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16))
    return net.to(dtype), [torch.randn(32, 16, dtype=dtype)]


NETS: dict[str, Callable[[torch.dtype], tuple[Any, list[Tensor]]]] = {
    "mlp": mlp,
    "dropout": dropped,
    "words": lambda dtype: (Words().to(dtype), [torch.randint(0, 300, (40,))]),
    "pictures": lambda dtype: (Pictures().to(dtype), [torch.randn(6, 3, 12, 12, dtype=dtype)]),
    "no norm": lambda dtype: (Pictures(False).to(dtype), [torch.randn(6, 3, 12, 12, dtype=dtype)]),
    "norms": lambda dtype: (Normed().to(dtype), [torch.randn(32, 16, dtype=dtype)]),
    "attention": lambda dtype: (
        Net(lambda net, q, k, v: attentions.plain(q, k, v)), attentions.heads(dtype)
    ),
    "causal": lambda dtype: (
        Net(lambda net, q, k, v: attentions.causal(q, k, v)), attentions.heads(dtype)
    ),
}  # fmt: skip


@cache
def traced(name: str, dtype: torch.dtype = torch.float32, fused: bool = True) -> JointGraph:
    """The joint graph of a step, traced once for all tests; not to be changed."""
    torch.manual_seed(0)
    net, inputs = NETS[name](dtype)
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    return capture(net, inputs, fused=fused).joint


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
    ids=["eager", "fused", "fused bfloat16"],
)
@pytest.mark.parametrize("name", NETS)
def test_every_real_site_passes(name: str, dtype: torch.dtype, fused: bool) -> None:
    joint = traced(name, dtype, fused)
    found = [site for rule in RULES for site in rule.find(joint)]
    for site in found:
        verdict = judge(joint, site)
        known = site.rule in LOSSY
        assert verdict.checked or known, verdict.unchecked


# --- sabotage ----------------------------------------------------------------------------------


def one_site(joint: JointGraph, rule: str) -> Site:
    return next(s for r in RULES if r.name == rule for s in r.find(joint))


def broken(site: Site, change: Callable[[Any, dict[Any, Any]], None]) -> Site:
    """The site of a rule that puts in something else, by ``change`` of what it made."""

    def insert(graph: Any, where: Any) -> Any:
        found = dict(site.insert(graph, where))
        change(graph, found)
        return found

    return replace(site, insert=insert)


def scale(graph: Any, found: dict[Any, Any]) -> None:
    """All floats of the stand-ins are a little too large."""
    for old, new in found.items():
        if new.meta["val"].is_floating_point():
            with graph.inserting_after(new):
                found[old] = add_call(graph, ATEN.mul.Tensor, (new, 1.1), new)


def negate(graph: Any, found: dict[Any, Any]) -> None:
    """Masks are turned round, numbers change their sign."""
    for old, new in found.items():
        is_mask = new.meta["val"].dtype is torch.bool
        with graph.inserting_after(new):
            target = ATEN.logical_not.default if is_mask else ATEN.neg.default
            found[old] = add_call(graph, target, (new,), new)


def widen(graph: Any, found: dict[Any, Any]) -> None:
    """Another dtype than promised."""
    for old, new in found.items():
        with graph.inserting_after(new):
            call = torch.ops.prims.convert_element_type.default
            found[old] = add_call(graph, call, (new, torch.float64), new)


BROKEN = (
    ("mlp", "chunked_mlp", scale), ("mlp", "chunked_mlp", negate), ("mlp", "chunked_mlp", widen),
    ("dropout", "packed_masks", negate), ("norms", "norm_from_output", negate),
    ("words", "chunked_loss", negate), ("pictures", "pool_gradient", negate),
    ("mlp", "saved_8bit", negate), ("mlp", "saved_bf16", scale), ("mlp", "saved_8bit", widen),
)  # fmt: skip


@pytest.mark.parametrize(
    ("net", "rule", "change"), BROKEN, ids=lambda one: getattr(one, "__name__", one)
)
def test_a_broken_rule_is_named(net: str, rule: str, change: Any) -> None:
    joint = traced(net)
    site = one_site(joint, rule)
    judge(joint, site)
    with pytest.raises(VerificationFailed, match=f"variant {rule}"):
        judge(joint, broken(site, change))


def test_a_lossy_stand_in_that_the_forward_reads_is_refused() -> None:
    """A rule that says that it is exact about the forward, and is not."""
    joint = traced("mlp")
    site = one_site(joint, "chunked_mlp")
    with pytest.raises(VerificationFailed, match="a result of the forward depends on"):
        judge(joint, site, lossy=frozenset({"chunked_mlp"}))


def writing(read: str, in_forward: bool) -> fx.Graph:
    """A statistic is overwritten with ``sine``, or with what stands for it in the backward."""
    graph = fx.Graph()

    def call(name: str, target: Any, *args: fx.Node) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(4)
        return node

    x, statistic, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    for node in (x, statistic, tangent):
        node.meta["val"] = torch.empty(4)
    made = {"sine": call("sine", ATEN.sin.default, x)}
    made["rough"] = call("rough", ATEN.neg.default, call("other", ATEN.neg.default, made["sine"]))
    write = call("write", ATEN.copy_.default, statistic, made[read])
    write.meta["partitioner_tag"] = f"must_be_in_{'forward' if in_forward else 'backward'}"
    graph.output((x, call("gradient", ATEN.mul.Tensor, made[read], tangent)))
    if read == "sine":
        for name in ("rough", "other"):
            graph.erase_node(next(n for n in graph.nodes if n.name == name))
    return graph


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_lossy_stand_in_that_the_forward_writes_into_an_input_is_refused(
    in_forward: bool,
) -> None:
    """No result depends on it, but the next step does."""
    before, after = writing("sine", in_forward), writing("rough", in_forward)
    site = TakenVariant("rule", "site", (("sine", "rough"),), lossy=True)

    def compare() -> None:
        check_variants(before, after, [site], num_forward_outputs=1, numbers=False)

    if in_forward:
        with pytest.raises(VerificationFailed, match="a result of the forward depends on rough"):
            compare()
    else:
        compare()


def test_a_node_outside_of_the_sites_may_not_change() -> None:
    joint = traced("mlp")
    site = one_site(joint, "chunked_mlp")
    after = insertion.take(joint, [site])
    graph = after.module.graph
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    last = last_of([r for r in results if hasattr(r, "name")], graph)
    with graph.inserting_after(last):
        twice = add_call(graph, ATEN.mul.Tensor, (last, 2), last)
    results[results.index(last)] = twice
    graph.output_node().args = (tuple(results),)
    variants = told(insertion.insert_all(joint, [site]).inserted, frozenset())
    with pytest.raises(VerificationFailed, match="is computed differently"):
        check_variants(
            joint.module.graph, graph, variants, num_forward_outputs=joint.num_forward_outputs
        )
