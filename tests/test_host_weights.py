"""Weights in host memory: what reading gives, the graphs, where the bytes are, modules as ever.

The device is the CPU; host memory is then what torch did not allocate.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import copying
from fxremat import runtime
from fxremat.errors import HostMemoryExceeded, InvalidOption
from fxremat.memory.measured_peak import held_bytes, measure_peak
from fxremat.runtime.copies import fetch, host_copy, put
from fxremat.runtime.host_memory import is_host
from fxremat.training import host_weights
from tests.graphs import calls, results_of
from tests.host_weights import (
    CPU,
    WORDS,
    Language,
    _nothing_left,  # noqa: F401  a fixture of each test
    _one_thread,  # noqa: F401  a fixture of each test
    aot,
    batches,
    equal,
    gradients_elsewhere,
    in_host_memory,
    language,
    loss_of,
    moved,
    perceptron,
    training,
)
from tests.prepared import as_given
from tests.small import Stack, seeded, train

# --- what reading gives -------------------------------------------------------------------


def calls_fetch(function: Callable[[], Tensor]) -> bool:
    """Whether the gradient of what the function computes passes a fetch."""
    todo: list[Any] = [function().grad_fn]
    while todo:
        node = todo.pop()
        if "fetch" in type(node).__name__:
            return True
        todo += [after for after, _ in node.next_functions if after is not None]
    return False


def test_a_parameter_outside_and_a_copy_inside() -> None:
    model = language()
    before = dict(model.named_parameters())
    model = moved(model)
    assert model.head.weight is before["head.weight"]
    assert type(model.scales[0]) is nn.Parameter
    assert dict(model.named_parameters()) == before
    words, _ = next(batches(1))
    assert calls_fetch(lambda: model(words))
    assert calls_fetch(lambda: model.forward(words))
    assert not calls_fetch(lambda: model.gain.sum())
    with pytest.raises(IndexError):
        model(torch.tensor([[WORDS]]))
    assert model.head.weight is before["head.weight"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_a_module_called_alone(compiled: bool) -> None:
    model, x = moved(perceptron()), torch.randn(2, 8)

    def half(x: Tensor) -> Tensor:
        return cast("Tensor", model[1](model[0](x)).sum())

    step = aot(half) if compiled else half
    step(x).backward()
    assert is_host(model[0].weight.grad)
    assert calls_fetch(lambda: model[0](x))


def test_another_thread_is_outside() -> None:
    seen: list[object] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: seen.append(self.weight))
            thread.start()
            thread.join()
            seen.append(self.weight)
            return super().forward(x)

    model = moved(Watched(2, 2))
    model(torch.ones(1, 2))
    assert seen[0] is model.weight
    assert not isinstance(seen[1], nn.Parameter)


def test_without_gradients() -> None:
    model, x = seeded(perceptron, 4, 8)
    expected = model(x)
    moved(model)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert torch.equal(model(x), expected)
            assert torch.equal(aot(model)(x), expected)


def test_classes_look_the_same() -> None:
    model = moved(nn.Linear(3, 4))
    assert isinstance(model, nn.Linear)
    assert (type(model).__name__, type(model).__module__) == ("Linear", nn.Linear.__module__)
    assert inspect.signature(model.forward) == inspect.signature(nn.Linear(3, 4).forward)
    assert repr(model) == repr(nn.Linear(3, 4))
    another = type(model)(3, 4)
    assert in_host_memory(another) == []
    assert not calls_fetch(lambda: another(torch.ones(1, 3)))


# --- graphs -------------------------------------------------------------------------------


def test_the_joint_graph_fetches_what_it_reads_and_puts_gradients() -> None:
    model = moved(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)))
    graph = as_given(model, [torch.randn(3, 4)]).module.graph
    fetched: list[Any] = calls(graph, torch.ops.fxremat.fetch)
    putting = calls(graph, torch.ops.fxremat.put)
    read = [(node.args[0].name, node.args[1]) for node in fetched]
    assert read == [(name, CPU) for name in ("primals_1", "primals_2", "primals_4")]
    outputs = results_of(graph)
    assert [node for node in outputs[1:] if node is not None] == putting[::-1]
    for primal in graph.find_nodes(op="placeholder")[:2]:
        assert [node.target for node in primal.users] == [torch.ops.fxremat.fetch.default]


# --- the operators ------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(3, 4).t(), torch.arange(3)])
def test_operators_are_what_they_say(x: Tensor) -> None:
    x = x.clone().requires_grad_(x.is_floating_point())
    torch.library.opcheck(fetch, (x, CPU))
    torch.library.opcheck(put, (x,))
    assert torch.equal(fetch(put(x), CPU), x)
    assert put(x).stride() == fetch(x, CPU).stride() == x.stride()
    assert is_host(put(x))
    assert not is_host(fetch(put(x), CPU))


def test_each_operator_is_the_gradient_of_the_other() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return cast("Tensor", fetch(put(x) ** 2, CPU))

    assert torch.autograd.gradcheck(there_and_back, (x,))
    assert torch.autograd.gradgradcheck(there_and_back, (x,))
    (gradient,) = torch.autograd.grad(fetch(x, CPU).sum(), x)  # arrives expanded
    assert is_host(gradient)
    assert gradient.stride() == (1,)


def test_gradients_of_any_layout_are_kept_as_they_arrive() -> None:
    weight = nn.Parameter(host_copy(torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2), CPU))
    for scale in (torch.ones(2, 5, 3, 4), torch.ones(4, 3, 5, 2).permute(3, 2, 1, 0)):
        weight.grad = None
        (fetch(weight, CPU) * scale).sum().backward()
        assert weight.grad is not None
        assert is_host(weight.grad)
        assert weight.grad.stride() == weight.stride()


def test_what_is_host_memory() -> None:
    x = torch.randn(3, 4)
    host = host_copy(x.t(), CPU)
    assert torch.equal(host, x.t())
    assert host.stride() == (1, 4)
    assert is_host(host[1:])
    assert is_host(nn.Parameter(host).detach())
    assert not is_host(x)
    assert not is_host(torch.empty(2, device="meta"))
    assert not is_host(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="'meta'; there are cpu, cuda"):
        host_copy(x, torch.device("meta"))


def test_complete_means_on_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            waited.append("asleep" if blocking else "spinning")

        def synchronize(self) -> None:
            waited.append("here")

    class Stream:
        def record_event(self, event: Event) -> None:
            waited.append("recorded")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    runtime.copies._finish(torch.device("cuda", 0))
    assert waited == ["asleep", "recorded", "here"]


# --- where the bytes are ------------------------------------------------------------------


def test_host_weights_and_their_gradients_are_not_on_the_device() -> None:
    plain, x = seeded(Stack, 4, 32)
    nbytes = held_bytes(plain)
    copying.reset_host_peak()
    before = copying.host_bytes().now_bytes
    model = moved(plain)
    assert held_bytes(model) == 0
    assert copying.host_bytes().now_bytes - before == nbytes
    model(x).backward()
    assert held_bytes(model) == 0
    assert copying.host_bytes().now_bytes - before == 2 * nbytes
    assert measure_peak(lambda: None, held=[model, x]).start_bytes == 4 * 4 * 32
    del model, plain
    torch._dynamo.reset()
    gc.collect()
    assert copying.host_bytes().now_bytes == before


def test_the_device_holds_one_weight_at_a_time_without_gradients() -> None:
    """A weight, what comes in and what goes out: never two weights."""
    side, layers = 64, 8
    model = moved(nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(layers)]))
    x = torch.randn(1, side)
    with torch.no_grad():
        peak = measure_peak(lambda: model(x), held=[model, x])
    assert peak.peak_bytes == 4 * (side * side + 3 * side)


def test_cap_on_host_memory() -> None:
    model, x = seeded(Stack, 4, 32)
    expected = model(x)
    held = copying.host_bytes().now_bytes
    with copying.set_host_memory_cap(held + 10_000), pytest.raises(HostMemoryExceeded):
        moved(model)
    assert torch.equal(model(x), expected)
    moved(model)
    assert torch.equal(model(x), expected)


# --- modules as ever ----------------------------------------------------------------------


def test_state_dicts_and_resumed_training() -> None:
    """Saved by a model with weights on the host, resumed by one like it and by a plain one."""
    plain = language()
    expected = training(plain, loss_of(plain), steps=2)
    model = moved(language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert equal(training(model, loss_of(model), 2, optimizer), expected)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = training(model, loss_of(model), 2, optimizer)
    for resumed in (moved(Language()), Language()):
        file.seek(0)
        saved = torch.load(file)
        assert list(saved["model"]) == list(plain.state_dict())
        is_moved = len(in_host_memory(resumed))
        again = torch.optim.AdamW(resumed.parameters(), lr=0.01)
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        assert len(in_host_memory(resumed)) == is_moved
        assert equal(training(resumed, loss_of(resumed), 2, again), expected)


def test_parameters_given_later_move_too() -> None:
    model = moved(Stack())
    model.load_state_dict(Stack().state_dict(), assign=True)
    assert len(in_host_memory(model)) == 24
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(128, 32))
    model.blocks[0].up.bias = None
    assert len(in_host_memory(model)) == 23
    assert model(torch.ones(1, 32)).isfinite()
    del model.blocks[0].up.weight
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        model.blocks[0].up.weight  # noqa: B018


def test_copies_and_pickles() -> None:
    model = moved(language(tied=True), weights=["mlp.*", "head.weight"])
    words, _ = next(batches(1))
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        assert in_host_memory(other) == in_host_memory(model)
        assert other.head.weight is other.embedding.weight
        assert other.head.weight is not model.head.weight
        assert torch.equal(other(words), model(words))
        assert calls_fetch(lambda other=other: other.mlp(torch.ones(1, 8)))  # type: ignore[misc]


def test_to_leaves_them_in_host_memory() -> None:
    model, x = seeded(Stack, 4, 32)
    moved(model)(x).backward()
    model.double()
    assert len(in_host_memory(model)) == 24
    assert gradients_elsewhere(model) == []
    assert model(x.double()).dtype == torch.float64
    model.to("cpu", torch.float32).zero_grad()
    assert torch.equal(model(x), seeded(Stack, 4, 32)[0](x))


def test_restored() -> None:
    model, x = seeded(Stack, 4, 32)
    parameters = list(model.parameters())
    expected = model(x)
    moved(model)(x).backward()
    assert fxremat.offload(model, weights=()) is model
    assert type(model) is Stack
    assert type(model.blocks[0].up) is nn.Linear
    assert "fxremat_device" not in vars(model.blocks[0].up)
    assert all(map(lambda ours, theirs: ours is theirs, model.parameters(), parameters))
    assert in_host_memory(model) == []
    assert len(gradients_elsewhere(model)) == 24
    assert torch.equal(model(x), expected)
    assert host_weights.restore(model) is model


def test_calls_add_up() -> None:
    model, x = seeded(Stack, 4, 32)
    expected = model(x)
    moved(model, weights="blocks.0.up.bias")
    fxremat.offload(model, weights=["blocks.0.up.weight", "blocks.1.*.bias"])
    assert in_host_memory(model) == [
        "blocks.0.up.weight",
        "blocks.0.up.bias",
        "blocks.1.norm.bias",
        "blocks.1.up.bias",
        "blocks.1.down.bias",
    ]
    moved(cast("Any", model).blocks[3])
    assert len(in_host_memory(model)) == 11
    assert torch.equal(model(x), expected)
    host_weights.restore(model)
    assert in_host_memory(model) == []


def test_recurrent_and_writing_modules_stay_on_the_device() -> None:
    capped, sparse = nn.Embedding(3, 4, max_norm=1.0), nn.Embedding(3, 4, sparse=True)
    others = {"lstm": nn.LSTM(4, 4), "linear": nn.Linear(4, 4)}
    model = nn.ModuleDict({"capped": capped, "sparse": sparse, **others})
    assert in_host_memory(moved(model)) == ["linear.weight", "linear.bias"]
    assert type(model["lstm"]) is nn.LSTM
    assert in_host_memory(moved(model, weights=["*.weight"])) == ["linear.weight", "linear.bias"]
    for name, reason in {
        "lstm.weight_ih_l0": "LSTM keeps its weights in a list of its own",
        "lstm.*": "LSTM keeps its weights in a list of its own",
        "capped.weight": "Embedding writes its weights in the forward",
        "sparse.weight": "Embedding has sparse gradients",
    }.items():
        with pytest.raises(InvalidOption, match=f"can be in host memory, but {reason}"):
            moved(model, weights=[name])


def test_names_without_a_parameter() -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 3)})
    with pytest.raises(InvalidOption, match=r"'heda\.weight'.*did you mean 'head\.weight'"):
        moved(model, weights=["heda.weight"])
    with pytest.raises(InvalidOption, match=r"'blocks\.\*'; expected names of parameters"):
        moved(model, weights=["head.bias", "blocks.*"])
    assert in_host_memory(model) == []


def test_models_without_data() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(InvalidOption, match=r"blocks\.0\.norm\.weight without data.*assign=True"):
        moved(model)
    model.load_state_dict(Stack().state_dict(), assign=True)
    assert len(in_host_memory(moved(model))) == 24
    with pytest.raises(InvalidOption, match="run the model once"):
        moved(nn.Sequential(nn.LazyLinear(3)))


def test_parametrized_modules() -> None:
    def make() -> nn.Module:
        normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        return nn.Sequential(normed, nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))

    plain, x = seeded(make, 1, 4)
    expected = train(plain, x, plain)
    model = moved(seeded(make, 1, 4)[0])
    assert len(in_host_memory(model)) == 5
    losses, gradients, _ = train(model, x, aot(model))
    assert losses == expected[0]
    assert equal(gradients, expected[1])
