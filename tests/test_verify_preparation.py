"""Faults of what prepares a joint graph: each is refused by the name of its pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.compat.joint_graph import user_tag
from fxremat.compile.draft import Draft
from fxremat.cost import second_runs
from fxremat.errors import VerificationFailed
from fxremat.passes.halves import RECOMPUTED
from fxremat.runtime import accumulated
from fxremat.verify.preparation import BeforePass, Rights
from tests import nets
from tests.by_hand import ByHand
from tests.examples import examples
from tests.graphs import Net, batch, calls, copied, replaced, results_of
from tests.host_weights import batches, language, loss_of, moved
from tests.prepared import Spoil, as_given, prepare_wrongly, prepared, twice
from tests.test_verify_data_flow import (
    copy_a_random_call,
    lose_an_update,
    one,
    read_a_copied_random_call,
)

ATEN = torch.ops.aten


def draft_of(name: str, fused: bool) -> Draft:
    """A graph to prepare or to spoil: a copy, as each is traced once for all tests."""
    given = _traced(name, fused)
    return replace(given, module=copy.deepcopy(given.module))


@cache
def _traced(name: str, fused: bool) -> Draft:
    if name == "twice":
        return as_given(twice(), [batch(8, 8)], fused=fused)
    if name == "noise":
        return as_given(noise(), [batch(8, 8)], fused=fused)
    if name == "host":
        words, targets = next(batches(1))
        return as_given(loss_of(moved(language(tied=True))), [words, targets], fused=fused)
    return as_given(*nets.make(name), fused=fused)


# --- what is right ------------------------------------------------------------------------


@pytest.mark.parametrize("name", nets.NAMES)
def test_right_graphs_pass(name: str) -> None:
    """As eager operators they are verified wherever tests capture a graph."""
    assert "accumulation" in prepared(draft_of(name, fused=True), fused=True, accumulate=True)


def test_an_overwritten_input_that_the_backward_reads_is_cloned_once() -> None:
    """By us, or by torch itself (2.15)."""
    draft = draft_of("old buffer", True)
    by_torch = len(calls(draft.module.graph, ATEN.clone))
    assert ("mutated inputs" in prepared(draft, fused=True)) == (by_torch == 0)
    assert len(calls(draft.module.graph, ATEN.clone)) == 1


def noise() -> Net:
    """Two random calls that look alike; torch's list of random calls does not have them."""

    def step(net: Any, x: torch.Tensor) -> Any:
        y = net.linear(x)
        return ((y * torch.randn_like(y)).sin() - (y * torch.randn_like(y)).cos()).sum()

    return Net(step, linear=nn.Linear(8, 8))


def test_random_calls_that_look_alike_are_not_merged() -> None:
    draft = as_given(noise(), [batch(4, 8)])
    prepared(draft, fused=False)
    found = calls(draft.module.graph, ATEN.randn_like)
    assert len(found) == 2
    assert all(set(node.kwargs) == {"pin_memory"} for node in found)


# --- what is wrong ------------------------------------------------------------------------


def operand(node: fx.Node, place: int = 0) -> fx.Node:
    """An argument of a call that is the result of another."""
    found = node.args[place]
    (found,) = found if isinstance(found, list) else (found,)
    assert isinstance(found, fx.Node)
    return found


def joined(graph: fx.Graph) -> fx.Node:
    """The product that is added to another."""
    return next(n for n in calls(graph, ATEN.addmm) if operand(n).target is ATEN.mm.default)


def lose_a_summand(graph: fx.Graph) -> None:
    node = joined(graph)
    node.target, node.args = ATEN.mm.default, node.args[1:]


def scale_a_summand(graph: fx.Graph) -> None:
    joined(graph).kwargs = {"alpha": 2}


def turn_a_product_round(graph: fx.Graph) -> None:
    node = joined(graph)
    node.args = (node.args[0], node.args[2], node.args[1])


def index_by(graph: fx.Graph, target: Any, argument: Any) -> None:
    """Rows are written where this makes of the index that they have."""
    node = one(graph, ATEN.index_put)
    index = operand(node, 1)
    with graph.inserting_before(node):
        another = graph.call_function(target, (index, argument))
    another.meta = dict(index.meta)
    node.args = (node.args[0], [another], *node.args[2:])


def let_a_bound_slip(graph: fx.Graph) -> None:
    index_by(graph, ATEN.clamp_max.default, 3)


def take_another_index(graph: fx.Graph) -> None:
    index_by(graph, ATEN.flip.default, [0])


def add_what_the_mask_hides(graph: fx.Graph) -> None:
    node = one(graph, ATEN.index_put)
    masked = operand(node, 2)
    node.args = (*node.args[:2], masked.args[1], True)


def write_rows_and_not_add(graph: fx.Graph) -> None:
    node = one(graph, ATEN.index_put)
    node.args = (*node.args[:3], False)


def merge_what_is_drawn(graph: fx.Graph) -> None:
    first, second = calls(graph, ATEN.randn_like)
    replaced(second, first)


def update_from_another(graph: fx.Graph) -> None:
    first, second = calls(graph, ATEN.copy_)[1:3]
    first.args = (first.args[0], second.args[1])


def run_again(node: fx.Node) -> None:
    """The last reader gets a call of its own."""
    late = list(node.users)[-1]
    with node.graph.inserting_before(late):
        late.replace_input_with(node, node.graph.node_copy(node))


def run_a_custom_op_again(graph: fx.Graph) -> None:
    run_again(one(graph, torch.ops.fxremat_tests.triple))


def run_again_what_must_be_saved(graph: fx.Graph) -> None:
    run_again(next(n for n in calls(graph, ATEN.addmm) if user_tag(n) == "MUST_SAVE"))


def copy_wrongly(graph: fx.Graph) -> None:
    node = next(n for n in calls(graph, ATEN.tanh) + calls(graph, ATEN.gelu)
                if n.name.endswith(RECOMPUTED))  # fmt: skip
    node.replace_input_with(operand(node), graph.find_nodes(op="placeholder")[-1])


def clone_of(graph: fx.Graph) -> fx.Node:
    return next(n for n in calls(graph, ATEN.clone) if operand(n).op == "placeholder")


def read_what_was_written(graph: fx.Graph) -> None:
    clone = clone_of(graph)
    replaced(clone, operand(clone))


def clone_another_input(graph: fx.Graph) -> None:
    clone = clone_of(graph)
    others = [n for n in graph.find_nodes(op="placeholder") if n is not clone.args[0]]
    clone.args = (next(n for n in others if n.meta["val"].shape == clone.meta["val"].shape),)


def given_up(graph: fx.Graph) -> list[fx.Node]:
    return calls(graph, accumulated)


def give_up_for_another(graph: fx.Graph) -> None:
    first, second = given_up(graph)[:2]
    weights = first.args[1], second.args[1]
    first.args, second.args = (first.args[0], weights[1], []), (second.args[0], weights[0], [])


def give_up_twice(graph: fx.Graph) -> None:
    copied(given_up(graph)[0])


def give_up_something_else(graph: fx.Graph) -> None:
    node = given_up(graph)[0]
    gradient = operand(node)
    node.args = (gradient.all_input_nodes[0], *node.args[1:])


def return_the_same_memory_twice(graph: fx.Graph) -> None:
    results = results_of(graph)
    results[results.index(None)] = given_up(graph)[0].args[0]
    graph.output_node().args = (tuple(results),)


def swap_gradients(graph: fx.Graph) -> None:
    results = results_of(graph)
    first, second = (results.index(node.args[0]) for node in given_up(graph)[:2])
    results[first], results[second] = results[second], results[first]
    graph.output_node().args = (tuple(results),)


def keep_on_the_device(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if "put" in str(n.target) and "fxremat" in str(n.target))
    replaced(node, node.args[0])


@dataclass(frozen=True)
class Case:
    """A pass, what spoils its work, and the model and mode where it has something to do."""

    of: str
    spoil: Spoil
    model: str
    fused: bool = True
    accumulate: bool = False


SUMS, TAGS, INPUTS = "gradient sums", "must recompute", "mutated inputs"
CASES = (
    Case(SUMS, lose_a_summand, "twice"),
    Case(SUMS, scale_a_summand, "twice"),
    Case(SUMS, turn_a_product_round, "twice"),
    Case(SUMS, let_a_bound_slip, "tied"),
    Case(SUMS, take_another_index, "tied"),
    Case(SUMS, add_what_the_mask_hides, "tied"),
    Case(SUMS, write_rows_and_not_add, "tied"),
    Case("clean up", read_a_copied_random_call, "dropout", fused=False),
    Case("clean up", copy_a_random_call, "dropout", fused=False),
    Case("clean up", merge_what_is_drawn, "noise", fused=False),
    Case("clean up", lose_an_update, "batch norm"),
    Case("clean up", update_from_another, "batch norm"),
    Case("clean up", run_a_custom_op_again, "custom op"),
    Case(TAGS, read_a_copied_random_call, "save nothing", fused=False),
    Case(TAGS, run_again_what_must_be_saved, "save everything", fused=False),
    Case(TAGS, copy_wrongly, "save nothing", fused=False),
    Case(INPUTS, read_what_was_written, "old buffer"),
    Case(INPUTS, clone_another_input, "old buffer"),
    Case("accumulation", give_up_for_another, "twice", accumulate=True),
    Case("accumulation", give_up_twice, "twice", accumulate=True),
    Case("accumulation", give_up_something_else, "twice", accumulate=True),
    Case("accumulation", return_the_same_memory_twice, "twice", accumulate=True),
    Case("accumulation", swap_gradients, "twice", accumulate=True),
    Case("sums before leaving", keep_on_the_device, "host", fused=False),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.of}: {case.spoil.__name__}")
def test_sabotage_is_refused_by_name(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_runs, "is_a_rank", lambda: True)  # custom ops are not tried
    draft = draft_of(case.model, case.fused)
    with pytest.raises(VerificationFailed, match=f"pass {case.of}: "):
        prepare_wrongly(draft, case.of, case.spoil, fused=case.fused, accumulate=case.accumulate)


# --- by hand ------------------------------------------------------------------------------


def check(before: fx.Graph, after: fx.Graph, rights: Rights) -> None:
    """One result of the forward."""
    BeforePass("by hand", rights, before, num_forward_outputs=1).check(after)


def overwriting(
    clone: str, reads: str = "clone", tag: str | None = "must_be_in_forward"
) -> fx.Graph:
    """The backward reads what a buffer held; the clone stands before the write, or after it."""
    hand = ByHand("buffer", "new", "tangents")
    buffer, new, tangent = hand.inputs.values()
    result = hand.call(ATEN.sin.default, new)
    read = {"buffer": buffer}
    if clone == "before":
        read["clone"] = hand.call(ATEN.clone.default, buffer)
        read["clone"].meta["partitioner_tag"] = tag
    early = hand.call(ATEN.cos.default, read[reads]) if clone != "after" else None
    hand.call(ATEN.copy_.default, buffer, new)
    if clone == "after":
        read["clone"] = hand.call(ATEN.clone.default, buffer)
    factor = early or hand.call(ATEN.cos.default, read[reads])
    return hand.done(result, hand.call(ATEN.mul.Tensor, factor, tangent))


def test_the_backward_may_read_a_clone_from_before_the_write() -> None:
    plain = overwriting("none", "buffer")
    check(plain, overwriting("before"), Rights(clone=True))
    with pytest.raises(VerificationFailed, match="computed differently"):
        check(plain, overwriting("after"), Rights(clone=True))
    with pytest.raises(VerificationFailed, match="cos_default reads buffer when it is over"):
        check(plain, overwriting("before", "buffer"), Rights(clone=True))
    with pytest.raises(VerificationFailed, match="clone_default reads buffer when it is over"):
        check(plain, overwriting("before", tag=None), Rights(clone=True))
    with pytest.raises(VerificationFailed, match="computed differently"):
        check(plain, overwriting("before"), Rights())


def adding(*names: str) -> fx.Graph:
    """A sum of inputs from the left to the right, as the only result."""
    hand = ByHand("a", "b", "tangents_1", "tangents_2")
    total, *others = (hand.inputs[name] for name in names)
    for other in others:
        total = hand.call(ATEN.add.Tensor, total, other)
    return hand.done(total)


def test_only_what_depends_on_a_tangent_is_added_up_in_another_order() -> None:
    check(
        adding("a", "tangents_1", "tangents_2"),
        adding("tangents_2", "tangents_1", "a"),
        Rights(regroup=True),
    )
    for rights, names in (Rights(regroup=True), ("a", "b")), (Rights(), ("a", "tangents_1")):
        with pytest.raises(VerificationFailed, match="computed differently"):
            check(adding(*names), adding(*reversed(names)), rights)


def added_up(hand: ByHand, terms: list[int], data: st.DataObject) -> fx.Node:
    """Products are added up in any order, by any call, with any views between them."""
    left: list[int | fx.Node] = list(terms)

    def factors(term: int) -> tuple[fx.Node, fx.Node]:
        return hand.inputs["tangents"], hand.inputs[f"x{term}"]

    def made(one: int | fx.Node) -> fx.Node:
        return one if isinstance(one, fx.Node) else hand.call(ATEN.mm.default, *factors(one))

    while len(left) > 1:
        one, other = (left.pop(data.draw(st.integers(0, len(left) - 1))) for _ in range(2))
        first = made(one)
        if isinstance(other, int) and data.draw(st.booleans()):
            total = hand.call(ATEN.addmm.default, first, *factors(other))
        else:
            shape = data.draw(st.sampled_from(((4, 4), (16,), (2, 8))))
            pair = [hand.call(ATEN.view.default, n, shape) for n in (first, made(other))]
            total = hand.call(ATEN.view.default, hand.call(ATEN.add.Tensor, *pair), (4, 4))
        left.append(total)
    return made(left[0])


@examples(40)
@given(st.data())
def test_a_sum_is_the_multiset_of_its_summands(data: st.DataObject) -> None:
    some = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    terms = data.draw(some)
    others = data.draw(st.one_of(st.permutations(terms), some))
    graphs = []
    for each in (terms, others):
        hand = ByHand("tangents", *(f"x{k}" for k in range(4)))
        graphs.append(hand.done(added_up(hand, list(each), data)))
    if sorted(terms) == sorted(others):
        check(graphs[0], graphs[1], Rights(regroup=True))
    else:
        with pytest.raises(VerificationFailed, match="pass by hand: result 0"):
            check(graphs[0], graphs[1], Rights(regroup=True))
