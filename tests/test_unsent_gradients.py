"""What a model returns beside its loss gets no gradient, and what an output costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fxremat
from fxremat.runtime.unsent_gradients import unsent_results, written_inputs
from fxremat.sizes import MIB
from tests.end_to_end import QUICK
from tests.graphs import Net
from tests.ranks import least_named
from tests.small import Block

pytestmark = pytest.mark.usefixtures("fresh")

WORDS = 1000


class WithLogits(nn.Module):
    """As models of Hugging Face: they return a loss, and logits beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(2)))
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.2)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.dropout(self.norm(self.blocks(self.embedding(words)))))
        return F.cross_entropy(logits.float(), words), logits


class WithFeatures(WithLogits):
    """As models whose loss is outside: it reads one of the results."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks(self.embedding(words))
        return hidden.sum(1, keepdim=True), hidden.repeat(1, 32)


SEEN: dict[str, Tensor] = {}


def loss_outside(found: Tensor, features: Tensor) -> Tensor:
    """It reads the first result; the other one is kept, to be looked at."""
    SEEN["features"] = features
    return found.square().mean()


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "its own": lambda loss, logits: loss,
    "of both": lambda loss, logits: loss.mean() + logits.square().mean(),
    "of logits": lambda loss, logits: logits.square().mean(),
    "outside": loss_outside,
}


class Trained:
    """A model, with gradients and the peak of its steps; within a budget or without one."""

    def __init__(self, model: nn.Module, budget: int | None) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model, self.words = copy.deepcopy(model), torch.randint(WORDS, (512,))
        options = {**QUICK, "memory_budget": budget}
        how: dict[str, Any] = {"backend": "fxremat", "options": options}
        self.call = torch.compile(self.model, **(how if budget else {"backend": "aot_eager"}))

    def step(self, loss: str = "its own", forwards: int = 1) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        value: Any = sum(LOSSES[loss](*self.call(self.words)) for _ in range(forwards))
        value.backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def steps(self, losses: Sequence[str]) -> list[list[Tensor]]:
        return [self.step(loss) for loss in losses]

    def peak_bytes(self, loss: str = "its own") -> int:
        self.model.zero_grad(set_to_none=True)
        step = partial(self.step, loss)
        return fxremat.measure_peak(step, held=(self.model, self.words)).peak_bytes


@pytest.fixture
def model() -> WithLogits:
    torch.manual_seed(0)
    return WithLogits()


def test_it_is_planned_without_the_gradient_from_the_first_step_on(model: WithLogits) -> None:
    """The zeros that plain compile makes take as much as the logits."""
    plain = Trained(model, None)
    expected = plain.steps(["its own"] * 2)
    logits = 512 * WORDS * torch.float32.itemsize
    budget = plain.peak_bytes() - logits // 2
    ours = Trained(model, budget)
    torch.testing.assert_close(ours.steps(["its own"] * 2), expected)
    assert ours.peak_bytes() <= budget
    (report,) = fxremat.reports()
    assert report.memory.budget_bytes == budget
    least = fxremat.explain(model, ours.words, memory_budget=budget, options=QUICK)
    assert least.predicted_peak_bytes == report.predicted_peak_bytes


@pytest.mark.parametrize("late", ["of both", "of logits"])
@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_a_gradient_that_is_sent_counts(
    model: WithLogits, late: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is right in the step that first sends one, where dropout and norms are as they were."""
    losses = ["its own", late, late, "its own"]
    plain = Trained(model, None)
    expected = plain.steps(losses)
    ours = Trained(model, 64 * MIB)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(ours.steps(losses), expected)
    assert caplog.text.count("a gradient came for a result that is returned beside a loss") == 1
    torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict())
    sent = fxremat.reports()[-1]
    assert sent.memory.budget_bytes == 64 * MIB  # planned for, and no longer run again


def test_what_the_first_step_sends_no_gradient_for_is_left_out() -> None:
    """Whatever the loss does not read; and it counts again once a gradient comes."""
    torch.manual_seed(0)
    model, losses = WithFeatures(), ["outside"] * 3 + ["of both", "of both", "outside"]
    plain = Trained(model, None)
    expected = plain.steps(losses)
    zeros = 512 * WORDS * torch.float32.itemsize
    plain_bytes = plain.peak_bytes("outside")
    ours = Trained(model, 16 * MIB)
    torch.testing.assert_close(ours.steps(losses[:3]), expected[:3])
    assert len(fxremat.reports()) == 2
    assert ours.peak_bytes("outside") <= plain_bytes - zeros // 2
    torch.testing.assert_close(ours.steps(losses[3:]), expected[3:])
    SEEN.clear()


@pytest.mark.filterwarnings("ignore::fxremat.BudgetExceeded")
def test_where_it_cannot_be_planned_for_it_is_still_right(model: WithLogits) -> None:
    plain = Trained(model, None)
    losses = ["its own", "of both", "of both", "its own"]
    expected = plain.steps(losses)
    with pytest.raises(BackendCompilerFailed) as refused:
        Trained(model, MIB).step()
    ours = Trained(model, least_named(refused.value))
    torch.testing.assert_close(ours.steps(losses), expected)


def test_results_may_be_read_and_written(model: WithLogits) -> None:
    ours = Trained(model, 64 * MIB)
    loss, logits = ours.call(ours.words)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.argmax(-1).shape == (512,)
    logits.detach().cpu().numpy()
    loss.backward()
    logits.mul_(2.0)


def test_two_forwards_before_their_backward(model: WithLogits) -> None:
    """The second one changes the statistics of the norm: the first has those that it found."""
    expected = Trained(model, None).step("of both", forwards=2)
    torch.testing.assert_close(Trained(model, 64 * MIB).step("of both", forwards=2), expected)


def test_what_was_overwritten_is_named(model: WithLogits) -> None:
    ours = Trained(model, 64 * MIB)
    _, logits = ours.call(ours.words)
    with torch.no_grad():
        ours.model.get_parameter("head.weight").add_(1.0)
    loss: Any = logits.sum()
    with pytest.raises(RuntimeError, match="before the optimizer steps"):
        loss.backward()


def found_in(model: nn.Module, *given: Tensor, by: Callable[[Any, Any], Any]) -> Any:
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(by(gm, inputs))
        return gm

    torch.compile(model, backend=backend)(*given)
    return found[0]


def returns(what: Callable[[Tensor], Any]) -> Net:
    return Net(lambda net, x: what(net.layer(x)), layer=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("what", "unsent"),
    [
        (lambda y: (y.sum(), y), (1,)),
        (lambda y: (y, y.sum(), y.exp()), (0, 2)),
        (lambda y: {"loss": y.sum(), "parts": [y, y.detach()]}, (1,)),
        (lambda y: (y, y.exp()), ()),
        (lambda y: y.sum(), ()),
        (lambda y: (y.sum(), y.mean()), ()),
        (lambda y: (y.sum().detach(), y), ()),
        (lambda y: (torch.vmap(torch.sin)(y).sum(), y), (1,)),
    ],
)
def test_which_results_get_none(what: Callable[[Tensor], Any], unsent: tuple[int, ...]) -> None:
    assert found_in(returns(what), torch.randn(2, 4), by=unsent_results) == unsent


def test_a_weight_of_other_results_keeps_its_gradient_of_zeros() -> None:
    net = Net(
        lambda net, x: ((y := net.layer(x)).sum(), net.other(y)),
        layer=nn.Linear(4, 4), other=nn.Linear(4, 4),
    )  # fmt: skip
    assert found_in(net, torch.randn(2, 4), by=unsent_results) == ()


def test_a_part_of_a_model_sends_all() -> None:
    x = torch.randn(2, 4, requires_grad=True) * 2
    assert found_in(returns(lambda y: (y.sum(), y)), x, by=unsent_results) == ()


class Writes(nn.Module):
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("place", torch.arange(4.0))

    def forward(self, x: Tensor, seen: Tensor) -> Any:
        seen[0].add_(1)
        y = self.layer(self.norm(x)) + self.place
        return y.square().sum() + seen.sum(), y


def test_only_what_the_graph_writes_is_copied_before_a_run() -> None:
    """Through a view, too, and the statistics of norms; not the batch, which would take more."""
    model, seen = Writes(), torch.zeros(3)

    def written(gm: Any, inputs: Any) -> list[Any]:
        return [inputs[k] for k in written_inputs(gm)]

    found, norm = found_in(model, torch.randn(8, 4), seen, by=written), model.norm
    statistics = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert {*map(id, found)} == {*map(id, (seen, *statistics))}


# --- loss only ----------------------------------------------------------------------------

MANY_WORDS = 4000


class Words(nn.Module):
    """Words in, loss and logits out, as ``form`` says."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form
        self.embedding, self.head = nn.Embedding(MANY_WORDS, 32), nn.Linear(32, MANY_WORDS)

    def forward(self, words: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embedding(words)))
        loss = F.cross_entropy(logits.flatten(0, -2), words.flatten())
        if self.form == "dict":
            return {"loss": loss, "logits": logits, "extra": loss * 2}
        if self.form == "tuple":
            return loss, logits
        return loss if self.form == "loss" else logits


def words() -> Tensor:
    return torch.arange(512).reshape(2, 256)


@pytest.mark.parametrize(("form", "left"), [("dict", {"loss"}), ("tuple", 1)])
def test_training_gives_the_loss_alone_and_evaluation_everything(form: str, left: Any) -> None:
    model, everything = Words(form), 3 if form == "dict" else 2
    handle = fxremat.loss_only(model)
    given = model(words())
    assert (set(given) if form == "dict" else len(given)) == left
    with torch.no_grad():
        assert len(model(words())) == everything
    assert len(model.eval()(words())) == everything
    handle.remove()
    assert len(model.train()(words())) == everything


def test_a_copy_of_the_model_runs_itself() -> None:
    model = Words()
    fxremat.loss_only(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    given = twin(words())
    assert set(given) == {"loss"}
    torch.testing.assert_close(given["loss"], torch.tensor(float(MANY_WORDS)).log())


def test_a_forward_that_was_put_on_the_model_comes_back() -> None:
    """Until then what is to be kept beside the loss is kept."""
    model = Words()
    own = partial(Words.forward, model)
    model.forward = own  # type: ignore[method-assign]
    handle = fxremat.loss_only(model, keep=("extra", "not there"))
    assert set(model(words())) == {"loss", "extra"}
    handle.remove()
    assert model.forward is own


@pytest.mark.parametrize("form", ["loss", "logits"])
def test_what_has_no_loss_beside_other_things_stays_as_it_is(form: str) -> None:
    model = Words(form)
    expected = model(words())
    fxremat.loss_only(model)
    torch.testing.assert_close(model(words()), expected)


def test_outputs_of_a_class_of_their_own_stay_of_it() -> None:
    @dataclass
    class Output(dict[str, Any]):
        loss: Any = None
        logits: Any = None

        def __post_init__(self) -> None:
            self.update(loss=self.loss, logits=self.logits)

    class Model(Words):
        def forward(self, words: Tensor) -> Output:
            return Output(*Words.forward(self, words))

    model = Model("tuple")
    fxremat.loss_only(model)
    given = model(words())
    assert type(given) is Output
    assert given.logits is None


def least(model: nn.Module) -> int:
    options = {"executor": "aot_eager"}
    return fxremat.explain(model, words(), options=options).minimum_peak_bytes


def test_the_least_is_that_of_a_model_that_returns_its_loss() -> None:
    torch.manual_seed(0)
    alone = least(Words("loss"))
    both = Words("dict")
    logits = 512 * MANY_WORDS * torch.float32.itemsize
    assert least(both) == pytest.approx(alone + logits, abs=64)  # and no gradient of them
    fxremat.loss_only(both)
    assert least(both) <= 1.02 * alone


def test_gradients_are_those_without_it() -> None:
    model = Words("dict")
    model(words())["loss"].backward()
    expected = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    fxremat.loss_only(model)
    model.compile(backend="fxremat", options={"executor": "aot_eager"})
    model(words())["loss"].backward()
    torch.testing.assert_close([weight.grad for weight in model.parameters()], expected)


def test_a_refusal_names_the_output_that_takes_the_memory() -> None:
    plain = {"variants": "none"}
    with pytest.raises(fxremat.InfeasibleBudget) as refused:
        fxremat.explain(Words("tuple"), words(), memory_budget="1MiB", options=plain)
    assert refused.value.returned is not None
    what, nbytes = refused.value.returned
    assert "head" in what
    assert nbytes >= 512 * MANY_WORDS * 4
    assert "fxremat.loss_only(model)" in str(refused.value)


@pytest.mark.parametrize(("form", "left_out"), [("tuple", False), ("loss", True), ("tuple", True)])
def test_a_plan_warns_of_it(form: str, left_out: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Small outputs are not worth a word."""
    model = Words(form)
    if left_out:
        fxremat.loss_only(model)
    fxremat.explain(model, words(), memory_budget="1GiB")
    lines = [r.getMessage() for r in caplog.records if "is an output" in r.getMessage()]
    assert ["head" in line for line in lines] == ([] if left_out else [True])


class ChoosesItsLoss(Words):
    """As models of Hugging Face: the first choice is logged, which ends a graph."""

    chosen: Any = None

    @property
    def loss_function(self) -> Any:
        if self.chosen is None:
            torch._dynamo.graph_break()  # as what logs once does
        return self.chosen or F.cross_entropy

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self.chosen = value

    def forward(self, words: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embedding(words)))
        loss = self.loss_function(logits.flatten(0, -2), words.flatten())
        return {"loss": loss, "logits": logits}


def ops_compiled(model: nn.Module) -> int:
    """Of one forward, in graphs."""
    torch._dynamo.reset()
    counted = CompileCounter()
    model.compile(backend=counted)
    assert set(model(torch.randint(MANY_WORDS, (2, 8)))) == {"loss"}
    return counted.op_count


def test_a_loss_that_is_chosen_in_the_forward_ends_no_graph() -> None:
    before, now = ChoosesItsLoss(), ChoosesItsLoss()
    before.loss_function = F.cross_entropy
    for model in (before, now):
        fxremat.loss_only(model)
    assert ops_compiled(now) == ops_compiled(before)
