"""Calls that write over an operand: which, which not, and what the verifier says of wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from fxremat.errors import VerificationFailed
from fxremat.passes import inplace
from fxremat.passes.halves import Rewritten
from fxremat.passes.inplace import rewrite
from fxremat.passes.nodes import add_call
from fxremat.runtime import kernels
from fxremat.verify.aliasing import check_in_place
from tests.conftest import Golden
from tests.graphs import batch
from tests.random_nets import judge, written_over

aten = torch.ops.aten
Build = Callable[["Graph"], Sequence[fx.Node]]


class Graph:
    """A joint graph built by hand, of matrices of 4 by 4 where nothing else is said."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = torch._subclasses.FakeTensorMode()
        self.x = self.input("primals_1")
        self.w = self.input("primals_2")

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape or (4, 4), dtype=dtype)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        return add_call(self.graph, target, args, self.x)

    def relu(self, x: fx.Node) -> fx.Node:
        return self.call(aten.relu.default, x)

    def addmm(self, acc: fx.Node, a: fx.Node, b: fx.Node | None = None) -> fx.Node:
        return self.call(aten.addmm.default, acc, a, b or self.w)

    def view(self, x: fx.Node, *shape: int) -> fx.Node:
        return self.call(aten.view.default, x, list(shape))


def planned(build: Build, saved: Sequence[int] = ()) -> Rewritten:
    """A graph that returns what ``build`` gives; ``saved`` of these are saved, not returned."""
    made = Graph()
    results = list(build(made))
    ends = [n for i, n in enumerate(results) if i not in saved]
    made.graph.output(tuple(ends))
    made.graph.lint()
    module = fx.GraphModule({}, made.graph)
    return Rewritten(module, tuple(results[i] for i in saved))


def after(build: Build, saved: Sequence[int] = (), forward: int = 99) -> Rewritten:
    """What the rewriting makes of it, judged, and run."""
    before = planned(build, saved)
    found = rewrite(before, forward)
    module = found.module
    module.graph.lint()
    judge(before, found, forward)
    assert runs_alike(before.module, module)
    return found


def arguments(module: fx.GraphModule) -> list[Tensor]:
    dice = torch.Generator().manual_seed(3)
    given = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            exact = torch.randint(-2, 3, val.shape, generator=dice)
            given.append(exact.remainder(2) if val.dtype == torch.int64 else exact.to(val.dtype))
    return given


def runs_alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Small whole numbers: every order of a sum gives the same."""
    first, second = arguments(one), arguments(other)
    expected, got = fx.Interpreter(one).run(*first), fx.Interpreter(other).run(*second)
    return all(map(torch.equal, (*expected, *first), (*got, *second)))


def matmul_onto_relu(g: Graph) -> list[fx.Node]:
    return [g.relu(g.addmm(g.relu(g.x), g.x))]


def test_a_product_is_added_to_an_operand_that_dies(golden: Golden) -> None:
    found = after(matmul_onto_relu)
    assert written_over(found.module.graph) == [("addmm_default", "relu_default")]
    golden(str(found.module.graph))


def batched(g: Graph) -> list[fx.Node]:
    a, b = g.view(g.x, 2, 2, 4), g.view(g.w, 2, 4, 2)
    return [g.call(aten.baddbmm.default, g.call(aten.bmm.default, a, b), a, b)]


def through_a_view(g: Graph) -> list[fx.Node]:
    seen = g.view(g.relu(g.view(g.x, 2, 2, 4)), 4, 4)
    return [g.relu(g.view(g.addmm(seen, g.x), 16))]


def rows(g: Graph) -> list[fx.Node]:
    index = g.input("primals_3", 4, dtype=torch.int64)
    return [g.call(aten.index_put.default, g.relu(g.x), [index], g.w, True)]


def chained(g: Graph) -> list[fx.Node]:
    return [g.addmm(g.addmm(g.addmm(g.relu(g.x), g.x), g.w), g.x)]


REWRITTEN: dict[str, tuple[Build, int]] = {
    "batched": (batched, 1),
    "through a view": (through_a_view, 1),
    "rows": (rows, 1),
    "chained": (chained, 3),
    "read before": (lambda g: [z := g.relu(y := g.relu(g.x)), g.addmm(y, z)], 1),
}


def shuffled(g: Graph) -> list[fx.Node]:
    turned = g.call(aten.reshape.default, g.call(aten.t.default, g.relu(g.x)), [2, 8])
    return [g.addmm(g.view(turned, 4, 4), g.x)]


def expanded(g: Graph) -> list[fx.Node]:
    row = g.relu(g.call(aten.select.int, g.x, 0, 0))
    return [g.addmm(g.call(aten.expand.default, row, [4, 4]), g.x)]


def part(g: Graph) -> list[fx.Node]:
    big = g.relu(g.call(aten.cat.default, [g.x, g.w]))
    return [g.addmm(g.call(aten.slice.Tensor, big, 0, 0, 4), g.x)]


def view_read_later(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    seen = g.call(aten.slice.Tensor, y, 0, 0, 2)
    return [g.addmm(y, g.x), g.relu(seen)]


NOT_REWRITTEN: dict[str, Build] = {
    "an input": lambda g: [g.addmm(g.x, g.w)],
    "a view of an input": lambda g: [
        g.addmm(g.call(aten.t.default, g.call(aten.t.default, g.x)), g.w)
    ],
    "a result": lambda g: [y := g.relu(g.x), g.addmm(y, g.x)],
    "a view of it is a result": lambda g: [g.view(y := g.relu(g.x), 16), g.addmm(y, g.x)],
    "read later": lambda g: [g.addmm(y := g.relu(g.x), g.x), g.relu(y)],
    "a view of it is read later": view_read_later,
    "read by the call": lambda g: [g.addmm(y := g.relu(g.x), y)],
    "expanded": expanded,
    "smaller": lambda g: [g.addmm(g.relu(g.call(aten.select.int, g.x, 0, 0)), g.x)],
    "a part": part,
    "transposed": lambda g: [g.addmm(g.call(aten.t.default, g.relu(g.x)), g.x)],
    "shuffled": shuffled,
    "scaled": lambda g: [
        add_call(g.graph, aten.addmm.default, (g.relu(g.x), g.x, g.w), g.x, beta=2)
    ],
}
"""What the operand is."""


@pytest.mark.parametrize("name", [*REWRITTEN, *NOT_REWRITTEN])
def test_what_is_rewritten(name: str) -> None:
    build, count = REWRITTEN.get(name) or (NOT_REWRITTEN[name], 0)
    assert len(written_over(after(build).module.graph)) == count


def test_what_is_saved_is_not_written_over() -> None:
    found = after(lambda g: [g.addmm(y := g.relu(g.x), g.x), g.view(y, 16)], saved=[1], forward=1)
    assert written_over(found.module.graph) == []


def test_what_is_saved_may_be_what_was_written() -> None:
    found = after(lambda g: [*matmul_onto_relu(g), *chained(g)], saved=[1], forward=1)
    assert len(written_over(found.module.graph)) == 4
    assert [n.name for n in found.saved] == ["relu_default_2"]


@pytest.mark.parametrize(
    ("name", "dtype", "count"), [("halve", torch.float64, 0), ("twice", torch.float32, 1)]
)
def test_custom_ops_have_forms_of_their_own(name: str, dtype: torch.dtype, count: int) -> None:
    """A result of another dtype is not written over the operand."""
    qualified = f"fxremat_test::{name}"
    torch.library.define(qualified, "(Tensor x) -> Tensor")
    torch.library.define(f"{qualified}_", "(Tensor(a!) x) -> ()")
    torch.library.impl(qualified, "default", lambda x: (x * 2).to(dtype))
    torch.library.register_fake(qualified, lambda x: torch.empty_like(x, dtype=dtype))
    torch.library.impl(f"{qualified}_", "default", lambda x: x.mul_(2).__class__ and None)
    torch.library.register_fake(f"{qualified}_", lambda x: None)
    op, form = (getattr(torch.ops.fxremat_test, one).default for one in (name, f"{name}_"))
    kernels.IN_PLACE[op] = form
    try:
        assert len(written_over(after(lambda g: [g.call(op, g.relu(g.x))]).module.graph)) == count
    finally:
        del kernels.IN_PLACE[op]


def test_operators_add_to_what_is_there_in_any_layout() -> None:
    for acc in (batch(2, 3, 5), batch(5, 3, 2).permute(2, 1, 0)):
        a, b = batch(6, 4), batch(4, 5)
        expected = acc.reshape(6, 5) + a @ b
        torch.ops.fxremat.addmm_into(acc, a, b)
        torch.testing.assert_close(acc.reshape(6, 5), expected)
        a, b = batch(2, 3, 4), batch(2, 4, 5)
        expected = acc + a @ b
        torch.ops.fxremat.baddbmm_into(acc, a, b)
        torch.testing.assert_close(acc, expected)


# --- the verifier -------------------------------------------------------------------------


def forced(build: Build, monkeypatch: Any, saved: Sequence[int] = (), forward: int = 99) -> str:
    """What the verifier says of a rewriting that asks nobody whether the operand dies."""
    monkeypatch.setattr(inplace._InPlaceWriter, "may_write", lambda self, node, owner: True)
    before = planned(build, saved)
    now = rewrite(before, forward)
    assert now is not before
    with pytest.raises(VerificationFailed) as caught:
        judge(before, now, forward)
    return caught.value.detail


NOT_THE_SAME = "addmm_default_into computes what the graph did not compute before"
SAVED = "addmm_default_into writes over relu_default, which the forward saved"
COVERED = ("covers_storage", True)
LATER = "after addmm_default_into wrote over it"


@pytest.mark.parametrize(
    ("operand", "unasked", "said"),
    [
        ("read later", None, f"relu_default_1 reads relu_default {LATER}"),
        ("a view of it is read later", None, f"relu_default_1 reads slice_tensor {LATER}"),
        ("a view of it is a result", None, "result 0 is not what it was"),
        ("an input", ("_is_fresh", True),
         "addmm_default_into writes over primals_1, which the graph does not own"),
        ("expanded", COVERED, NOT_THE_SAME),
        ("transposed", COVERED, NOT_THE_SAME),
        ("a part", COVERED, NOT_THE_SAME),
        ("shuffled", COVERED, NOT_THE_SAME),
        ("read by the call", ("_tensors", []),
         "addmm_default_into reads relu_default while it writes over it"),
    ],
)  # fmt: skip
def test_the_verifier_says_what_is_wrong(
    operand: str, unasked: tuple[str, Any] | None, said: str, monkeypatch: Any
) -> None:
    """``unasked`` is what the rewriting asks nobody, beside whether the operand dies."""
    if unasked is not None:
        monkeypatch.setattr(inplace, unasked[0], lambda _: unasked[1])
    assert forced(NOT_REWRITTEN[operand], monkeypatch) == said


@pytest.mark.parametrize("through_view", [False, True], ids=["itself", "by a view"])
def test_the_verifier_sees_a_saved_value_written(through_view: bool, monkeypatch: Any) -> None:
    def build(g: Graph) -> list[fx.Node]:
        y, tangent = g.relu(g.x), g.relu(g.w)
        return [g.relu(g.x), g.addmm(y, tangent), g.view(y, 16) if through_view else y]

    assert forced(build, monkeypatch, saved=[2], forward=1) == SAVED


def test_the_verifier_sees_overlapping_memory_written() -> None:
    before, wrong = planned(expanded), Graph()
    row = wrong.relu(wrong.call(aten.select.int, wrong.x, 0, 0))
    wide = wrong.call(aten.expand.default, row, [4, 4])
    call = wrong.graph.call_function(kernels.addmm_into, (wide, wrong.x, wrong.w))
    call.meta["partitioner_tag"] = "must_be_in_backward"
    wrong.graph.output((wide,))
    with pytest.raises(VerificationFailed, match="expand_default, which is not all of its memory"):
        check_in_place(before.module.graph, wrong.graph, saved=[], num_forward_outputs=0)


def random_graph(seed: int) -> Build:
    """Products, loops and views on what was computed before, read again at random."""

    def build(g: Graph) -> list[fx.Node]:
        dice = random.Random(seed)
        known = [g.x, g.w]
        flat: list[fx.Node] = []
        for _ in range(dice.randint(3, 12)):
            kind = dice.choice(("addmm",) * 4 + ("relu", "t", "round", "flat", "shuffle"))
            one = dice.choice(known[-4:])
            if kind == "addmm":
                known.append(g.addmm(one, dice.choice(known), dice.choice(known)))
            elif kind == "flat":
                flat.append(g.call(aten.reshape.default, one, [16]))
            elif kind == "shuffle":
                shuffled = g.call(aten.reshape.default, g.call(aten.t.default, one), [2, 8])
                known.append(g.call(aten.reshape.default, shuffled, [4, 4]))
            elif kind == "round":
                seen = g.call(aten.reshape.default, one, [2, 8])
                known.append(g.call(aten.reshape.default, g.relu(seen), [4, 4]))
            else:
                known.append(g.call(aten.t.default, one) if kind == "t" else g.relu(one))
        return [*dice.sample(known, min(2, len(known))), *flat, g.relu(known[-1])]

    return build


@given(st.integers(0, 10**6), st.booleans())
def test_any_graph_computes_the_same(seed: int, saves: bool) -> None:
    build = random_graph(seed)
    after(build, saved=[0] if saves else [], forward=99)


@given(st.integers(0, 10**6))
def test_the_verifier_misses_no_wrong_graph(seed: int) -> None:
    """Where a rewriting without questions computes something else, the verifier says so."""
    before = planned(random_graph(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inplace._InPlaceWriter, "may_write", lambda self, node, owner: True)
        now = rewrite(before, 99)
    if not runs_alike(before.module, now.module):
        with pytest.raises(VerificationFailed):
            judge(before, now)
