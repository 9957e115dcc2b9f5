"""A small transformer in 16 bits, and what stands for its generated code on a card."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.compat.absent.tracing import trace_for_absent
from fxremat.compat.dynamo import fresh_dynamo_caches
from fxremat.compat.inductor.generated_code import Generated, generate
from fxremat.compat.joint_graph import torch_partition
from fxremat.compat.tensors import fake_tensors
from fxremat.cost.device import card_named

WIDTH, HEADS, WORDS = 128, 2, 500


class Block(nn.Module):
    """Attention, then two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        parts = self.qkv(self.first(x)).split(WIDTH, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(functional.gelu(self.up(self.second(x))))
        return x + functional.dropout(hidden, 0.1)


class Net(nn.Module):
    """Words in, the loss of the next ones out."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.words(tokens)))
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def net_and_tokens(batch: int = 8, length: int = 128) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The net in bfloat16."""
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return Net().to(torch.bfloat16), (tokens, tokens.clone())


@cache
def halves_on(name: str) -> tuple[fx.GraphModule, fx.GraphModule, list[Generated]]:
    """Forward and backward as torch cuts them, on a card, and the code of both."""
    found: list[Any] = []

    def partition(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = torch_partition(module, joint_inputs, **kwargs)
        count = kwargs["num_fwd_outputs"]
        codes = [
            generate(forward, is_backward=False, seen_outputs=count, with_kernels=True),
            generate(backward, is_backward=True, with_kernels=True),
        ]
        found.append((forward, backward, codes))
        return forward, backward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return trace_for_absent(gm, inputs, {}, partition, card_named(name).properties())

    with fake_tensors():
        model, inputs = net_and_tokens()
        with fresh_dynamo_caches():
            torch.compile(model, backend=backend)(*inputs)
    [(forward, backward, codes)] = found
    return forward, backward, codes
