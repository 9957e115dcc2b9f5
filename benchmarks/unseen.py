"""Models that others wrote, from Hugging Face's transformers, under several budgets.

    python -m benchmarks.unseen [--models gpt2,t5] [--out unseen.json]

Random weights, small configurations, their own dropout. Needs the package `transformers`, which
fxremat itself does not. Planned: the time that the plan adds to store-all's; variants: how many are
taken. The gradients' error is the median over STEPS steps with different dropout, and the largest:
where the forward rounds differently, the input of a ReLU that is zero but for rounding may fall on
its other side, and the gradient of such a step differs by what that element adds to it.
"""

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxremat.memory.measured_peak import held_bytes

from .machine import describe_machine
from .training import Infeasible, Training, gradient_error, prepare
from .ways import VARIANTS

MIB = 2**20
BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 8, 128, 1000, 128, 3, 4
IMAGE, PATCH = 64, 8
FRACTIONS = (0.8, 0.6, 0.4)
SEED = 1
STEPS = 5
HEAD = (
    "model", "budget", "MiB", "measured", "obeyed", "promised", "error", "gradients", "largest",
    "step ms", "planned", "variants", "compile s",
)  # fmt: skip
WIDTH_OF_CELL = 9


class Loss(nn.Module):
    """Makes a model of transformers a function of its tensors to its loss."""

    def __init__(self, model: Any, *names: str) -> None:
        super().__init__()
        model.loss_function = model.loss_function  # once: choosing it may log, a graph break
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).loss
        return loss


Case = tuple[nn.Module, tuple[Tensor, ...]]


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _language_model(model: nn.Module) -> Case:
    tokens = _tokens()
    return Loss(model, "input_ids", "labels"), (tokens, tokens)


def _gpt2(hf: Any) -> Case:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _language_model(hf.GPT2LMHeadModel(config))


def _llama(hf: Any) -> Case:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, use_cache=False,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
    )  # fmt: skip
    return _language_model(hf.LlamaForCausalLM(config))


def _bert(hf: Any) -> Case:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    )  # fmt: skip
    return _language_model(hf.BertForMaskedLM(config))


def _t5(hf: Any) -> Case:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH,
        num_layers=LAYERS - 1, num_heads=HEADS, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return _language_model(hf.T5ForConditionalGeneration(config))


def _vit(hf: Any) -> Case:
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_labels=10,
        intermediate_size=4 * WIDTH, image_size=IMAGE, patch_size=PATCH, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return _images(hf.ViTForImageClassification(config))


def _images(model: nn.Module) -> Case:
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return Loss(model, "pixel_values", "labels"), (images, torch.randint(10, (BATCH,)))


def _resnet(hf: Any) -> Case:
    config = hf.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=10
    )
    return _images(hf.ResNetForImageClassification(config))


def _convnext(hf: Any) -> Case:
    config = hf.ConvNextConfig(
        hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, num_labels=10,
        drop_path_rate=0.1,
    )  # fmt: skip
    return _images(hf.ConvNextForImageClassification(config))


def _mobilenet(hf: Any) -> Case:
    config = hf.MobileNetV2Config(depth_multiplier=0.5, image_size=IMAGE, num_labels=10)
    return _images(hf.MobileNetV2ForImageClassification(config))


MODELS: dict[str, Callable[[Any], Case]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "convnext": _convnext,
    "mobilenet": _mobilenet,
}


def make(name: str) -> Case:
    """A model in training mode, the same at every call."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    model, arguments = MODELS[name](importlib.import_module("transformers"))
    return model.train(), arguments


def unread_bytes(model: nn.Module, arguments: tuple[Any, ...]) -> int:
    """Bytes of the model that no graph reads, so that fxremat has to be told of them.

    Llama's `original_inv_freq` is such a buffer.
    """
    read: list[Any] = []

    def keep_inputs(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        read.extend(inputs)
        return graph.forward

    torch.compiler.reset()
    torch.compile(model, backend=keep_inputs)(*arguments)
    return held_bytes(model, arguments, *read) - held_bytes(*read)


@dataclass
class Row:
    """One budget; ``report`` has fxremat's facts, the variants taken among them."""

    model: str
    what: str
    budget_bytes: int | None = None
    minimum_bytes: int | None = None
    peak_bytes: int | None = None
    gradient_errors: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    report: dict[str, Any] | None = None

    def cells(self) -> list[str]:
        """A line of the table."""
        start = [self.model, self.what, _mib(self.budget_bytes)]
        if self.peak_bytes is None:
            least = f"least {_mib(self.minimum_bytes)}" if self.minimum_bytes else "no minimum"
            return [*start, "", least]
        compiled = "" if self.compile_seconds is None else f"{self.compile_seconds:.0f}"
        time = [f"{1e3 * median(self.step_seconds):.1f}", *self._planned(), compiled]
        return [*start, _mib(self.peak_bytes), *self._promises(), *time]

    def _promises(self) -> list[str]:
        if self.report is None or self.budget_bytes is None or self.peak_bytes is None:
            return [""] * 5
        promised = self.report["predicted_peak_bytes"]
        return [
            "yes" if self.peak_bytes <= self.budget_bytes else "NO",
            _mib(promised),
            f"{abs(promised - self.peak_bytes) / self.peak_bytes:.2%}",
            f"{median(self.gradient_errors):.1e}",
            f"{max(self.gradient_errors):.1e}",
        ]

    def _planned(self) -> list[str]:
        if self.report is None:
            return ["", ""]
        return [f"{self.report['time_overhead']:+.1%}", str(sum(self.report["variants"].values()))]


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / MIB:.1f}"


def rows_of(name: str) -> Iterator[Row]:
    """The rows of one model, one by one as they are measured: compile first."""
    reference = prepare(VARIANTS["compile"], *make(name))
    row = _measured(Row(name, "compile"), reference)
    assert row.peak_bytes is not None
    expected = _gradients(reference)
    reserve = unread_bytes(*make(name))
    yield row
    for fraction in FRACTIONS:
        budget = int(fraction * row.peak_bytes)
        yield _row(Row(name, f"{fraction:.0%}", budget), reserve, expected)
    yield _row(Row(name, "minimum"), reserve, expected)


def _gradients(training: Training) -> list[dict[str, Tensor]]:
    """Of steps with different dropout."""
    return [training.gradients(SEED + step)[1] for step in range(STEPS)]


def _row(row: Row, reserve: int, expected: list[dict[str, Tensor]]) -> Row:
    """A row of fxremat, filled in."""
    way = VARIANTS["fxremat@min"]
    try:
        training = prepare(way, *make(row.model), row.budget_bytes, reserve)
    except Infeasible as error:
        return replace(row, minimum_bytes=error.minimum_bytes)
    row.report = training.report or {}
    row.budget_bytes = row.report["budget_bytes"]
    row.gradient_errors = list(map(gradient_error, _gradients(training), expected))
    return _measured(row, training)


def _measured(row: Row, training: Training) -> Row:
    row.peak_bytes = training.measure().peak_bytes
    row.step_seconds = training.time_steps(STEPS)
    row.compile_seconds = training.compile_seconds
    return row


def show(line: Iterable[str]) -> None:
    """Print a line at once: the next one may take minutes."""
    print("  ".join(cell.rjust(WIDTH_OF_CELL) for cell in line), flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.unseen", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this benchmark needs transformers: python -m pip install transformers")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        show(HEAD)
        for row in rows_of(name):
            show(row.cells())
            rows.append(asdict(row))
            if options.out is not None:
                data = {"machine": describe_machine("cpu", options.threads), "rows": rows}
                options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
