"""The training models of the benchmarks, by name and size.

`build` returns a model and its (inputs, targets); `model(*args)` is the scalar loss, so that a
whole training step is one graph. Sizes: `small` (few layers, quick to compile), `deep` (more
layers), both for a small CPU machine; `base` (bf16, the base sizes that are published, some GB of
a GPU), and `gpu` (bf16, for one GPU of 80 GB or more).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .nets.language import BERT, GPT, LSTM, EncoderDecoder, Llama
from .nets.layers import Network
from .nets.vision import VGG, Mixer, MobileNetV2, RegNet, ResNet, UNet, ViT

SIZES = ("small", "deep", "base", "gpu")


@dataclass(frozen=True)
class Config:
    """How to make one model: its class, its arguments and the batch."""

    network: Callable[..., Network]
    batch: int
    arguments: dict[str, Any] = field(default_factory=dict)


def _config(network: Callable[..., Network], batch: int, **arguments: Any) -> Config:
    return Config(network, batch, arguments)


def _regnet(
    batch: int, blocks: tuple[int, ...], widths: tuple[int, ...], group_width: int, **images: int
) -> Config:
    return _config(RegNet, batch, blocks=blocks, widths=widths, group_width=group_width, **images)


MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
    (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Of each stage as published: expansion, channels, blocks and the stride of the first."""

_TEXT = {"width": 128, "heads": 4, "length": 128, "vocabulary": 1000}
_LLAMA = {**_TEXT, "kv_heads": 2, "hidden": 384}
_WIDE_LLAMA = {"width": 256, "heads": 8, "kv_heads": 4, "hidden": 768, "vocabulary": 1000}
_PATCHES = {"width": 128, "resolution": 64, "patch": 8, "classes": 100}
_SMALL_IMAGES = {"resolution": 128, "classes": 100}
_IMAGENET = {"resolution": 224, "classes": 1000}
_WHOLE_MOBILENET: dict[str, Any] = {"stages": MOBILENET_V2, "stem": 32, "last": 1280, **_IMAGENET}

MODELS: dict[str, dict[str, Config]] = {
    "gpt": {
        "small": _config(GPT, 8, layers=4, **_TEXT),
        "deep": _config(GPT, 4, layers=24, **_TEXT),
        "base": _config(GPT, 16, layers=12, width=768, heads=12, length=1024, vocabulary=50304),
        "gpu": _config(GPT, 16, layers=24, width=2048, heads=16, length=2048, vocabulary=50304),
    },
    "bert": {
        "small": _config(BERT, 8, layers=4, **_TEXT),
        "deep": _config(BERT, 4, layers=16, **_TEXT),
        "base": _config(BERT, 32, layers=12, width=768, heads=12, length=512, vocabulary=30522),
        "gpu": _config(BERT, 64, layers=24, width=1024, heads=16, length=512, vocabulary=30522),
    },
    "llama": {
        "small": _config(Llama, 8, layers=4, **_LLAMA),
        "deep": _config(Llama, 4, layers=16, **_LLAMA),
        "base": _config(
            Llama, 8, layers=12, width=1024, heads=16, kv_heads=4, hidden=2816, length=2048,
            vocabulary=32000,
        ),
        "gpu": _config(
            Llama, 8, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, length=4096,
            vocabulary=32000,
        ),
    },
    "vit": {
        "small": _config(ViT, 16, layers=4, heads=4, **_PATCHES),
        "deep": _config(ViT, 8, layers=20, heads=4, **_PATCHES),
        "base": _config(ViT, 128, layers=12, width=768, heads=12, patch=16, **_IMAGENET),
        "gpu": _config(ViT, 256, layers=24, width=1024, heads=16, patch=16, **_IMAGENET),
    },
    "resnet": {
        "small": _config(ResNet, 16, blocks=(1, 1, 1, 1), width=16, **_SMALL_IMAGES),
        "deep": _config(ResNet, 8, blocks=(3, 4, 6, 3), width=16, **_SMALL_IMAGES),
        "base": _config(ResNet, 128, blocks=(3, 4, 6, 3), width=64, **_IMAGENET),
        "gpu": _config(ResNet, 768, blocks=(3, 4, 6, 3), width=64, **_IMAGENET),
    },
    "regnet": {
        "small": _regnet(16, (1, 1, 2, 1), (32, 64, 128, 256), 16, **_SMALL_IMAGES),
        "deep": _regnet(8, (2, 5, 14, 2), (32, 64, 128, 256), 16, **_SMALL_IMAGES),
        "base": _regnet(128, (2, 4, 10, 2), (72, 168, 408, 912), 24, **_IMAGENET),
        "gpu": _regnet(256, (2, 5, 14, 2), (224, 448, 1232, 3024), 112, **_IMAGENET),
    },
    "mobilenet": {
        "small": _config(
            MobileNetV2, 16, stages=((1, 16, 1, 1), (6, 24, 1, 2), (6, 32, 2, 2)), stem=16,
            last=128, **_SMALL_IMAGES,
        ),
        "deep": _config(
            MobileNetV2, 8, stages=tuple((t, c // 2, n, s) for t, c, n, s in MOBILENET_V2),
            stem=16, last=640, **_SMALL_IMAGES,
        ),
        "base": _config(MobileNetV2, 128, **_WHOLE_MOBILENET),
        "gpu": _config(MobileNetV2, 768, **_WHOLE_MOBILENET),
    },
    "vgg": {
        "small": _config(VGG, 16, stages=(1, 1, 2), width=16, resolution=64, classes=100),
        "deep": _config(VGG, 8, stages=(2, 2, 3, 3, 3), width=16, resolution=64, classes=100),
        "base": _config(VGG, 64, stages=(2, 2, 3, 3, 3), width=64, **_IMAGENET),
        "gpu": _config(VGG, 176, stages=(2, 2, 3, 3, 3), width=64, **_IMAGENET),
    },
    "unet": {
        "small": _config(UNet, 8, levels=3, width=16, resolution=64, classes=8),
        "deep": _config(UNet, 4, levels=5, width=8, resolution=128, classes=8),
        "base": _config(UNet, 16, levels=4, width=64, resolution=256, classes=21),
        "gpu": _config(UNet, 64, levels=4, width=64, resolution=256, classes=21),
    },
    "encdec": {
        "small": _config(EncoderDecoder, 8, layers=2, **_TEXT),
        "deep": _config(EncoderDecoder, 4, layers=8, **_TEXT),
        "base": _config(
            EncoderDecoder, 32, layers=6, width=512, heads=8, length=512, vocabulary=32128
        ),
        "gpu": _config(
            EncoderDecoder, 64, layers=16, width=1024, heads=16, length=512, vocabulary=32128
        ),
    },
    "mixer": {
        "small": _config(Mixer, 16, layers=4, **_PATCHES),
        "deep": _config(Mixer, 8, layers=20, **_PATCHES),
        "base": _config(Mixer, 128, layers=12, width=768, patch=16, **_IMAGENET),
        "gpu": _config(Mixer, 256, layers=24, width=1024, patch=16, **_IMAGENET),
    },
    "lstm": {
        "small": _config(LSTM, 256, layers=2, width=128, length=16, segment=4, vocabulary=500),
        "deep": _config(LSTM, 256, layers=2, width=128, length=32, segment=4, vocabulary=500),
        "base": _config(LSTM, 1024, layers=2, width=512, length=32, segment=4, vocabulary=8192),
        "gpu": _config(LSTM, 2048, layers=4, width=1024, length=64, segment=8, vocabulary=8192),
    },
    "dropout": {
        "small": _config(GPT, 8, layers=4, dropout=0.1, **_TEXT),
        "deep": _config(GPT, 4, layers=16, dropout=0.1, **_TEXT),
        "base": _config(
            GPT, 16, layers=12, width=768, heads=12, length=1024, vocabulary=50304, dropout=0.1
        ),
        "gpu": _config(
            GPT, 16, layers=24, width=1024, heads=16, length=1024, vocabulary=50304, dropout=0.1
        ),
    },
    "resnet50": {"exact": _config(ResNet, 64, blocks=(3, 4, 6, 3), width=64, **_IMAGENET)},
    "vgg16": {"exact": _config(VGG, 16, stages=(2, 2, 3, 3, 3), width=64, **_IMAGENET)},
    "gpt16": {"exact": _config(GPT, 8, layers=16, **_TEXT)},
    "gpt48": {"exact": _config(GPT, 4, layers=48, **_TEXT)},
    "llama32": {"exact": _config(Llama, 4, layers=32, length=128, **_WIDE_LLAMA)},
    "gpt50k": {
        "exact": _config(GPT, 8, layers=4, width=256, heads=4, length=256, vocabulary=50257),
    },
    "gpt12": {
        "exact": _config(GPT, 8, layers=12, width=256, heads=4, length=256, vocabulary=1000),
    },
    "llama8": {"exact": _config(Llama, 8, layers=8, length=256, **_WIDE_LLAMA)},
    "bert6": {
        "exact": _config(BERT, 8, layers=6, width=256, heads=4, length=256, vocabulary=1000),
    },
    "gpt6": {
        "exact": _config(GPT, 8, layers=6, width=256, heads=4, length=256, vocabulary=1000),
    },
}  # fmt: skip


def find_config(name: str, size: str = "small") -> Config:
    """The configuration of a model; one made for exact figures has the same in every size."""
    sizes = MODELS[name]
    return sizes["exact"] if "exact" in sizes else sizes[size]


def build(
    name: str,
    size: str = "small",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Network, tuple[Tensor, Tensor]]:
    """A model in training mode with fixed random weights, and its (inputs, targets)."""
    return made(find_config(name, size), device, dtype, seed)


def made(
    config: Config, device: str, dtype: torch.dtype, seed: int = 0
) -> tuple[Network, tuple[Tensor, Tensor]]:
    """What a configuration says."""
    torch.manual_seed(seed)
    model = config.network(**config.arguments).to(device, dtype).train()
    inputs, targets = model.sample(config.batch, torch.Generator().manual_seed(seed))
    inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
    return model, (inputs, targets.to(device))


def uses_random_ops(model: nn.Module) -> bool:
    """Whether a step draws random numbers."""
    return any(isinstance(module, nn.Dropout) for module in model.modules())


MATMULS_AND_ATTENTION: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""What a selective checkpoint saves; it computes all else again."""


class Checkpointed(nn.Module):
    """A block that keeps its inputs, or what is selected, and runs again in the backward."""

    def __init__(self, block: nn.Module, *, selective: bool = False) -> None:
        super().__init__()
        self.block = block
        self.more: dict[str, Any] = {}
        if selective:
            contexts = partial(create_selective_checkpoint_contexts, MATMULS_AND_ATTENTION)
            self.more = {"context_fn": contexts}

    def forward(self, *args: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.block, *args, use_reentrant=False, **self.more))


def with_checkpoint(model: Network, *, selective: bool = False) -> Network:
    """`model` itself, every one of its `checkpoint_blocks` wrapped in torch's checkpoint."""
    for parent, name in model.checkpoint_blocks():
        setattr(parent, name, Checkpointed(getattr(parent, name), selective=selective))
    return model
