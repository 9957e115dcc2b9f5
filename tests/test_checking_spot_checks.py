"""Sites in smaller sizes: right ones are found right, broken ones are refused, some do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call
from fxremat.passes.variants.rule import Rule, Site
from fxremat.passes.variants.table import RULES
from fxremat.runtime.chunks import operator
from fxremat.runtime.chunks.call import RowsCall, pieces
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Instruction, dump, parse
from fxremat.verify import shrinking, spot_checks
from fxremat.verify.site_cuts import Part, SiteCut
from fxremat.verify.small_calls import Misfit, small_call
from fxremat.verify.small_sizes import LARGEST, Change, Sizes
from tests import attentions
from tests.graphs import capture
from tests.test_checking_variants import Normed, Words, broken, judge, one_site
from tests.variants import small_values

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _only_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing runs as it is, however small."""
    monkeypatch.setattr(spot_checks, "_right", {})
    monkeypatch.setattr(spot_checks, "_unchecked", {})
    monkeypatch.setattr(spot_checks, "WHOLE_BYTES", 0)
    monkeypatch.setattr(spot_checks, "MOST_BYTES", 0)
    with small_values():
        yield


# --- sizes -------------------------------------------------------------------------------------

SHAPES = ((16, 2048, 6144), (32768, 2048))


def test_multiples_and_products_become_smaller_alike() -> None:
    sizes = Sizes(SHAPES, (Change(2048, 8),))
    assert [sizes.of(n) for n in (2048, 6144, 32768, 16)] == [8, 24, 128, 16]
    assert sizes.of(16 * 2048 * 6144) == 16 * 8 * 24
    assert sizes.of(-1) == -1
    assert sizes.of((1 << 63) - 1) == (1 << 63) - 1


def test_one_beside_a_multiple_stays_beside_it() -> None:
    sizes = Sizes(((197, 196),), (Change(196, 6, near=True),))
    assert [sizes.of(n) for n in (195, 196, 197)] == [5, 6, 7]


def test_a_dimension_may_be_a_product() -> None:
    shapes = ((8, 128, 4), (1024, 4))
    assert Sizes(shapes, (Change(8, 3),)).of(1024) == 384
    assert Sizes(shapes, (Change(8, 3),), products=1024).of(1024) == 3 * 48


def test_sizes_that_differ_stay_different() -> None:
    assert not Sizes(((128, 8),), (Change(128, 8),), LARGEST).keep_apart
    assert Sizes(((128, 8),), (Change(128, 9),), LARGEST).keep_apart


@pytest.mark.parametrize(
    ("shape", "stride", "small"),
    [
        ((4, 64), (64, 1), (8, 1)),
        ((4, 64), (1, 4), (1, 4)),
        ((4, 64), (192, 1), (24, 1)),
        ((4, 64), (0, 1), (0, 1)),
    ],
    ids=["dense", "transposed", "every third row", "expanded"],
)
def test_strides_stay_what_they_are(shape: Any, stride: Any, small: Any) -> None:
    assert Sizes((shape,), (Change(64, 8),)).stride(shape, stride) == small


def test_a_constant_that_follows_from_a_size_is_known() -> None:
    sizes = Sizes(((64, 1024),), (Change(64, 4),))
    assert sizes.constant(-1 / 1024) == -1 / 64
    assert sizes.constant(0.125) == 0.5
    assert sizes.constant(0.3) == 0.3


# --- right sites -------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions, norm, activation and pool, of sizes that do not coincide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 14, 3, padding=1), nn.Conv2d(14, 14, 3, padding=1)
        self.norm = nn.BatchNorm2d(14)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.max_pool2d(F.relu(self.second(y)), 3, 2, 1).square().mean()


class Attention(nn.Module):
    """Attention written by hand, of which the mask is made by the graph."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = attentions.causal(q, k, v)
        return found


class Largest(nn.Module):
    """The largest of each row, whose place is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 100)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).max(1).values.square().sum()
        return found


NETS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(24, 100), nn.GELU(), nn.Linear(100, 24)), [torch.randn(64, 24)]
    ),
    "dropout": lambda: (
        nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 24)),
        [torch.randn(64, 24)],
    ),
    "words": lambda: (Words(300, 14), [torch.randint(0, 300, (64,))]),
    "images": lambda: (Images(), [torch.randn(10, 3, 32, 32)]),
    "norms": lambda: (Normed(), [torch.randn(64, 16)]),
    "largest": lambda: (Largest(), [torch.randn(64, 24)]),
    "attention": lambda: (Attention(), [torch.randn(2, 3, 96, 8) for _ in range(3)]),
}  # fmt: skip
UNTRIED = {"random_matmul", "scaled_norm_from_output", "masked_attention"}
"""Lossy rules whose error has no bound: no numbers are tried."""
BLOCKS = {"saved_4bit"}
"""Their blocks have a fixed size that may coincide with another."""


@functools.cache
def graph_of(name: str) -> JointGraph:
    """Traced once: sites change copies of it only."""
    torch.manual_seed(0)
    net, inputs = NETS[name]()
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    return capture(net, inputs, fused=True).joint


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.name not in UNTRIED],
                         ids=lambda rule: rule.name)  # fmt: skip
def test_real_sites_are_right_in_smaller_sizes(rule: Rule) -> None:
    """A rule's first site in every net: none is refused, and at least one is tried."""
    found = {name: next(iter(rule.find(graph_of(name))), None) for name in NETS}
    verdicts = {name: judge(graph_of(name), site) for name, site in found.items() if site}
    assert all(one.checked == one.small for one in verdicts.values())
    assert any(one.small for one in verdicts.values()) or rule.name in BLOCKS, verdicts


def rows_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls of ``rows``, first to last."""
    return list(graph.find_nodes(op="call_function", target=ROWS))


def test_loops_keep_several_chunks() -> None:
    joint = graph_of("mlp")
    graph = fx.Graph()
    where: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(joint.module.graph, where))
    for old, new in where.items():
        new.meta = dict(old.meta)
    one_site(joint, "chunked_mlp").insert(graph, where)
    call = rows_of(graph)[0]
    shapes = tuple(tuple(n.meta["val"].shape) for n in call.all_input_nodes)
    sizes = Sizes(shapes, (Change(64, 7),))
    forms = {
        n: torch.empty(sizes.shape(n.meta["val"].shape), device="meta")
        for n in call.all_input_nodes
    }
    args, _ = small_call(call, forms, sizes, False)
    before: Any = fx.map_arg(call.args, lambda n: n.meta["val"])
    after: Any = fx.map_arg(args, forms.__getitem__)
    whole, small = RowsCall(*before), RowsCall(*after)
    assert whole.chunk < whole.total
    assert small.chunk < small.total < whole.total


# --- sabotage ----------------------------------------------------------------------------------


def in_programs(change: Callable[[Instruction], Instruction]) -> Callable[[Any, Any], None]:
    """A mutation of the instructions in calls of ``rows``."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        done = False
        for call in rows_of(graph):
            program = parse(str(call.args[2]))
            loop = tuple(change(one) for one in program.loop)
            done = done or loop != program.loop
            text = dump(replace(program, loop=loop))
            call.args = (*call.args[:2], text, *call.args[3:])
        assert done, "nothing was changed"

    return apply


def other_constant(one: Instruction) -> Instruction:
    """A factor is off by a tenth."""
    args = tuple(a * 1.1 if type(a) is float else a for a in one.args)
    return replace(one, args=args)


def without_mask(one: Instruction) -> Instruction:
    """What is masked is as what is not."""
    if one.op != "aten.where.self":
        return one
    return replace(one, args=(one.args[0], one.args[2], one.args[2]))


def in_stand_ins(make: Callable[[Any, fx.Node], fx.Node]) -> Callable[[Any, Any], None]:
    """A mutation of what the site gives, where it has rows and columns."""

    def apply(graph: fx.Graph, found: dict[Any, Any]) -> None:
        done = False
        for old, new in found.items():
            if new.meta["val"].dim() >= 2:
                with graph.inserting_after(new):
                    first = new
                with_more = make(graph, first)
                found[old], done = with_more, True
        assert done, "nothing was changed"

    return apply


def _after(graph: Any, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_after(node):
        return add_call(graph, target, (node, *args), node)


def shifted(graph: Any, node: fx.Node) -> fx.Node:
    """Each row is that of its neighbour."""
    return _after(graph, node, ATEN.roll.default, [1], [0])


def flipped(graph: Any, node: fx.Node) -> fx.Node:
    """Columns are in the order of another axis."""
    return _after(graph, node, ATEN.flip.default, [1])


BROKEN: dict[str, tuple[str, str, Callable[[Any, Any], None]]] = {
    "a wrong constant": ("mlp", "chunked_mlp", in_programs(other_constant)),
    "a missing mask": ("attention", "chunked_attention", in_programs(without_mask)),
    "a wrong axis": ("mlp", "chunked_mlp", in_stand_ins(flipped)),
    "rows shifted": ("mlp", "chunked_mlp", in_stand_ins(shifted)),
    "shifted masks": ("dropout", "packed_masks", in_stand_ins(shifted)),
    "shifted norms": ("norms", "norm_from_output", in_stand_ins(shifted)),
    "shifted images": ("images", "pool_gradient", in_stand_ins(shifted)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_stand_ins_are_refused_in_smaller_sizes(name: str) -> None:
    net, rule, change = BROKEN[name]
    joint = graph_of(net)
    site: Site = one_site(joint, rule)
    assert judge(joint, site).small
    with pytest.raises(VerificationFailed, match=r"on random numbers"):
        judge(joint, broken(site, change))


def test_a_loop_without_its_last_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the last chunk are missing in all sums."""
    joint = graph_of("mlp")
    site = one_site(joint, "chunked_mlp")
    monkeypatch.setattr(operator, "pieces", lambda total, size: pieces(total, size)[:-1])
    with pytest.raises(VerificationFailed, match="on random numbers"):
        judge(joint, site)


# --- what does not fit -------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes so small that no other would do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.relu(), 0.5).square().sum()


def test_a_site_that_cannot_be_shrunk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not looked at again: sizes are tried for seconds, and layers are alike."""
    joint = capture(Odd(), [torch.randn(5, 3, requires_grad=True)], fused=True).joint
    site = next(s for rule in RULES if rule.name == "packed_masks" for s in rule.find(joint))
    verdict = judge(joint, site)
    assert not verdict.checked
    ((_, why),) = verdict.unchecked
    assert why.startswith("it is too large to be run, and no smaller sizes fit it")
    monkeypatch.delattr(spot_checks._Trial, "verdict")
    assert judge(joint, site).unchecked == verdict.unchecked


def test_sizes_that_calls_contradict_do_not_fit() -> None:
    """Columns 60 to 64 are no part of anything that becomes smaller."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 64, device="meta")
    y = add_call(graph, ATEN.slice.Tensor, (x, 1, 0, 61), x)
    z = add_call(graph, ATEN.neg.default, (y,), x)
    graph.output((z,))
    part = Part.of(SiteCut(graph, {z: z}, (), {}), None)
    with pytest.raises(Misfit, match=r"it stays too large|no smaller sizes fit it"):
        shrinking.shrunk(part, 1 << 10)


def test_where_small_numbers_differ_the_whole_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = graph_of("mlp")
    site = one_site(joint, "chunked_mlp")
    monkeypatch.setattr(spot_checks, "MOST_BYTES", 1 << 29)
    compared = spot_checks._compared

    def differs_where_small(*args: Any) -> str:
        return "different" if 50 in args[1].shape or 32 in args[1].shape else compared(*args)

    monkeypatch.setattr(spot_checks, "_compared", differs_where_small)
    verdict = judge(joint, site)
    assert (verdict.checked, verdict.small) == (1, 0)


def test_numbers_are_tried_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, seen, run = torch.get_num_threads(), set[int](), spot_checks._run
    torch.set_num_threads(threads + 1)

    def counted(*args: Any) -> None:
        seen.add(torch.get_num_threads())
        run(*args)

    monkeypatch.setattr(spot_checks, "_run", counted)
    try:
        joint = graph_of("mlp")
        assert judge(joint, one_site(joint, "chunked_mlp")).checked == 1
        assert (seen, torch.get_num_threads()) == ({1}, threads + 1)
    finally:
        torch.set_num_threads(threads)
