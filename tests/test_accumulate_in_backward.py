"""Gradients that are added inside of the backward: the same sums, to the bit, in less memory."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat.measure import measure_peak
from fxremat.runtime import accumulation
from tests import nets
from tests.small import Convolutions, Stack, seeded
from tests.test_offloading import Layers

OPTIONS: dict[str, Any] = {"solver": "greedy", "variants": "none"}
EAGER: dict[str, Any] = {**OPTIONS, "executor": "aot_eager"}
EXECUTORS = ["aot_eager", "inductor"]
Make = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
Early = list[Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    accumulation._TOLD.clear()
    yield
    while accumulation._ASKED:  # models that somebody still holds would count in later tests
        accumulation.withdraw(accumulation._ASKED)
    torch._dynamo.reset()


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    """The parameters whose gradients were added early, in that order."""
    found: Early = []
    keep_from = accumulation._keep_from

    def noting(adder: Any) -> None:
        found.append(adder.variable)
        keep_from(adder)

    monkeypatch.setattr(accumulation, "_keep_from", noting)
    return found


def compiled(model: Any, executor: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(
        model, backend="fxremat", options={**OPTIONS, "executor": executor, **options}
    )


def layers(depth: int = 3, width: int = 16) -> tuple[Any, Tensor]:
    return seeded(lambda: Layers(depth, width), 4, width)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in pairs
    )


def total(value: Any) -> Tensor:
    """A loss of all results."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    return torch.stack(
        [(t * torch.arange(1, t.numel() + 1).view_as(t)).mean() for t in wanted]
    ).sum()


def accumulated(
    made: tuple[Any, tuple[Tensor, ...]],
    early: str,
    loss_of: Callable[[Any], Any] = compiled,
    prepare: Callable[[Any], object] = lambda model: None,
    backward: Callable[[Tensor], object] = torch.autograd.backward,
    in_place: bool = True,
) -> list[Tensor | None]:
    """Gradients of three backwards, each of another loss, added up.

    ``early`` says whether graphs are made for it, "planned", and gradients added early, "yes".
    With ``in_place`` each ``grad`` stays the tensor that it was.
    """
    torch._dynamo.reset()
    model, inputs = made
    torch.manual_seed(5)
    handle = fxremat.accumulate_in_backward(model) if early != "no" else None
    prepare(model)
    call = loss_of(model)
    places: dict[int, tuple[Tensor, int]] = {}
    for number in range(3):
        loss = total(call(*inputs)) * (number + 1.1)
        if handle is not None and early == "planned":
            handle.remove()
        backward(loss)
        for index, parameter in enumerate(model.parameters()):
            grad = parameter.grad
            if in_place and grad is not None and not grad.is_sparse:
                found = places.setdefault(index, (grad, grad.data_ptr()))
                assert found[0] is grad
                assert found[1] == grad.data_ptr()
    if handle is not None:
        handle.remove()
    return [*gradients(model), *(i.grad for i in inputs)]


def check_same(
    make: Make, loss_of: Callable[[Any], Any] = compiled, without: str = "no", **rest: Any
) -> None:
    expected = accumulated(make(), without, loss_of, **rest)
    assert same(accumulated(make(), "yes", loss_of, **rest), expected)


def with_input(make: Callable[[], nn.Module], *shape: int) -> Make:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, x = seeded(make, *shape)
        return model, (x,)

    return made


LAYERS = with_input(lambda: Layers(3, 16), 4, 16)


# --- the same sums -----------------------------------------------------------------------


NETS = ["tied", "input gradient", "frozen", "autocast", "attention dropout", "count"]


@pytest.mark.parametrize("name", NETS)
def test_any_net(name: str, early: Early) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_same(lambda: nets.make(name))
    assert early


class Small(nn.Module):
    """A tied weight, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, index: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.layer(self.embedding(index))), 0.5, self.training)
        return F.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_whatever_runs_the_graphs(executor: str, early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Small(), (torch.randperm(32),)  # rows of an embedding are added in any order

    check_same(made, lambda model: compiled(model, executor))
    assert len(early) == 2 * 3


def test_convolutions_and_channels_last(early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, x = seeded(Convolutions, 2, 3, 8, 8)
        turned: Any = model
        return turned.to(memory_format=torch.channels_last), (x,)

    check_same(made)
    assert len(early) == 2 * 12


def test_zeroed_and_scaled_gradients(early: Early) -> None:
    results = []
    for opt_in in (False, True):
        torch._dynamo.reset()
        model, x = layers()
        if opt_in:
            fxremat.accumulate_in_backward(model)
        call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(6):
            (call(x) * 1024).backward()
            if number % 2:
                for parameter in model.parameters():
                    parameter.grad /= 1024
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 1)
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)
    # With zeros in place the first gradient is added, too.
    assert len(early) == (1 + 1 + 2) * 6


def test_dtypes(early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, (x,) = LAYERS()
        return model.to(torch.bfloat16), (x.to(torch.bfloat16),)

    check_same(made)
    assert len(early) == 2 * 6


def test_negative_zeros_stay() -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, (x,) = LAYERS()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -0.0)
        return model, (x,)

    check_same(made, backward=lambda loss: (loss * -0.0).backward())


# --- in less memory ----------------------------------------------------------------------


@cache
def peaks(opt_in: bool, executor: str, budget: int | None = None) -> tuple[list[int], Any]:
    """Measured bytes of three micro-batches, and the report; all is compiled before."""
    torch._dynamo.reset()
    model, x = seeded(lambda: Layers(6, 128), 4, 128)
    handle = fxremat.accumulate_in_backward(model) if opt_in else None
    options = {} if budget is None else {"memory_budget": f"{budget}B"}
    call = compiled(model, executor, **options)
    call(x).backward()
    model.zero_grad()
    found = [measure_peak(lambda: call(x).backward(), held=(model, x)).peak_bytes for _ in range(3)]
    if handle is not None:
        handle.remove()
    return found, fxremat.reports()[-1]


def test_the_peak_falls_by_the_gradients() -> None:
    gradients = sum(p.nbytes for p in Layers(6, 128).parameters())
    before, plain = peaks(False, "aot_eager")
    after, report = peaks(True, "aot_eager")
    assert max(before) - max(after) >= 0.8 * 5 / 6 * gradients
    assert max(before) > plain.predicted_peak_bytes  # each grad should be in the reserve
    assert max(after) <= report.predicted_peak_bytes
    assert report.held_bytes == gradients


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_budget_is_obeyed_in_every_micro_batch(executor: str) -> None:
    budget = peaks(True, "aot_eager")[1].minimum_peak_bytes
    found, report = peaks(True, executor, budget)
    assert max(found) <= report.predicted_peak_bytes <= budget
    assert found[0] < found[1] == found[2] >= 0.99 * report.predicted_peak_bytes


def test_what_autograd_has_to_add_counts_as_a_result() -> None:
    """A hook that is there when the graph is compiled: the plan has both, and is obeyed."""

    def predicted(hooked: bool) -> int:
        torch._dynamo.reset()
        model, x = seeded(lambda: Layers(6, 64), 4, 64)
        handle = fxremat.accumulate_in_backward(model)
        parameters: list[Any] = list(model.parameters())
        for parameter in parameters if hooked else []:
            parameter.register_hook(lambda gradient: None)
        call = compiled(model)
        call(x).backward()
        peak = measure_peak(lambda: call(x).backward(), held=(model, x)).peak_bytes
        handle.remove()
        assert peak <= fxremat.reports()[-1].predicted_peak_bytes
        return fxremat.reports()[-1].predicted_peak_bytes

    gradients = sum(p.nbytes for p in Layers(6, 64).parameters())
    assert predicted(True) - predicted(False) >= 0.8 * 5 / 6 * gradients


def test_frozen_parameters_have_no_grad_to_count() -> None:
    model, x = layers()
    model.layers[0].requires_grad_(False)
    fxremat.accumulate_in_backward(model)
    compiled(model)(x).backward()
    wanted = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert fxremat.reports()[-1].held_bytes == wanted


class Head(nn.Module):
    """Many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 512)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), torch.arange(64))


def test_other_forms_of_ops(early: Early) -> None:
    """A loss in chunks of rows: gradients come out of loops, or are made in the forward."""
    model, x = seeded(Head, 64, 16)
    options = {**OPTIONS, "executor": "aot_eager", "variants": "all"}
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.explain(model, x, memory_budget="1000B", options=options)
    least = caught.value.minimum_bytes
    assert least is not None
    bytes_of_grads = sum(p.nbytes for p in model.parameters())

    def loss_of(model: Any) -> Any:
        return compiled(model, variants="all", memory_budget=f"{least + bytes_of_grads}B")

    check_same(with_input(Head, 64, 16), loss_of, "planned")
    assert fxremat.reports()[-1].variants
    assert early


# --- gradients that are asked for --------------------------------------------------------


def test_gradients_that_are_asked_for_are_not_added(early: Early) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call, parameters = compiled(model), list(model.parameters())
    call(x).backward()
    before = gradients(model)
    asked = torch.autograd.grad(call(x), parameters)
    assert same(gradients(model), before)
    assert same(list(asked), before)
    assert not early
    call(x).backward(inputs=parameters[:2])
    assert {id(p) for p in early} == {id(p) for p in parameters[:2]}
    expected = [g if i > 1 or g is None else 2 * g for i, g in enumerate(before)]
    assert same(gradients(model), expected)


def test_backwards_one_after_the_other_through_one_graph(early: Early) -> None:
    def twice(loss: Tensor) -> None:
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)

    check_same(LAYERS, backward=twice)
    assert len(early) == 5 * 6


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_backward(caplog: pytest.LogCaptureFixture, early: Early) -> None:
    model, x = layers()
    call = compiled(model)
    fxremat.accumulate_in_backward(model)
    for _ in range(2):
        call(x).backward(create_graph=True)
    assert not early
    assert "in this backward" in caplog.text


# --- where autograd adds as ever ---------------------------------------------------------


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 1e-2


LOSSES: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "decay added after": lambda model, call, x: call(x) + squares(model),
    "decay added before": lambda model, call, x: squares(model) + call(x),
    "two calls": lambda model, call, x: call(x) + call(2 * x),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_gradients_of_a_parameter(
    name: str, caplog: pytest.LogCaptureFixture, early: Early
) -> None:
    def loss_of(model: Any) -> Any:
        call = compiled(model)
        return lambda x: LOSSES[name](model, call, x)

    check_same(LAYERS, loss_of)
    assert not early
    told = [r for r in caplog.records if "this graph alone has a gradient" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.WARNING]


class Halves(nn.Module):
    """Two graphs; the first layer is part of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        torch._dynamo.graph_break()
        return cast("Tensor", self.layers[0](torch.tanh(self.layers[2](x))).square().mean())


def test_graph_breaks(early: Early) -> None:
    check_same(with_input(Halves, 4, 16))
    assert len(early) == 2 * 4


def test_losses_of_several_roots_and_leaves(early: Early) -> None:
    def loss_of(model: Any) -> Any:
        return compiled(model)

    def backward(loss: Tensor) -> None:
        torch.autograd.backward([loss, loss.exp()])

    check_same(LAYERS, loss_of, backward=backward)
    assert len(early) == 2 * 6
    early.clear()
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call, weight = compiled(model), model.layers[0].weight
    call(x).backward()
    torch.autograd.backward([call(x), weight], [torch.ones(()), torch.ones_like(weight)])
    assert not early


Hook = Callable[[Any], object]


def double(weight: Any) -> None:
    weight.grad.mul_(2)


HOOKS: dict[str, Hook] = {
    "tensor hook": lambda weight: weight.register_hook(lambda gradient: 2 * gradient),
    "post-accumulate hook": lambda weight: weight.register_post_accumulate_grad_hook(double),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_a_parameter(name: str, early: Early) -> None:
    check_same(LAYERS, prepare=lambda model: HOOKS[name](model.layers[1].weight))
    assert len(early) == 2 * 5


def test_hooks_that_come_later(early: Early, caplog: pytest.LogCaptureFixture) -> None:
    """After compilation: on the parameter, on what adds its gradient, and on the graph."""
    seen: list[Any] = []

    def note(*arguments: Any) -> None:
        seen.append(arguments)

    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
    call(x).backward()
    first, second, *_ = model.parameters()
    edges = [torch.autograd.graph.get_gradient_edge(p).node for p in (first, second)]
    edges[0].register_prehook(note)
    edges[1].register_hook(note)
    handle = model.layers[1].weight.register_hook(note)
    call(x).backward()
    assert len(early) == 3
    assert len(seen) == 3
    assert all(torch.isfinite(g).all() for one in seen for g in one if isinstance(g, Tensor))
    handle.remove()
    early.clear()
    loss = call(x)
    loss.grad_fn.register_hook(lambda inputs, _: tuple(g if g is None else 2 * g for g in inputs))
    before = gradients(model)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    assert not early
    found = [b + g for b, g in zip(before, expected, strict=True) if b is not None]
    assert same(gradients(model), found)
    assert "a hook" in caplog.text


def test_graphs_that_run_again_in_the_backward(
    caplog: pytest.LogCaptureFixture, early: Early
) -> None:
    """torch.utils.checkpoint gives their backward copies of the parameters."""

    def loss_of(model: Any) -> Any:
        call = compiled(model)
        again: Any = checkpoint
        return lambda x: again(call, x, use_reentrant=False)

    check_same(LAYERS, loss_of)
    assert not early
    assert "a copy of it" in caplog.text


def test_dynamic_sizes(early: Early) -> None:
    def loss_of(model: Any) -> Any:
        call: Any = torch.compile(model, backend="fxremat", options=EAGER, dynamic=True)
        sizes = iter((4, 3, 2))
        return lambda x: call(x[: next(sizes)].clone())

    check_same(LAYERS, loss_of)
    assert len(early) == 2 * 6
    assert len(fxremat.reports()) == 1


def test_anomaly_mode(early: Early) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check_same(LAYERS)
    assert not early


def test_grads_that_share_memory(early: Early) -> None:
    """Parts of one tensor are as good as tensors of their own; what overlaps is not."""

    def parts(model: Any) -> None:
        flat, used = torch.zeros(sum(p.numel() for p in model.parameters())), 0
        for parameter in model.parameters():
            parameter.grad = flat[used : used + parameter.numel()].view_as(parameter)
            used += parameter.numel()

    check_same(LAYERS, prepare=parts)
    assert len(early) == 3 * 6
    early.clear()

    def one(model: Any) -> None:
        model.layers[0].weight.grad = model.layers[2].weight.grad = torch.zeros(16, 16)
        model.layers[1].weight.grad = model.layers[1].weight.detach()

    model, x = layers()
    fxremat.accumulate_in_backward(model)
    one(model)
    compiled(model)(x).backward()
    assert not {id(p) for p in early} & {id(layer.weight) for layer in model.layers}


class Gated(nn.Module):
    """Another tensor is read between the gradients of ``b`` and ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return cast("Tensor", self.b(torch.tanh(self.a(x) * gate)).square().mean())


def test_a_grad_that_the_graph_reads(early: Early) -> None:
    def gated(opt_in: bool) -> tuple[Any, list[Tensor | None]]:
        torch._dynamo.reset()
        model: Any
        model, x = seeded(Gated, 16, 16)
        handle = fxremat.accumulate_in_backward(model) if opt_in else None
        call = compiled(model)
        call(x, torch.ones(16, 16)).backward()
        for _ in range(2):
            call(x, model.b.weight.grad).backward()
        if handle is not None:
            handle.remove()
        return model, gradients(model)

    expected = gated(False)[1]
    model, found = gated(True)
    assert same(found, expected)
    assert [p is model.a.weight for p in early] == [True, True]


def test_a_gradient_that_is_a_copy(early: Early) -> None:
    """Inductor drops copies: the original, read later, must not be given up in its place."""

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            own = gradient.sin()
            return own, own.clone()

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            copied: Any = Copied.apply
            return cast("Tensor", copied(torch.tanh(self.layer(x)), self.bias))

    check_same(with_input(Shifted, 4, 16))
    assert {tuple(p.shape) for p in early} == {(16, 16), (16,)}


def test_grads_of_other_dtypes_and_layouts(early: Early) -> None:
    model, x = layers()
    model.layers[0].weight.grad = torch.zeros(16, 16).t()
    model.layers[2].weight.grad = torch.zeros(32, 32)[::2, ::2]
    fxremat.accumulate_in_backward(model)
    compiled(model)(x).backward()
    assert len(early) == 2
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_sparse_and_unused_parameters(early: Early) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16, sparse=True)
            self.layer, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, index: Tensor) -> Tensor:
            return torch.tanh(self.layer(self.embedding(index)))

    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Mixed(), (torch.arange(8),)

    results = []
    for name in ("no", "yes"):
        found = accumulated(made(), name)
        results.append([g.to_dense() if g is not None else None for g in found])
    assert same(*results)
    assert early


def test_parameters_that_freeze_and_thaw(early: Early) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call, weight = compiled(model), model.layers[1].weight
    call(x).backward()
    weight.requires_grad_(False)
    before = weight.grad.clone()
    call(x).backward()
    assert torch.equal(weight.grad, before)
    weight.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 does not see that a parameter thaws
    call(x).backward()
    assert torch.equal(weight.grad, 2 * before)


def test_parameters_in_host_memory(early: Early) -> None:
    def host(model: Any) -> None:
        fxremat.offload(model, weights="layers.[01].weight", device="cpu")

    check_same(LAYERS, prepare=host)
    assert len(early) == 2 * 4


def test_an_optimizer_that_steps_in_the_backward(early: Early) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    plain = copy.deepcopy(model)
    fxremat.step_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    call, other = compiled(model), compiled(plain)
    for _ in range(2):
        call(x).backward()
        other(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(list(model.parameters()), list(plain.parameters()))
    assert not early


def test_backwards_of_several_threads(early: Early) -> None:
    """While two run, neither knows which one it is."""
    model, x = layers()
    call = compiled(model)
    fxremat.accumulate_in_backward(model)
    call(x).backward()
    single = gradients(model)

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            barrier.wait()
            return gradient

    barrier = threading.Barrier(2)
    losses = [Meet.apply(call(x)) for _ in range(2)]  # type: ignore[no-untyped-call]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for parameter, gradient in zip(model.parameters(), single, strict=True):
        torch.testing.assert_close(parameter.grad, None if gradient is None else 3 * gradient)


def test_averaging_over_processes(tmp_path: Any, early: Early) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch without torch.distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/a", rank=0, world_size=1)
    try:

        def loss_of(model: Any) -> Any:
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            call = compiled(wrapped)

            def loss(x: Tensor) -> Any:
                with wrapped.no_sync() if len(early) < 3 else nullcontext():
                    return call(x)

            return loss

        check_same(LAYERS, loss_of, in_place=False)
    finally:
        distributed.destroy_process_group()


# --- errors, and the end -----------------------------------------------------------------


class Refused(Exception):
    pass


def test_an_error_in_the_backward(early: Early) -> None:
    """Each gradient has been added as a whole or not at all; the next backward is right."""

    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            if refusing:
                raise Refused("not this one")
            return gradient

    refusing: list[bool] = []
    model, x = seeded(lambda: Stack(broken=True), 4, 32)
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
    ours: Any = Picky.apply
    call(ours(x.requires_grad_())).backward()
    first = gradients(model)
    early.clear()
    refusing.append(True)
    with pytest.raises(Refused, match="not this one"):
        call(ours(x)).backward()
    assert early
    for found, one in zip(gradients(model), first, strict=True):
        assert found is not None
        assert one is not None
        assert torch.equal(found, 2 * one)
    refusing.clear()
    model.zero_grad()
    call(ours(x)).backward()
    assert same(gradients(model), first)


def test_an_error_inside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
    call(x).backward()
    single = gradients(model)
    begin, count = accumulation._begin, [0]

    def failing() -> None:
        count[0] += 1
        if count[0] == 4:
            raise Refused("half way")
        begin()

    monkeypatch.setattr(accumulation, "_begin", failing)
    with pytest.raises(Refused, match="half way"):
        call(x).backward()
    added = [
        torch.equal(p.grad, 2 * g)
        for p, g in zip(model.parameters(), single, strict=True)
        if g is not None
    ]
    kept = [
        torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), single, strict=True)
        if g is not None
    ]
    assert [a != k for a, k in zip(added, kept, strict=True)] == 6 * [True]
    assert sum(added) == 3
    monkeypatch.undo()
    model.zero_grad()
    call(x).backward()
    call(x).backward()
    assert same(gradients(model), [None if g is None else 2 * g for g in single])


def test_removed(early: Early) -> None:
    model, x = layers()
    handles = [fxremat.accumulate_in_backward(model) for _ in range(2)]
    call = compiled(model)
    handles[0].remove()
    handles[0].remove()
    for _ in range(2):
        call(x).backward()
    assert len(early) == 6
    handles[1].remove()
    call(x).backward()
    assert len(early) == 6
    assert not any(p in accumulation._ASKED for p in model.parameters())


def test_models_go_away() -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
    for _ in range(2):
        call(x).backward()
    alive = [weakref.ref(p) for p in model.parameters()]
    asked = len(list(accumulation._ASKED))
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in alive if r() is not None] == []
    assert len(list(accumulation._ASKED)) == asked - 6


def test_models_without_parameters_are_refused() -> None:
    with pytest.raises(fxremat.InvalidOption, match="without parameters"):
        fxremat.accumulate_in_backward(nn.ReLU())


def test_steps_that_are_compiled_as_a_whole(early: Early) -> None:
    """The backward is called in a frame that Dynamo looks at."""
    model, x = layers()
    fxremat.accumulate_in_backward(model)

    def step(x: Tensor) -> None:
        loss = model(x)
        loss.backward()

    call = compiled(step)
    for _ in range(2):
        call(x)
    assert len(early) == 6
