"""What the examples train: models with random weights and data that is made here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fxremat

WORDS = 4096
TOKENS = 256


def language_model(seed: int = 0, words: int = WORDS, width: int = 256) -> LlamaForCausalLM:
    """A Llama of 4 layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def texts(count: int, seed: int = 1, words: int = WORDS) -> list[dict[str, torch.Tensor]]:
    """Token ids, with labels: the first quarter of each text is not learnt."""
    numbers = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, words, (TOKENS,), generator=numbers)
        labels = ids.clone()
        labels[: TOKENS // 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def tokenizer(words: int = WORDS) -> PreTrainedTokenizerFast:
    """One word for each number below ``words``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ["<pad>", "<bos>", "<eos>"]
    names = special + [str(number) for number in range(len(special), words)]
    own = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, "<pad>"))
    own.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",
    )


LOOP_BYTES = 2**17
"""A batch that a loader has ready, and a loop's own numbers."""


Watch = Callable[[int, Any], None]
"""Told before each step: its number, and what stays on the device from step to step."""


def unwatched(step: int, held: Any) -> None:
    """Nobody looks."""


def run(train: Callable[..., list[float]]) -> None:
    """The example as a program: a budget in, losses out."""
    options = {"memory_budget": sys.argv[1]} if len(sys.argv) > 1 else {}
    print("losses:", *(f"{loss:.4f}" for loss in train("fxremat", options)))
    for report in fxremat.reports():
        print(report.summary())
