"""A vision transformer of Hugging Face, trained on images in a plain PyTorch loop.

    python docs/examples/vit.py --budget 24MiB
    python docs/examples/vit.py --width 1024 --layers 24 --size 224 --batch 256 --device cuda \
        --budget 20GiB
"""

from __future__ import annotations

import torch
from loop import Batch, arguments, train
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


class Classifier(nn.Module):
    """A ViT that returns its loss, for images (batch, 3, size, size) and their classes."""

    def __init__(self, size: int, width: int, layers: int) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=size, hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=width // 32, num_labels=10,
        )  # fmt: skip
        self.model = ViTForImageClassification(config)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        loss: Tensor = self.model(pixel_values=images, labels=classes).loss
        return loss


def stripes(count: int, size: int) -> Batch:
    """Noisy images with stripes, and how many stripes each has."""
    classes = torch.randint(0, 10, (count,))
    across = torch.linspace(0, 6.28, size) * (1 + classes[:, None])
    images = across.sin()[:, None, None, :].expand(count, 3, size, size)
    return images + 0.3 * torch.randn(count, 3, size, size), classes


def main(size: int = 64, width: int = 128, layers: int = 4, batch: int = 32, steps: int = 5,
         budget: str | None = None, device: str = "cpu") -> list[float]:  # fmt: skip
    """The loss of each step."""
    torch.manual_seed(0)
    model = Classifier(size, width, layers)
    return train(model, lambda step: stripes(batch, size), steps, budget, device)


if __name__ == "__main__":
    main(**vars(arguments(__doc__ or "", size=64, width=128, layers=4, batch=32)))
