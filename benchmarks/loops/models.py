"""Eight models as their users train them, in plain torch: each gives its loss.

Shapes, dtypes and operators follow the models of Hugging Face's transformers that the names stand
for, with their default configuration but for what is said here. Those with low precision keep
their weights in float32 and run under autocast to bfloat16; the others are bfloat16 throughout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .texts import Attention, Low, Made, bert, deberta, gemma2, llama, lora, t5, words


def pictures(count: int, size: int = 224) -> Tensor:
    """Random images."""
    return torch.randn(count, 3, size, size)


class PreNorm(nn.Module):
    """LayerNorm before attention and before the MLP, as ViT and CLIP have it."""

    def __init__(self, width: int, heads: int, act: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = act

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=causal)
        result: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return result


def quick_gelu(x: Tensor) -> Tensor:
    """What CLIP has for GELU."""
    return x * torch.sigmoid(1.702 * x)


class Vision(nn.Module):
    """A vision transformer up to its last norm; the first token stands for the picture.

    CLIP's has no bias in its first layer, one more norm, and another activation.
    """

    def __init__(self, width: int, heads: int, layers: int, is_clip: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16, bias=not is_clip)
        self.before = nn.LayerNorm(width) if is_clip else nn.Identity()
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.ModuleList(
            PreNorm(width, heads, quick_gelu if is_clip else F.gelu) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.positions
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.norm(x)[:, 0]
        return result


class ViT(nn.Module):
    """Sorts pictures."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.vision, self.head = Vision(width, heads, layers), nn.Linear(width, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.vision(images)), classes)


def vit() -> Made:
    """12 layers of 1,024, 64 pictures."""
    model = ViT(1024, 16, 12, 1000).to(torch.bfloat16)
    return model, (pictures(64).to(torch.bfloat16), torch.randint(0, 1000, (64,)))


class Clip(nn.Module):
    """Pairs texts and pictures: each is to be nearest to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision(768, 12, 12, is_clip=True)
        self.tokens, self.positions = nn.Embedding(49408, 512), nn.Embedding(77, 512)
        self.blocks = nn.ModuleList(PreNorm(512, 8, quick_gelu) for _ in range(8))
        self.norm = nn.LayerNorm(512)
        self.of_text = nn.Linear(512, 512, bias=False)
        self.of_picture = nn.Linear(768, 512, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, text: Tensor, images: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x, True)
        ends = self.norm(x)[torch.arange(len(x), device=x.device), text.argmax(-1)]
        texts, shown = self.of_text(ends), self.of_picture(self.vision(images))
        texts, shown = (one / one.norm(dim=-1, keepdim=True) for one in (texts, shown))
        logits = texts @ shown.t() * self.scale.exp()
        own = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def clip() -> Made:
    """8 layers for texts, 12 for pictures, 96 of each, low precision."""
    return Low(Clip()), (words(49000, 96, 77), pictures(96))


MODELS: dict[str, Callable[[], Made]] = {
    one.__name__: one for one in (bert, t5, lora, clip, llama, vit, gemma2, deberta)
}
