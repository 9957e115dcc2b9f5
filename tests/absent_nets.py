"""A small transformer in 16 bits, and what stands for its generated code on a card."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from benchmarks.nets.language import GPT
from fxremat.compat.absent.tracing import trace_for_absent
from fxremat.compat.dynamo import fresh_dynamo_caches
from fxremat.compat.inductor.generated_code import Generated, generate
from fxremat.compat.joint_graph import torch_partition
from fxremat.compat.tensors import fake_tensors
from fxremat.cost.device import card_named


def net() -> GPT:
    """With dropout, which draws random numbers on the card: one that cuDNN has, too."""
    return GPT(layers=1, width=128, heads=2, length=128, vocabulary=500, dropout=0.125)


def net_and_tokens() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The net in bfloat16, and eight texts."""
    tokens = torch.zeros(8, 128, dtype=torch.long)
    return net().to(torch.bfloat16), (tokens, tokens.clone())


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
