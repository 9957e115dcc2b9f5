"""Real models for the table of variants: for each rule, those in which it should matter.

Two sizes: `cpu`, of which a step runs on a small machine, and `gpu`, of few layers but each as
large as that of a model for one GPU; it is only ever traced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Config, made
from .nets.language import GPT
from .nets.layers import BareRMSNorm, Network
from .nets.vision import VGG, ResNet, UNet

SIZES = ("cpu", "gpu")
SLOPE = 0.1


def _gpt(**more: Any) -> dict[str, Config]:
    cpu = {"layers": 2, "width": 128, "heads": 4, "length": 128, "vocabulary": 1000, **more}
    large = {"width": 2048, "heads": 16, "length": 2048}
    return {"cpu": Config(GPT, 8, cpu), "gpu": Config(GPT, 16, {**cpu, **large})}


def _vgg(**more: Any) -> dict[str, Config]:
    cpu = {"stages": (1, 1, 2), "width": 16, "resolution": 64, "classes": 100, **more}
    large = {"stages": (2, 2, 3), "width": 64, "resolution": 224}
    return {"cpu": Config(VGG, 16, cpu), "gpu": Config(VGG, 64, {**cpu, **large})}


def _unet(**more: Any) -> dict[str, Config]:
    cpu = {"levels": 2, "width": 16, "resolution": 64, "classes": 8, **more}
    large = {"levels": 3, "width": 64, "resolution": 256}
    return {"cpu": Config(UNet, 8, cpu), "gpu": Config(UNet, 32, {**cpu, **large})}


def _resnet() -> dict[str, Config]:
    cpu = {"blocks": (1, 1, 1), "width": 16, "resolution": 128, "classes": 100}
    large = {"blocks": (2, 2, 2), "width": 64, "resolution": 224}
    return {"cpu": Config(ResNet, 16, cpu), "gpu": Config(ResNet, 256, {**cpu, **large})}


_leaky = partial(F.leaky_relu, negative_slope=SLOPE)
MODELS: dict[str, dict[str, Config]] = {
    "gpt": _gpt(),
    "gpt, 50k words": _gpt(vocabulary=50257),
    "gpt, plain attention": _gpt(spelling="plain"),
    "gpt, ALiBi": _gpt(spelling="biased"),
    "gpt, bare RMSNorm": _gpt(norm=BareRMSNorm),
    "gpt, dropout": _gpt(dropout=0.1),
    "resnet": _resnet(),
    "vgg": _vgg(),
    "vgg, leaky": _vgg(activation=partial(nn.LeakyReLU, SLOPE)),
    "unet": _unet(),
    "unet, leaky": _unet(normed=False, activation=_leaky),
    "unet, ELU": _unet(normed=False, activation=F.elu),
}
OF_RULE: dict[str, tuple[str, ...]] = {
    "chunked_loss": ("gpt, 50k words",),
    "chunked_mlp": ("gpt",),
    "chunked_attention": ("gpt, plain attention",),
    "chunked_convolutions": ("resnet", "vgg"),
    "fused_attention": ("gpt, plain attention",),
    "masked_attention": ("gpt, ALiBi",),
    "pool_gradient": ("vgg", "resnet"),
    "split_gradients": ("vgg", "resnet", "unet, leaky"),
    "convolution_workspace": ("unet", "vgg"),
    "norm_from_output": ("gpt, bare RMSNorm",),
    "scaled_norm_from_output": ("gpt", "vgg, leaky"),
    "activation_from_output": ("unet, ELU", "unet, leaky"),
    "packed_masks": ("gpt, dropout", "unet, leaky"),
    "sign_masks": ("vgg", "resnet"),
    "saved_8bit": ("gpt",),
    "saved_4bit": ("gpt",),
    "saved_fp8": ("gpt",),
    "saved_bf16": ("gpt", "unet"),
    "few_bit_activation": ("gpt", "unet"),
    "random_matmul": ("gpt",),
}
"""The models that a rule is tried on, the first first: the next only where it does not pay."""


def build(
    name: str, size: str = "cpu", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Network, tuple[Tensor, Tensor]]:
    """A model in training mode with fixed random weights, and its (inputs, targets)."""
    return made(MODELS[name][size], device, dtype)
