"""Networks over images: ViT, MLP-Mixer, ResNet, RegNet, VGG and U-Net."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import MLP, Batch, Block, Blocks, Network, children_of, random_tokens, token_loss

RGB = 3


class ImageClassifier(Network):
    """Images of `resolution` pixels squared to one of `classes`."""

    def __init__(self, resolution: int, classes: int) -> None:
        super().__init__()
        self.resolution, self.classes = resolution, classes

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        images = torch.randn(batch, RGB, self.resolution, self.resolution, generator=generator)
        return images, random_tokens((batch,), self.classes, generator)


class Patches(nn.Module):
    """Cut images into patches and project each: (B, 3, H, W) -> (B, tokens, width)."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(RGB, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.projection(images).flatten(2).transpose(1, 2)
        return result


class ViT(ImageClassifier):
    """Vision Transformer with a class token."""

    def __init__(
        self, layers: int, width: int, heads: int, resolution: int, patch: int, classes: int
    ) -> None:
        super().__init__(resolution, classes)
        tokens = (resolution // patch) ** 2 + 1
        self.patches = Patches(patch, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        token = self.token.expand(inputs.shape[0], -1, -1)
        x = torch.cat((token, self.patches(inputs)), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x[:, 0])), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


class MixerBlock(nn.Module):
    """An MLP across the tokens, then an MLP across the channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across_tokens = MLP(tokens, 2 * tokens)
        self.across_channels = MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.across_channels(self.norm2(x))
        return result


class Mixer(ImageClassifier):
    """MLP-Mixer."""

    def __init__(self, layers: int, width: int, resolution: int, patch: int, classes: int) -> None:
        super().__init__(resolution, classes)
        tokens = (resolution // patch) ** 2
        self.patches = Patches(patch, width)
        self.blocks = nn.ModuleList(MixerBlock(tokens, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(inputs)
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x).mean(dim=1)), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


def conv_bn(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, then BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with BatchNorm and a shortcut; widens four times."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = conv_bn(inputs, width, 1)
        self.middle = conv_bn(width, width, 3, stride)
        self.widen = conv_bn(width, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow(x))
        y = self.widen(F.relu(self.middle(y)))
        y = y + self.shortcut(x)
        return F.relu(y)


class ResNet(ImageClassifier):
    """ResNet with bottleneck blocks; (3, 4, 6, 3) blocks and width 64 is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], width: int, resolution: int, classes: int) -> None:
        super().__init__(resolution, classes)
        self.stem = conv_bn(RGB, width, 7, stride=2)
        self.blocks = nn.ModuleList()
        channels = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * width << stage
        self.head = nn.Linear(channels, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(inputs)), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(x.mean(dim=(2, 3))), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


class RegNetBlock(nn.Module):
    """1x1, grouped 3x3, 1x1 convolutions; between the last two, channels are weighed by their mean.

    That is squeeze and excitation (Hu et al. 2018), as RegNetY has it.
    """

    def __init__(self, inputs: int, width: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.narrow = conv_bn(inputs, width, 1)
        self.middle = conv_bn(width, width, 3, stride, groups=width // group_width)
        self.squeeze = nn.Conv2d(width, inputs // 4, 1)
        self.excite = nn.Conv2d(inputs // 4, width, 1)
        self.widen = conv_bn(width, width, 1)
        same = inputs == width and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.middle(F.relu(self.narrow(x))))
        mean = F.adaptive_avg_pool2d(y, 1)
        y = y * self.excite(F.relu(self.squeeze(mean))).sigmoid()
        return F.relu(self.widen(y) + self.shortcut(x))


class RegNet(ImageClassifier):
    """RegNetY (Radosavovic et al. 2020): every stage halves the image at its first block."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        widths: tuple[int, ...],
        group_width: int,
        resolution: int,
        classes: int,
    ) -> None:
        super().__init__(resolution, classes)
        channels = 32
        self.stem = conv_bn(RGB, channels, 3, stride=2)
        self.blocks = nn.ModuleList()
        for count, width in zip(blocks, widths, strict=True):
            for index in range(count):
                stride = 2 if index == 0 else 1
                self.blocks.append(RegNetBlock(channels, width, stride, group_width))
                channels = width
        self.head = nn.Linear(channels, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.stem(inputs))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(x.mean(dim=(2, 3))), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


class InvertedResidual(nn.Module):
    """Channels are widened, each is convolved by itself, and few are left."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.widen = nn.Identity() if expansion == 1 else conv_bn(inputs, hidden, 1)
        self.middle = conv_bn(hidden, hidden, 3, stride, groups=hidden)
        self.narrow = conv_bn(hidden, outputs, 1)
        self.expansion = expansion
        self.same = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.expansion == 1 else F.relu6(self.widen(x))
        y: Tensor = self.narrow(F.relu6(self.middle(wide)))
        return x + y if self.same else y


class MobileNetV2(ImageClassifier):
    """MobileNetV2 (Sandler et al. 2018); of each stage: expansion, channels, blocks and stride."""

    def __init__(
        self,
        stages: tuple[tuple[int, int, int, int], ...],
        stem: int,
        last: int,
        resolution: int,
        classes: int,
    ) -> None:
        super().__init__(resolution, classes)
        channels = stem
        self.stem = conv_bn(RGB, channels, 3, stride=2)
        self.blocks = nn.ModuleList()
        for expansion, width, count, stride in stages:
            for index in range(count):
                step = stride if index == 0 else 1
                self.blocks.append(InvertedResidual(channels, width, step, expansion))
                channels = width
        self.last = conv_bn(channels, last, 1)
        self.head = nn.Linear(last, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.relu6(self.stem(inputs))
        for block in self.blocks:
            x = block(x)
        x = F.relu6(self.last(x))
        return token_loss(self.head(x.mean(dim=(2, 3))), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


class VGG(ImageClassifier):
    """VGG with BatchNorm: 3x3 convolutions, each with BatchNorm and ReLU, and max-pools between.

    (2, 2, 3, 3, 3) convolutions and width 64 are those of VGG-16; the head is one linear layer.
    Other activations than ReLU may be given, as Darknet's leaky one.
    """

    def __init__(
        self,
        stages: tuple[int, ...],
        width: int,
        resolution: int,
        classes: int,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__(resolution, classes)
        self.stages = nn.ModuleList()
        channels = RGB
        for stage, count in enumerate(stages):
            out = min(width << stage, 8 * width)
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [conv_bn(channels, out, 3), activation()]
                channels = out
            self.stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.head = nn.Linear(channels, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for stage in self.stages:
            x = stage(x)
        return token_loss(self.head(x.mean(dim=(2, 3))), targets)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.stages)


class ConvPair(nn.Module):
    """Twice: 3x3 convolution, GroupNorm, SiLU; or without norms and with another activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        normed: bool = True,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = (
            nn.GroupNorm(4, outputs) if normed else nn.Identity() for _ in range(2)
        )
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm1(self.conv1(x)))
        return self.activation(self.norm2(self.conv2(x)))


class UNet(ImageClassifier):
    """U-Net: a class for every pixel; the first level's skip lives until the very end."""

    def __init__(
        self,
        levels: int,
        width: int,
        resolution: int,
        classes: int,
        normed: bool = True,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__(resolution, classes)
        widths = [width << level for level in range(levels)]
        pair = partial(ConvPair, normed=normed, activation=activation)
        self.down = nn.ModuleList(map(pair, [RGB, *widths[:-1]], widths))
        self.bottom = pair(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(pair(3 * size, size) for size in reversed(widths))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, skips = inputs, []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat((F.interpolate(x, scale_factor=2.0), skip), dim=1))
        return F.cross_entropy(self.head(x), targets)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        shape = (batch, self.resolution, self.resolution)
        images, _ = super().sample(batch, generator)
        return images, random_tokens(shape, self.classes, generator)

    def checkpoint_blocks(self) -> Blocks:
        return [*children_of(self.down, self.up), (self, "bottom")]
