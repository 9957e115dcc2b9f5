"""Training steps that write over operands: the same gradients in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.gradient_sums import GradientSums
from fxremat.passes.halves import Rewritten
from fxremat.passes.inplace import overwritable, rewrite
from fxremat.passes.recompute import apply_plan
from tests.compat_graphs import inductor_by
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
from tests.random_nets import judge, written_over

aten = torch.ops.aten

# --- training steps -----------------------------------------------------------------------


class InPlaceCapture(Capture):
    """Also sums gradients where they are computed, writes in place, and judges."""

    sums = True
    pairs: Sequence[tuple[str, str]] = ()

    def __call__(self, module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:

            def in_place(found: Any, steps: Any, **more: Any) -> Rewritten:
                before = apply_plan(found, steps, **more)
                done = rewrite(before, found.joint.num_forward_outputs)
                judge(before, done, found.joint.num_forward_outputs)
                self.pairs = written_over(done.module.graph)
                return done

            patch.setattr("tests.graphs.apply_plan", in_place)
            patch.setattr("tests.graphs.check_data_flow", lambda *_: None)
            if self.sums:
                GradientSums().call(module)
            return super().__call__(module, joint_inputs, **kwargs)


def in_place(
    function: Any, inputs: Any, choose: Any = None, *, fused: bool = True
) -> InPlaceCapture:
    """Trace a step, write in place, and compare it with the step that does not."""
    seen = InPlaceCapture(choose or (lambda p: p.base_steps()), fused)
    plain = train(function, inputs, lambda f: compiled(f, Capture(fused=fused)))
    got = train(function, inputs, lambda f: compiled(f, seen))
    torch.testing.assert_close(got.gradients, plain.gradients)
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
def test_gradients_of_what_is_used_three_times(fused: bool) -> None:
    """A weight, and a value."""
    seen = in_place(twice(), [batch(4, 8)], fused=fused)
    assert len(seen.pairs) == 2
    assert len({owner for _, owner in seen.pairs}) == 1
    names = {n.name: owner.name for n, owner in overwritable(seen.joint).items()}
    assert names == {"addmm_default": "mm_3", "addmm_default_1": "addmm_default"}
    x = batch(2, 4, 8).requires_grad_()
    assert len(in_place(three_readers(), [x], fused=fused).pairs) == 2


def test_an_operand_that_is_computed_anew_later_is_dead() -> None:
    """Kept, the sum's operand dies in the sum; run again, each copy dies in its copy of it."""

    def forward(net: Any, x: Tensor) -> Any:
        h = net.inner(torch.tanh(x))
        return torch.sin(torch.addmm(h, torch.cos(x), net.w)).sum()

    torch.manual_seed(1)
    net = Net(forward, inner=nn.Linear(8, 8), w=nn.Parameter(batch(8, 8)))
    x = batch(8, 8).requires_grad_()
    once = in_place(net, [x], lambda p: p.base_steps())
    assert once.pairs == [("addmm_1", "addmm")]
    again = in_place(net, [x], again_after_tangents("addmm", "addmm_1"))
    assert again.pairs == [("addmm_1", "addmm"), ("addmm_1_recompute", "addmm_recompute")]
    joint = again.joint
    assert {n.name: owner.name for n, owner in overwritable(joint).items()} == {"addmm_1": "addmm"}


@pytest.mark.parametrize("make", [tied, twice, three_readers])
def test_plans_that_recompute(make: Callable[[], Net]) -> None:
    inputs = words(16) if make is tied else [batch(2, 8, 8)[0].requires_grad_()]
    assert in_place(make(), inputs, everything_again).pairs


def test_sums_of_others_stay() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        h = torch.tanh(x)
        return (torch.sin(h) + torch.cos(h)) @ net.w

    seen = capture(Net(forward, w=nn.Parameter(batch(8, 8))), [batch(4, 8).requires_grad_()])
    assert not GradientSums().call(seen.joint.module).modified


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


# --- bytes --------------------------------------------------------------------------------


def peak(model: nn.Module, inputs: Sequence[Tensor], partition: Any) -> int:
    """Bytes of a step above what is there before, under Inductor with a partition of ours."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=inductor_by(partition, allow_buffer_reuse=False))
    call(*inputs).sum().backward()
    for tensor in (*model.parameters(), *inputs):
        tensor.grad = None
    return measure_peak(lambda: call(*inputs).sum().backward()).above_start_bytes


def peaks(model: nn.Module, inputs: Sequence[Tensor]) -> list[int]:
    """Those of a step as it is, and of one that writes in place."""
    ways = Capture(fused=True), InPlaceCapture(fused=True)
    return [peak(model, inputs, partition) for partition in ways]


@pytest.mark.slow
def test_bytes_of_a_tied_embedding_under_inductor() -> None:
    """One gradient of the table is there at the peak, not two."""
    model, inputs = tied(5000, 64), words(16, 5000)
    before, now = peaks(model, inputs)
    assert before - now == 5000 * 64 * 4


def test_bytes_of_a_weight_used_three_times_under_inductor() -> None:
    before, now = peaks(twice(512), [batch(16, 512)])
    assert (before // (512 * 512 * 4), now // (512 * 512 * 4)) == (2, 1)
