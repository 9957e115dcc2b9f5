"""Weights in host memory: the same training, the graphs, where the bytes are, and modules as ever.

The device is the CPU, except where a test needs a GPU; host memory is then what torch did not
allocate.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat import compat, runtime
from fxremat.cost.peak import held_bytes, measure_peak
from fxremat.errors import HostMemoryExceeded, InvalidOption
from fxremat.model import host_weights
from fxremat.runtime import is_host
from fxremat.runtime.copies.weights import fetch, host_copy, put
from tests.small import Convolutions, Stack, seeded, train

CPU = torch.device("cpu")
WORDS = 11


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Each test begins without compiled code, and ends without host memory of its models."""
    counters.clear()
    before = runtime.host_bytes().now_bytes
    yield
    torch._dynamo.reset()
    if runtime.host_bytes().now_bytes > before:
        gc.collect()
    assert runtime.host_bytes().now_bytes <= before


class Language(nn.Module):
    """An embedding, attention, an MLP, and parameters of all kinds, read in all sorts of ways."""

    def __init__(self, tied: bool = False, twice: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"in": nn.Parameter(torch.full((8,), 0.5))})
        self.gain = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.twice = twice
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.mlp(self.attention(h, h, h)[0]) * self.gain
        y: Tensor = x + h + self.frozen(self.mlp(x) if self.twice else x)
        return y

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words) * self.scales[0] + self.shifts["in"]
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        x = self.batch_norm(x.flatten(0, 1)).view(x.shape) * self.scales[1]
        logits: Tensor = F.linear(x, self.head.weight)
        return logits


def language(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def moved(model: Any, **options: Any) -> Any:
    """The model with weights in host memory, also on machines with a GPU fetched to the CPU."""
    return fxremat.offload(model, device="cpu", **options)


def in_host_memory(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_host(parameter)]


def gradients_elsewhere(model: nn.Module) -> list[str]:
    """Parameters whose gradients are not in host memory."""
    named = model.named_parameters()
    return [name for name, p in named if p.grad is not None and not is_host(p.grad)]


Step = Callable[[Tensor, Tensor], Tensor]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))


def loss_of(model: Callable[[Tensor], Tensor]) -> Step:
    return lambda words, next_words: F.cross_entropy(model(words).flatten(0, 1), next_words)


def aot(function: Any) -> Any:
    """Compiled as one graph, whose ops run as they are."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "eager": lambda model: loss_of(model),
    "model": lambda model: loss_of(aot(model)),
    "function": lambda model: cast("Step", aot(loss_of(model))),
    "forward": lambda model: loss_of(aot(model.forward)),
}


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (2, 6), generator=generator)
        yield words[:, :-1], words[:, 1:].flatten()


def training(
    model: nn.Module, step: Step, steps: int = 3, optimizer: Any = None, accumulate: int = 1
) -> list[Tensor]:
    """Losses of some AdamW steps, and gradients, parameters and buffers after them."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number, (words, next_words) in enumerate(batches(steps * accumulate)):
        if number % accumulate == 0:
            optimizer.zero_grad()
        loss = step(words, next_words)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        if (number + 1) % accumulate == 0:
            optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    return [*losses, *gradients, *state]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# --- the same training -------------------------------------------------------------------


CASES = [*((way, False) for way in WAYS), ("eager", True), ("model", True)]


@pytest.mark.parametrize(("way", "checkpointed"), CASES)
def test_training_is_the_same(way: str, checkpointed: bool) -> None:
    plain = language(checkpointed=checkpointed)
    expected = training(plain, loss_of(plain))
    model = moved(language(checkpointed=checkpointed))
    assert equal(training(model, WAYS[way](model)), expected)
    assert in_host_memory(model) == [name for name, _ in model.named_parameters()]
    assert gradients_elsewhere(model) == []
    if way != "eager":
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert not counters["recompiles"]


@pytest.mark.parametrize("way", ["eager", "model"])
def test_weights_read_twice_add_their_gradients(way: str) -> None:
    plain = language(tied=True, twice=True)
    expected = training(plain, loss_of(plain))
    model = moved(language(tied=True, twice=True))
    assert model.head.weight is model.embedding.weight
    assert equal(training(model, WAYS[way](model)), expected)
    assert "embedding.weight" in in_host_memory(model)


def test_accumulated_gradients_stay_in_host_memory() -> None:
    plain = language()
    expected = training(plain, loss_of(plain), accumulate=2)
    model = moved(language())
    assert equal(training(model, loss_of(aot(model)), accumulate=2), expected)
    assert gradients_elsewhere(model) == []


def test_some_weights_only() -> None:
    plain = language()
    expected = training(plain, loss_of(plain))
    model = moved(language(), weights=["mlp.*.weight", "gain"])
    assert equal(training(model, loss_of(model)), expected)
    assert in_host_memory(model) == ["gain", "mlp.0.weight", "mlp.2.weight"]


def test_frozen_weights_get_no_gradient() -> None:
    model = moved(language())
    training(model, loss_of(model), steps=1)
    assert is_host(model.frozen.weight)
    assert model.frozen.weight.grad is None
    model.requires_grad_(False)
    assert not model(next(batches(1))[0]).requires_grad


def test_inductor() -> None:
    plain, x = seeded(perceptron, 1, 8)
    expected = train(plain, x, plain)
    model = moved(seeded(perceptron, 1, 8)[0])
    losses, gradients, _ = train(model, x, torch.compile(model, fullgraph=True))
    assert losses == pytest.approx(expected[0])
    for ours, theirs in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert gradients_elsewhere(model) == []


def test_autocast() -> None:
    def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return cast("Tensor", model(x).square().sum())

        return step

    plain, x = seeded(perceptron, 4, 8)
    expected = train(plain, x, step_of(plain))[0]
    for compiled in (False, True):
        model = moved(seeded(perceptron, 4, 8)[0])
        step = step_of(model)
        assert train(model, x, aot(step) if compiled else step)[0] == expected


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_have_the_strides_of_their_weights(layout: torch.memory_format) -> None:
    plain, x = seeded(Convolutions, 2, 3, 8, 8)
    expected = train(plain.to(memory_format=layout), x, plain)  # type: ignore[call-overload]
    model = seeded(Convolutions, 2, 3, 8, 8)[0]
    moved(model.to(memory_format=layout))  # type: ignore[call-overload]
    compiled = aot(model) if layout == torch.channels_last else model
    losses, gradients, buffers = train(model, x, compiled)
    assert losses == expected[0]
    assert equal([*gradients, *buffers], [*expected[1], *expected[2]])
    assert gradients_elsewhere(model) == []
    assert not any(map(is_host, model.buffers()))


def test_a_graph_break_inside_the_model() -> None:
    plain, x = seeded(lambda: Stack(broken=True), 4, 32)
    expected = train(plain, x, plain)
    model = moved(seeded(lambda: Stack(broken=True), 4, 32)[0])
    assert train(model, x, torch.compile(model, backend="aot_eager"))[0] == expected[0]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["recompiles"]


def test_blocks_compiled_one_by_one_share_their_code() -> None:
    """One graph for the first, whose input wants no gradient, and one for all others."""
    model, x = seeded(Stack, 4, 32)
    expected = train(model, x, model)[0]
    again: Any = moved(seeded(Stack, 4, 32)[0])
    for block in again.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert train(again, x, again)[0] == expected
    assert counters["stats"]["unique_graphs"] == 2


def test_compiled_before_it_is_moved() -> None:
    model, x = seeded(perceptron, 4, 8)
    compiled = aot(model)
    expected = compiled(x)
    assert moved(compiled) is compiled
    assert torch.equal(compiled(x), expected)
    assert len(in_host_memory(model)) == 4


# --- what reading gives ------------------------------------------------------------------


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


# --- graphs ------------------------------------------------------------------------------


def joint_graph(model: nn.Module, x: Tensor) -> fx.Graph:
    found: list[fx.Graph] = []

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(copy.deepcopy(module.graph))
        return compat.torch_partition(module, inputs, **kwargs)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_with_aot_eager(gm, inputs, partition)

    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    return found[0]


def test_the_joint_graph_fetches_what_it_reads_and_puts_gradients() -> None:
    model = moved(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)))
    graph = joint_graph(model, torch.randn(3, 4))
    fetched = [node for node in graph.nodes if node.target is torch.ops.fxremat.fetch.default]
    assert [(node.args[0].name, node.args[1]) for node in fetched] == [
        ("primals_1", CPU),
        ("primals_2", CPU),
        ("primals_4", CPU),
    ]
    putting = [node for node in graph.nodes if node.target is torch.ops.fxremat.put.default]
    (outputs,) = graph.output_node().args
    assert [node for node in cast("Any", outputs)[1:] if node is not None] == [
        putting[2],
        putting[1],
        putting[0],
    ]
    for primal in graph.find_nodes(op="placeholder")[:2]:
        assert [node.target for node in primal.users] == [torch.ops.fxremat.fetch.default]


# --- the operators -----------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="'meta' cannot fetch; there are cpu, cuda"):
        host_copy(x, torch.device("meta"))


def test_complete_means_on_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("here")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    runtime.copies.weights._finish(torch.device("cuda", 0))
    assert waited == ["here"]


# --- where the bytes are -----------------------------------------------------------------


def test_host_weights_and_their_gradients_are_not_on_the_device() -> None:
    plain, x = seeded(Stack, 4, 32)
    nbytes = held_bytes(plain)
    runtime.reset_host_peak()
    before = runtime.host_bytes().now_bytes
    model = moved(plain)
    assert held_bytes(model) == 0
    assert runtime.host_bytes().now_bytes - before == nbytes
    model(x).backward()
    assert held_bytes(model) == 0
    assert runtime.host_bytes().now_bytes - before == 2 * nbytes
    assert measure_peak(lambda: None, held=[model, x]).start_bytes == 4 * 4 * 32
    del model, plain
    torch._dynamo.reset()
    gc.collect()
    assert runtime.host_bytes().now_bytes == before


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
    held = runtime.host_bytes().now_bytes
    with runtime.set_host_memory_cap(held + 10_000), pytest.raises(HostMemoryExceeded):
        moved(model)
    assert torch.equal(model(x), expected)
    moved(model)
    assert torch.equal(model(x), expected)


# --- modules as ever ---------------------------------------------------------------------


def test_state_dicts_and_resumed_training() -> None:
    plain = language()
    expected = training(plain, loss_of(plain), steps=2)
    model = moved(language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert equal(training(model, loss_of(model), 2, optimizer), expected)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert list(saved["model"]) == list(plain.state_dict())

    resumed = moved(Language())
    again = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert len(in_host_memory(resumed)) == len(list(resumed.parameters()))
    ours = training(resumed, loss_of(resumed), 2, again)
    assert equal(ours, training(model, loss_of(model), 2, optimizer))
    plain.load_state_dict(model.state_dict())
    assert equal(list(plain.parameters()), list(model.parameters()))


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
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(4, 4),
            "capped": nn.Embedding(3, 4, max_norm=1.0),
            "sparse": nn.Embedding(3, 4, sparse=True),
            "linear": nn.Linear(4, 4),
        }
    )
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


# --- with a GPU --------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_cuda() -> None:
    plain = seeded(lambda: Stack(width=256), 4, 256)[0]
    model = fxremat.offload(copy.deepcopy(plain))
    assert all(p.is_pinned() and is_host(p) for p in model.parameters())
    x = torch.randn(4, 256, device="cuda")
    plain.cuda()
    before = torch.cuda.memory_allocated()
    expected = train(plain, x, plain)
    held = torch.cuda.memory_allocated() - before
    losses, gradients, _ = train(model, x, aot(model))
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for ours, theirs in zip(gradients, expected[1], strict=True):
        assert ours.device == CPU
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-3, atol=1e-5)
    assert torch.cuda.memory_allocated() - before < held + 2**20
    model.to("cuda")
    assert all(p.is_pinned() for p in model.parameters())
    host_weights.restore(model)
    assert all(p.is_cuda for p in model.parameters())
