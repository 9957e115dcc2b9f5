"""A model that returns its loss alone in training, and what an output that nobody reads costs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fxremat

WORDS = 4000


pytestmark = pytest.mark.usefixtures("fresh")


class Words(nn.Module):
    """Words in, loss and logits out, as ``form`` says."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form
        self.embedding, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)

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
    model = Words(form)
    handle = fxremat.loss_only(model)
    given = model(words())
    assert (set(given) if form == "dict" else len(given)) == left
    with torch.no_grad():
        assert len(model(words())) == (3 if form == "dict" else 2)
    assert len(model.eval()(words())) == (3 if form == "dict" else 2)
    handle.remove()
    assert len(model.train()(words())) == (3 if form == "dict" else 2)


def test_a_copy_of_the_model_runs_itself() -> None:
    model = Words()
    fxremat.loss_only(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    given = twin(words())
    assert set(given) == {"loss"}
    torch.testing.assert_close(given["loss"], torch.tensor(float(WORDS)).log())


def test_a_forward_that_was_put_on_the_model_comes_back() -> None:
    model = Words()
    own = partial(Words.forward, model)
    model.forward = own  # type: ignore[method-assign]
    handle = fxremat.loss_only(model)
    assert set(model(words())) == {"loss"}
    handle.remove()
    assert model.forward is own


def test_what_is_to_be_kept_is_kept() -> None:
    model = Words()
    fxremat.loss_only(model, keep=("extra", "not there"))
    assert set(model(words())) == {"loss", "extra"}


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
    logits = 512 * WORDS * torch.float32.itemsize
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
    assert nbytes >= 512 * WORDS * 4
    assert "fxremat.loss_only(model)" in str(refused.value)


def test_a_plan_warns_of_it(caplog: pytest.LogCaptureFixture) -> None:
    fxremat.explain(Words("tuple"), words(), memory_budget="1GiB")
    (line,) = [r.getMessage() for r in caplog.records if "is an output" in r.getMessage()]
    assert "head" in line


@pytest.mark.parametrize("form", ["loss", "tuple"])
def test_small_outputs_are_not_worth_a_word(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Words(form)
    fxremat.loss_only(model)
    fxremat.explain(model, words(), memory_budget="1GiB")
    assert not [r for r in caplog.records if "is an output" in r.getMessage()]


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
    assert set(model(torch.randint(WORDS, (2, 8)))) == {"loss"}
    return counted.op_count


def test_a_loss_that_is_chosen_in_the_forward_ends_no_graph() -> None:
    before, now = ChoosesItsLoss(), ChoosesItsLoss()
    before.loss_function = F.cross_entropy
    for model in (before, now):
        fxremat.loss_only(model)
    assert ops_compiled(now) == ops_compiled(before)
