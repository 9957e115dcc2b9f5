"""What fits on cards that are not here: the largest batch and sequence of models as published.

    python -m benchmarks.fits [--models llama-3.2-1b,vit-l] [--cards H100] [--out fits.json]
                              [--blocks 8] [--whole]

Models are those of `transformers` and `diffusers`, which fxremat itself does not need, made of
their published configurations on tensors without memory. Weights are in bf16, AdamW's states too.
"""

import argparse
import importlib
import json
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from fxremat.sizes import format_bytes
from fxremat.training.blocks import shortened
from fxremat.whatif.fit import Fit
from fxremat.whatif.largest_size import WAYS, Way

from .machine import describe_machine
from .rows import format_table

Vary = dict[str, list[tuple[int, int]]]
CARDS = ("H100", "A100-40GB", "4090")
TOKENS: Vary = {"batch": [(0, 0), (1, 0)], "sequence": [(0, 1), (1, 1)]}
HEAD = [
    "model", "card", "varies", *WAYS, "a second, checkpointed", "fxremat there", "fxremat at most",
    "seconds", "of the processor",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model that returns its loss, its inputs, and what of these may vary."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    vary: Vary


class LanguageLoss(nn.Module):
    """The loss of a language model of transformers, as its trainer has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.loss_function = model.loss_function  # once: choosing it may log, a graph break
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels, use_cache=False).loss
        return loss


class ImageLoss(nn.Module):
    """The loss of a classifier of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.loss_function = model.loss_function
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixels).logits
        return nn.functional.cross_entropy(logits.float(), labels)


class NoiseLoss(nn.Module):
    """The mean squared error of the noise that a diffusion model of diffusers predicts."""

    def __init__(self, model: Any, context: str) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, noisy: Tensor, times: Tensor, context: Tensor, noise: Tensor) -> Tensor:
        made = self.model(noisy, times, return_dict=False, **{self.context: context})[0]
        return nn.functional.mse_loss(made[:, : noise.shape[1]].float(), noise.float())


def _language(config: str, model: str, length: int, **arguments: Any) -> Case:
    library = importlib.import_module("transformers")
    made = getattr(library, model)(getattr(library, config)(**arguments))
    tokens = torch.zeros(2, length, dtype=torch.long)
    return Case(LanguageLoss(made), (tokens, tokens.clone()), TOKENS)


def llama_1b() -> Case:
    return _language(
        "LlamaConfig", "LlamaForCausalLM", 2048, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=True,
    )  # fmt: skip


def _qwen3(width: int, hidden: int, *, tied: bool) -> Case:
    return _language(
        "Qwen3Config", "Qwen3ForCausalLM", 2048, hidden_size=width, intermediate_size=hidden,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=tied,
    )  # fmt: skip


def gpt2_xl() -> Case:
    return _language(
        "GPT2Config", "GPT2LMHeadModel", 1024, n_embd=1600, n_layer=48, n_head=25,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def vit_l() -> Case:
    library = importlib.import_module("transformers")
    config = library.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000,
    )  # fmt: skip
    pixels, labels = torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long)
    model = library.ViTForImageClassification(config)
    return Case(ImageLoss(model), (pixels, labels), {"batch": [(0, 0), (1, 0)]})


def _diffusion(model: Any, context: str, given: Tensor, channels: int, side: int) -> Case:
    noisy, times = torch.zeros(2, channels, side, side), torch.zeros(2, dtype=torch.long)
    inputs = (noisy, times, given, torch.zeros_like(noisy))
    return Case(NoiseLoss(model, context), inputs, {"batch": [(k, 0) for k in range(4)]})


def unet() -> Case:
    """The U-Net of Stable Diffusion 1.5, on latents of images of 512 pixels."""
    library = importlib.import_module("diffusers")
    model = library.UNet2DConditionModel(cross_attention_dim=768, sample_size=64)
    return _diffusion(model, "encoder_hidden_states", torch.zeros(2, 77, 768), 4, 64)


def dit_xl() -> Case:
    """DiT-XL/2, on latents of images of 256 pixels."""
    library = importlib.import_module("diffusers")
    model = library.DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8,
        num_layers=28, sample_size=32, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    return _diffusion(model, "class_labels", torch.zeros(2, dtype=torch.long), 4, 32)


MODELS: dict[str, Callable[[], Case]] = {
    "llama-3.2-1b": llama_1b,
    "qwen3-4b": lambda: _qwen3(2560, 9728, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, tied=False),
    "gpt2-xl": gpt2_xl,
    "vit-l": vit_l,
    "unet": unet,
    "dit-xl": dit_xl,
}


def case_of(name: str) -> Case:
    """A model in bf16, without memory."""
    with torch.device("meta"):
        case = MODELS[name]()
    floats = (x.to(torch.bfloat16) if x.is_floating_point() else x for x in case.inputs)
    return Case(case.model.to(torch.bfloat16).train(), tuple(floats), case.vary)


@dataclass(frozen=True)
class Row:
    """What fits of one model on one card, and what it took to say so."""

    model: str
    card: str
    found: Fit
    seconds: float
    processor_seconds: float
    most_resident_bytes: int

    def lines(self) -> list[list[str]]:
        """One for each size that varies."""
        return [
            [
                self.model,
                self.card,
                what,
                *(size(self.found, what, way) for way in WAYS),
                *rates(self.found, what),
                f"{self.seconds:.0f}",
                f"{self.processor_seconds:.0f}",
            ]
            for what in dict.fromkeys(row.what for row in self.found.rows)
        ]


def size(found: Fit, what: str, way: Way) -> str:
    """The largest; "-" where a model has nothing to checkpoint by."""
    return next((f"{r.size:,}" for r in found.rows if (r.what, r.way) == (what, way)), "-")


def rates(found: Fit, what: str) -> list[str]:
    """A second: of checkpointing at its largest size, of fxremat there, and the most of fxremat."""
    rows = (r for r in found.rows if (r.what, r.way) == (what, "checkpointed blocks"))
    end = next(rows, None)
    there = found.at(what, end.size) if end is not None else None
    shown = end, there, found.fastest(what)
    return [f"{one.per_second:,.1f}" if one is not None and one.size else "-" for one in shown]


def processor_seconds() -> float:
    """That this process has taken so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(
    models: Sequence[str],
    cards: Sequence[str],
    optimizer: str = "adamw",
    *,
    blocks: int | None = None,
    whole: bool = False,
) -> list[Row]:
    """Prints the table as it grows; of models with fewer ``blocks`` where that is asked for."""
    rows: list[Row] = []
    for name in models:
        for card in cards:
            begin, used = time.perf_counter(), processor_seconds()
            case = case_of(name)
            with nullcontext() if blocks is None else shortened(case.model, blocks):
                found = fxremat.fit(
                    case.model,
                    case.inputs,
                    vary=case.vary,
                    device=card,
                    optimizer=optimizer,
                    whole=whole,
                )
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            seconds, used = time.perf_counter() - begin, processor_seconds() - used
            rows.append(Row(name, card, found, seconds, used, resident))
            lines = [line for row in rows for line in row.lines()]
            print(format_table([HEAD, *lines]), flush=True)
            print(f"resident memory so far: {format_bytes(resident)}", flush=True)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--blocks", type=int, help="of the model's blocks: the first so many")
    parser.add_argument("--whole", action="store_true", help="study all blocks, not few of them")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    models, cards = given.models.split(","), given.cards.split(",")
    rows = run(models, cards, given.optimizer, blocks=given.blocks, whole=given.whole)
    if given.out is not None:
        data = {
            "machine": describe_machine("cpu", torch.get_num_threads()),
            "rows": [asdict(row) for row in rows],
        }
        given.out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
