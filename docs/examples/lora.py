"""LoRA on a Llama with PEFT: frozen weights have no gradients; saved values take the other memory.

    python docs/examples/lora.py --budget 16MiB
    python docs/examples/lora.py --width 4096 --layers 32 --length 2048 --batch 8 --device cuda \
        --budget 40GiB
"""

from __future__ import annotations

import torch
from loop import Batch, arguments, train
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 1024


class Adapted(nn.Module):
    """A Llama with LoRA that returns its loss, for tokens (batch, length)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=11 * width // 4,
            num_hidden_layers=layers, num_attention_heads=width // 32, use_cache=False,
        )  # fmt: skip
        names = ["q_proj", "v_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
        self.model = get_peft_model(LlamaForCausalLM(config), lora)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def counting(count: int, length: int) -> Batch:
    """Tokens that count up from somewhere, in steps of one size."""
    start, by = torch.randint(0, WORDS, (2, count, 1))
    return ((start + by * torch.arange(length)) % WORDS,)


def main(width: int = 128, layers: int = 4, length: int = 128, batch: int = 4, steps: int = 5,
         budget: str | None = None, device: str = "cpu") -> list[float]:  # fmt: skip
    """The loss of each step."""
    torch.manual_seed(0)
    model = Adapted(width, layers)
    return train(model, lambda step: counting(batch, length), steps, budget, device)


if __name__ == "__main__":
    main(**vars(arguments(__doc__ or "", width=128, layers=4, length=128, batch=4)))
