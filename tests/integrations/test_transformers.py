"""`train_within` beside what else a Trainer does; TRL's heads as plain ops."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat


def test_micro_batches_and_evaluation_and_figures_in_the_logs(tmp_path: Path) -> None:
    """Evaluation gets logits, also in the middle; losses are those without fxremat."""
    losses_of: Any = importlib.import_module("hf_trainer").losses_of
    tiny: Any = importlib.import_module("tiny")
    from transformers import Trainer, TrainingArguments

    from fxremat.integrations.transformers import train_within

    shapes: list[tuple[int, ...]] = []

    def look(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    def trained(folder: Path, *, within: bool) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        data = tiny.texts(16)
        trainer = Trainer(
            tiny.language_model(),
            arguments,
            train_dataset=data,
            eval_dataset=data[:2],
            compute_metrics=look,
        )
        if within:
            train_within(trainer, "150MiB", options={"executor": "aot_eager"})
        trainer.train()
        return trainer

    expected, trainer = trained(tmp_path, within=False), trained(tmp_path, within=True)
    torch.testing.assert_close(losses_of(trainer), losses_of(expected), rtol=1e-4, atol=1e-4)
    assert len(shapes) == 4
    assert {shape[-1] for shape in shapes} == {tiny.WORDS}
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert all(line["fxremat/budget(GiB)"] == pytest.approx(150 / 1024) for line in logged)
    (report,) = fxremat.reports()
    assert report.predicted_peak_bytes <= 150 * 2**20


def test_gradient_checkpointing_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny: Any = importlib.import_module("tiny")
    from transformers import Trainer, TrainingArguments

    from fxremat.integrations.transformers import train_within

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, gradient_checkpointing=True, save_strategy="no",
        report_to=[], use_cpu=True,
    )  # fmt: skip
    model = tiny.language_model()
    trainer = Trainer(model, arguments, train_dataset=tiny.texts(16))
    train_within(trainer, "150MiB", options={"executor": "aot_eager"})
    trainer.train()
    assert not model.is_gradient_checkpointing
    assert "gradient checkpointing is switched off" in caplog.text
    assert len(fxremat.reports()) == 1  # what the model logs once ends no graph


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (5.0, 0.5, 0.7)])
def test_a_plain_head_computes_what_the_head_of_trl_does(
    bias: bool, softcap: float | None, scale: float, temperature: float
) -> None:
    """All outputs, and the gradients that log-probability and entropy give."""
    from trl.trainer import utils

    from fxremat.integrations.trl import OUTPUTS, head, use_plain_heads

    use_plain_heads()
    use_plain_heads()  # again is no change
    own: Any = utils._ChunkedLogProbFunction
    torch.manual_seed(0)
    made = [torch.randn(24, 16), torch.randn(100, 16), torch.randn(100) if bias else None]
    targets = torch.randint(0, 100, (24,))
    found = []
    plain: Any = head
    for compute in (own.apply, plain):
        given = [None if x is None else x.clone().requires_grad_() for x in made]
        results = compute(*given, targets, temperature, 32, softcap, scale, OUTPUTS)
        (results[0].sum() + 0.3 * results[1].square().sum()).backward()
        found.append((results, [None if x is None else x.grad for x in given]))
    (theirs, their_grads), (ours, our_grads) = found
    torch.testing.assert_close(ours[:4], theirs[:4], rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[4], theirs[4])
    torch.testing.assert_close(our_grads, their_grads, rtol=1e-4, atol=1e-4)
    only = plain(*made, targets, temperature, 32, softcap, scale, ("log_probs",))
    assert [x is None for x in only] == [False, True, True, True, True]


def test_a_layer_drop_of_0_ends_no_graph() -> None:
    """And one that is not 0 is left as it is."""
    from transformers import OPTConfig, OPTForCausalLM

    from fxremat.integrations.transformers import keep_whole
    from fxremat.training.whole_graphs import NoLayerDrop

    sizes: Any = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    few: Any = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "dropout": 0.0}
    models = [OPTForCausalLM(OPTConfig(**sizes, **few, layerdrop=drop)) for drop in (0.0, 0.5)]
    keep_whole(*models)
    kinds = [type(model.model.decoder.layerdrop) for model in models]
    assert kinds == [NoLayerDrop, float]
    assert (
        models[0].config.to_json_string()
        == OPTForCausalLM(OPTConfig(**sizes, **few, layerdrop=0.0)).config.to_json_string()
    )
    model, tokens = models[0].train(), torch.randint(64, (2, 16))
    expected = model(input_ids=tokens, labels=tokens).loss
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=tokens, labels=tokens).loss, expected)
