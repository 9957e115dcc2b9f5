"""Calls that write over an operand: which, which not, and what the judge says of wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat import compat
from fxremat.checking.aliasing import check_in_place
from fxremat.cost.peak import measure_peak
from fxremat.errors import VerificationFailed
from fxremat.passes import inplace
from fxremat.passes.gradient_sums import accumulate_sums
from fxremat.passes.halves import Rewritten
from fxremat.passes.inplace import possible, rewrite
from fxremat.passes.nodes import add_call
from fxremat.passes.recompute import apply_plan
from fxremat.runtime import inplace as runtime
from tests.conftest import Golden
from tests.graphs import (
    Capture,
    Net,
    again_after_tangents,
    assert_same,
    batch,
    capture,
    compiled,
    everything_again,
    train,
)

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


def planned(build: Build, saved: Sequence[int] = (), forward: int | None = None) -> Rewritten:
    """A graph that returns what ``build`` gives; ``saved`` of these are saved, not returned."""
    made = Graph()
    results = list(build(made))
    ends = [n for i, n in enumerate(results) if i not in saved]
    made.graph.output(tuple(ends))
    made.graph.lint()
    module = fx.GraphModule({}, made.graph)
    return Rewritten(module, tuple(results[i] for i in saved), ())


def after(build: Build, saved: Sequence[int] = (), forward: int = 99) -> inplace.InPlace:
    """What the rewriting makes of it, judged, and run."""
    before = planned(build, saved)
    found = rewrite(before, forward)
    module = found.rewritten.module
    module.graph.lint()
    judge(before, found.rewritten, forward)
    assert_runs_alike(before.module, module)
    return found


def judge(before: Rewritten, now: Rewritten, forward: int = 99) -> None:
    check_in_place(
        before.module.graph,
        now.module.graph,
        saved=[n.name for n in now.saved],
        num_forward_outputs=forward,
    )


def arguments(module: fx.GraphModule) -> list[Tensor]:
    dice = torch.Generator().manual_seed(3)
    given = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            exact = torch.randint(-2, 3, val.shape, generator=dice)
            given.append(exact.remainder(2) if val.dtype == torch.int64 else exact.to(val.dtype))
    return given


def assert_runs_alike(one: fx.GraphModule, other: fx.GraphModule) -> None:
    """Small whole numbers: every order of a sum gives the same."""
    first, second = arguments(one), arguments(other)
    expected, got = fx.Interpreter(one).run(*first), fx.Interpreter(other).run(*second)
    for a, b in zip((*expected, *first), (*got, *second), strict=True):
        assert torch.equal(a, b)


def matmul_onto_relu(g: Graph) -> list[fx.Node]:
    return [g.relu(g.addmm(g.relu(g.x), g.x))]


def test_a_product_is_added_to_an_operand_that_dies(golden: Golden) -> None:
    found = after(matmul_onto_relu)
    assert found.pairs == (("addmm_default", "relu_default"),)
    golden(str(found.rewritten.module.graph))


def test_nothing_to_do_gives_the_same_graph() -> None:
    before = planned(lambda g: [g.relu(g.x)])
    assert rewrite(before, 1).rewritten is before


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


def read_before(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    z = g.relu(y)
    return [z, g.addmm(y, z)]


@pytest.mark.parametrize(
    ("build", "count"),
    [(batched, 1), (through_a_view, 1), (rows, 1), (chained, 3), (read_before, 1)],
)
def test_rewritten(build: Build, count: int) -> None:
    assert len(after(build).pairs) == count


def operand_is_an_input(g: Graph) -> list[fx.Node]:
    return [g.addmm(g.x, g.w)]


def operand_is_a_view_of_an_input(g: Graph) -> list[fx.Node]:
    return [g.addmm(g.call(aten.t.default, g.call(aten.t.default, g.x)), g.w)]


def operand_is_a_result(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    return [y, g.addmm(y, g.x)]


def view_of_it_is_a_result(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    return [g.view(y, 16), g.addmm(y, g.x)]


def operand_is_read_later(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    z = g.addmm(y, g.x)
    return [z, g.relu(y)]


def view_of_it_is_read_later(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    seen = g.call(aten.slice.Tensor, y, 0, 0, 2)
    return [g.addmm(y, g.x), g.relu(seen)]


def operand_is_read_by_the_call(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    return [g.addmm(y, y)]


def operand_is_expanded(g: Graph) -> list[fx.Node]:
    row = g.relu(g.call(aten.select.int, g.x, 0, 0))
    return [g.addmm(g.call(aten.expand.default, row, [4, 4]), g.x)]


def operand_is_smaller(g: Graph) -> list[fx.Node]:
    return [g.addmm(g.relu(g.call(aten.select.int, g.x, 0, 0)), g.x)]


def operand_is_a_part(g: Graph) -> list[fx.Node]:
    big = g.relu(g.call(aten.cat.default, [g.x, g.w]))
    return [g.addmm(g.call(aten.slice.Tensor, big, 0, 0, 4), g.x)]


def operand_is_transposed(g: Graph) -> list[fx.Node]:
    return [g.addmm(g.call(aten.t.default, g.relu(g.x)), g.x)]


def operand_is_shuffled(g: Graph) -> list[fx.Node]:
    shuffled = g.call(aten.reshape.default, g.call(aten.t.default, g.relu(g.x)), [2, 8])
    return [g.addmm(g.view(shuffled, 4, 4), g.x)]


def operand_is_scaled(g: Graph) -> list[fx.Node]:
    return [add_call(g.graph, aten.addmm.default, (g.relu(g.x), g.x, g.w), g.x, beta=2)]


@pytest.mark.parametrize(
    "build",
    [
        operand_is_an_input,
        operand_is_a_view_of_an_input,
        operand_is_a_result,
        view_of_it_is_a_result,
        operand_is_read_later,
        view_of_it_is_read_later,
        operand_is_read_by_the_call,
        operand_is_expanded,
        operand_is_smaller,
        operand_is_a_part,
        operand_is_transposed,
        operand_is_shuffled,
        operand_is_scaled,
    ],
)
def test_not_rewritten(build: Build) -> None:
    assert after(build).pairs == ()


def saves_its_operand(g: Graph) -> list[fx.Node]:
    y = g.relu(g.x)
    return [g.addmm(y, g.x), g.view(y, 16)]


def saves_its_result(g: Graph) -> list[fx.Node]:
    return [g.relu(g.addmm(g.relu(g.x), g.x)), *chained(g)]


def test_what_is_saved_is_not_written_over() -> None:
    assert after(saves_its_operand, saved=[1], forward=1).pairs == ()


def test_what_is_saved_may_be_what_was_written() -> None:
    found = after(saves_its_result, saved=[1], forward=1)
    assert len(found.pairs) == 4
    assert [n.name for n in found.rewritten.saved] == ["relu_default_2"]


def test_another_dtype_is_not_written_over() -> None:
    torch.library.define("fxremat_test::halve", "(Tensor x) -> Tensor")
    torch.library.define("fxremat_test::halve_", "(Tensor(a!) x) -> ()")
    halve, halve_ = torch.ops.fxremat_test.halve.default, torch.ops.fxremat_test.halve_.default
    torch.library.impl("fxremat_test::halve", "default", lambda x: (x / 2).to(torch.float64))
    torch.library.register_fake("fxremat_test::halve", lambda x: x.to(torch.float64))
    runtime.declare_in_place(halve, halve_)
    try:
        assert after(lambda g: [g.call(halve, g.relu(g.x))]).pairs == ()
    finally:
        del runtime.IN_PLACE[halve]


def test_custom_ops_have_forms_of_their_own() -> None:
    torch.library.define("fxremat_test::twice", "(Tensor x) -> Tensor")
    torch.library.define("fxremat_test::twice_", "(Tensor(a!) x) -> ()")
    twice, twice_ = torch.ops.fxremat_test.twice.default, torch.ops.fxremat_test.twice_.default
    torch.library.impl("fxremat_test::twice", "default", lambda x: x * 2)
    torch.library.register_fake("fxremat_test::twice", torch.empty_like)
    torch.library.impl("fxremat_test::twice_", "default", lambda x: x.mul_(2).__class__ and None)
    torch.library.register_fake("fxremat_test::twice_", lambda x: None)
    runtime.declare_in_place(twice, twice_)
    try:
        assert len(after(lambda g: [g.call(twice, g.relu(g.x))]).pairs) == 1
    finally:
        del runtime.IN_PLACE[twice]


@pytest.mark.parametrize(
    ("op", "form"),
    [
        (aten.relu.default, aten.addmm_.default),
        (aten.addmm.default, aten.addmm.default),
        (aten.addmm.default, aten.addmm.out),
        (aten.relu_.default, aten.relu_.default),
    ],
)
def test_forms_that_do_not_fit_are_refused(op: Any, form: Any) -> None:
    with pytest.raises(ValueError, match="has to"):
        runtime.declare_in_place(op, form)
    assert runtime.IN_PLACE[aten.addmm.default] is runtime.addmm_into


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


# --- the judge ---------------------------------------------------------------------------


def forced(build: Build, monkeypatch: Any, saved: Sequence[int] = (), forward: int = 99) -> str:
    """What the judge says of a rewriting that asks nobody whether the operand dies."""
    monkeypatch.setattr(inplace._InPlaceWriter, "may", lambda self, node, owner: True)
    before = planned(build, saved)
    now = rewrite(before, forward).rewritten
    assert now is not before
    with pytest.raises(VerificationFailed) as caught:
        judge(before, now, forward)
    return caught.value.detail


def test_judge_names_a_late_reader(monkeypatch: Any) -> None:
    said = forced(operand_is_read_later, monkeypatch)
    assert said == "relu_default_1 reads relu_default after addmm_default_into wrote over it"


def test_judge_names_a_late_reader_of_a_view(monkeypatch: Any) -> None:
    said = forced(view_of_it_is_read_later, monkeypatch)
    assert said == "relu_default_1 reads slice_tensor after addmm_default_into wrote over it"


def test_judge_sees_a_result_that_changed(monkeypatch: Any) -> None:
    assert forced(view_of_it_is_a_result, monkeypatch) == "result 0 is not what it was"


def test_judge_sees_an_input_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(inplace, "_is_fresh", lambda owner: True)
    said = forced(operand_is_an_input, monkeypatch)
    assert said == "addmm_default_into writes over primals_1, which the graph does not own"


def test_judge_sees_a_saved_value_written(monkeypatch: Any) -> None:
    def build(g: Graph) -> list[fx.Node]:
        y = g.relu(g.x)
        tangent = g.relu(g.w)
        return [g.relu(g.x), g.addmm(y, tangent), y]

    said = forced(build, monkeypatch, saved=[2], forward=1)
    assert said == "addmm_default_into writes over relu_default, which the forward saved"


@pytest.mark.parametrize(
    "build",
    [operand_is_expanded, operand_is_transposed, operand_is_a_part, operand_is_shuffled],
)
def test_judge_sees_what_is_not_all_of_its_memory(build: Build, monkeypatch: Any) -> None:
    monkeypatch.setattr(inplace, "shows_all", lambda given: True)
    said = forced(build, monkeypatch)
    assert said == "addmm_default_into computes what the graph did not compute before"


def test_judge_sees_overlapping_memory_written() -> None:
    before, wrong = planned(operand_is_expanded), Graph()
    row = wrong.relu(wrong.call(aten.select.int, wrong.x, 0, 0))
    wide = wrong.call(aten.expand.default, row, [4, 4])
    call = wrong.graph.call_function(runtime.addmm_into, (wide, wrong.x, wrong.w))
    call.meta["partitioner_tag"] = "must_be_in_backward"
    wrong.graph.output((wide,))
    with pytest.raises(VerificationFailed, match="expand_default, which is not all of its memory"):
        check_in_place(before.module.graph, wrong.graph, saved=[], num_forward_outputs=0)


def test_judge_sees_an_operand_read_by_its_own_call(monkeypatch: Any) -> None:
    monkeypatch.setattr(inplace, "_tensors", lambda args: [])
    said = forced(operand_is_read_by_the_call, monkeypatch)
    assert said == "addmm_default_into reads relu_default while it writes over it"


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


def runs_alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    try:
        assert_runs_alike(one, other)
    except AssertionError:
        return False
    return True


@given(st.integers(0, 10**6), st.booleans())
def test_any_graph_computes_the_same(seed: int, saves: bool) -> None:
    build = random_graph(seed)
    after(build, saved=[0] if saves else [], forward=99)


@given(st.integers(0, 10**6))
def test_the_judge_misses_no_wrong_graph(seed: int) -> None:
    """Where a rewriting without questions computes something else, the judge says so."""
    before = planned(random_graph(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inplace._InPlaceWriter, "may", lambda self, node, owner: True)
        now = rewrite(before, 99).rewritten
    if not runs_alike(before.module, now.module):
        with pytest.raises(VerificationFailed):
            judge(before, now)


# --- training steps ----------------------------------------------------------------------


class InPlaceCapture(Capture):
    """Also sums gradients where they are computed, writes in place, and judges."""

    sums = True
    pairs: tuple[tuple[str, str], ...] = ()

    def __call__(self, module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:

            def in_place(found: Any, steps: Any, **more: Any) -> Rewritten:
                before = apply_plan(found, steps, **more)
                done = rewrite(before, found.joint.num_forward_outputs)
                judge(before, done.rewritten, found.joint.num_forward_outputs)
                self.pairs = done.pairs
                return done.rewritten

            patch.setattr("tests.graphs.apply_plan", in_place)
            patch.setattr("tests.graphs.check_data_flow", lambda *_: None)
            if self.sums:
                accumulate_sums(module.graph)
            return super().__call__(module, joint_inputs, **kwargs)


def in_place(
    function: Any, inputs: Any, choose: Any = None, *, fused: bool = True
) -> InPlaceCapture:
    """Trace a step, write in place, and compare it with the step that does not."""
    seen = InPlaceCapture(choose or (lambda p: p.base_steps()), fused)
    plain = train(function, inputs, lambda f: compiled(f, Capture(fused=fused)))
    got = train(function, inputs, lambda f: compiled(f, seen))
    for one, other in zip(plain.gradients, got.gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert_same(replace(plain, gradients=()), replace(got, gradients=()))
    return seen


def tied(words: int = 50, width: int = 8, padding: int | None = None) -> Net:
    torch.manual_seed(1)

    def forward(net: Any, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(net.inner(net.words(x)))
        scores = functional.linear(hidden, net.words.weight)
        return functional.cross_entropy(scores.view(-1, words), y.view(-1))

    table = nn.Embedding(words, width, padding_idx=padding)
    return Net(forward, words=table, inner=nn.Linear(width, width))


def words(count: int, top: int = 50) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(4)
    x, y = (torch.randint(0, top, (2, count), generator=dice) for _ in range(2))
    return x, y


def twice(width: int = 8) -> Net:
    torch.manual_seed(1)

    def forward(net: Any, x: Tensor) -> Any:
        return torch.tanh(torch.tanh(torch.tanh(x @ net.w) @ net.w) @ net.w)

    return Net(forward, w=nn.Parameter(torch.randn(width, width) / 3))


def three_readers(width: int = 8) -> Net:
    torch.manual_seed(1)

    def forward(net: Any, x: Tensor) -> Any:
        h = torch.tanh(x)
        return net.q(h) * net.k(h) * net.v(h)

    return Net(forward, **{name: nn.Linear(width, width) for name in "qkv"})


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_of_a_tied_embedding(fused: bool, padding: int | None) -> None:
    seen = in_place(tied(padding=padding), words(16), fused=fused)
    known = fused or padding is None
    assert len(seen.pairs) == (1 if known else 0)
    assert len(seen.calls(aten.add.Tensor)) == (0 if known else 1)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_a_weight_used_three_times(fused: bool) -> None:
    seen = in_place(twice(), [batch(4, 8)], fused=fused)
    assert len(seen.pairs) == 2
    assert len({owner for _, owner in seen.pairs}) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_a_value_with_three_readers(fused: bool) -> None:
    x = batch(2, 4, 8).requires_grad_()
    assert len(in_place(three_readers(), [x], fused=fused).pairs) == 2


def explicit(width: int = 8) -> Net:
    torch.manual_seed(1)

    def forward(net: Any, x: Tensor) -> Any:
        h = net.inner(torch.tanh(x))
        return torch.sin(torch.addmm(h, torch.cos(x), net.w)).sum()

    return Net(forward, inner=nn.Linear(width, width), w=nn.Parameter(batch(width, width)))


def test_an_operand_that_is_computed_anew_later_is_dead() -> None:
    """Kept, the sum's operand dies in the sum; run again, each copy dies in its copy of it."""
    net, x = explicit(), batch(8, 8).requires_grad_()
    once = in_place(net, [x], lambda p: p.base_steps())
    assert once.pairs == (("addmm_1", "addmm"),)
    again = in_place(net, [x], again_after_tangents("addmm", "addmm_1"))
    assert again.pairs == (
        ("addmm_1", "addmm"),
        ("addmm_1_recompute", "addmm_recompute"),
    )
    joint = again.joint
    assert {n.name: owner.name for n, owner in possible(joint).items()} == {"addmm_1": "addmm"}


@pytest.mark.parametrize("make", [tied, twice, three_readers])
def test_plans_that_recompute(make: Callable[[], Net]) -> None:
    inputs = words(16) if make is tied else [batch(2, 8, 8)[0].requires_grad_()]
    assert in_place(make(), inputs, everything_again).pairs


def test_possible_pairs_of_sums() -> None:
    seen = in_place(twice(), [batch(4, 8)])
    names = {n.name: owner.name for n, owner in possible(seen.joint).items()}
    assert names == {"addmm_default": "mm_3", "addmm_default_1": "addmm_default"}


def test_sums_of_others_stay() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        h = torch.tanh(x)
        return (torch.sin(h) + torch.cos(h)) @ net.w

    seen = capture(Net(forward, w=nn.Parameter(batch(8, 8))), [batch(4, 8).requires_grad_()])
    assert not accumulate_sums(seen.joint.module.graph)


def tied_rows(words: int = 50, width: int = 8) -> Net:
    """The same with rows picked by index: how an embedding is decomposed depends on torch."""
    torch.manual_seed(1)

    def forward(net: Any, x: Tensor, y: Tensor) -> Any:
        scores = torch.tanh(net.inner(net.words[x])) @ net.words.t()
        return functional.cross_entropy(scores, y)

    inner = nn.Linear(width, width, bias=False)
    return Net(forward, words=nn.Parameter(torch.randn(words, width)), inner=inner)


def test_graph_of_tied_rows(golden: Golden) -> None:
    seen = in_place(tied_rows(), [one.flatten() for one in words(16)])
    golden(str(seen.backward.graph))


# --- bytes -------------------------------------------------------------------------------


def peak(model: nn.Module, inputs: Sequence[Tensor], partition: Any) -> int:
    """Bytes of a step above what is there before, under Inductor with a partition of ours."""

    def backend(gm: fx.GraphModule, given: Any) -> Any:
        patches = {"custom_partitioner_fn": _Named(partition), "allow_buffer_reuse": False}
        return compat.compile_with_inductor(gm, given, patches)

    torch._dynamo.reset()
    call = torch.compile(model, backend=backend)

    call(*inputs).sum().backward()
    for tensor in (*model.parameters(), *inputs):
        tensor.grad = None
    return measure_peak(lambda: call(*inputs).sum().backward()).above_start_bytes


class _Named(compat.CustomPartitionerFn):
    def __init__(self, partition: Any) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return self.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Named:  # Inductor copies its configuration
        return self

    def uuid(self) -> Any:
        return None


def test_bytes_of_a_tied_embedding_under_inductor() -> None:
    """One gradient of the table is there at the peak, not two."""
    model, inputs = tied(5000, 64), words(16, 5000)
    before = peak(model, inputs, Capture(fused=True))
    now = peak(model, inputs, InPlaceCapture(fused=True))
    assert before - now == 5000 * 64 * 4


def test_bytes_of_a_weight_used_three_times_under_inductor() -> None:
    model, inputs, weight = twice(512), [batch(16, 512)], 512 * 512 * 4
    before = peak(model, inputs, Capture(fused=True))
    now = peak(model, inputs, InPlaceCapture(fused=True))
    assert (before // weight, now // weight) == (2, 1)
