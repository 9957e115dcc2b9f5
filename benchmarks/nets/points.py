"""A network over clouds of points: DGCNN, which takes the largest over neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Batch, Blocks, Network, children_of, random_tokens, token_loss


class EdgeConvolution(nn.Module):
    """The largest of a linear layer's results over each point's nearest neighbours.

    (B, N, inputs) to (B, N, outputs); Wang et al. 2019, "Dynamic Graph CNN for Learning on Point
    Clouds", section 3.
    """

    def __init__(self, inputs: int, outputs: int, neighbours: int) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.edge = nn.Linear(2 * inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            near = torch.cdist(x, x).topk(self.neighbours, largest=False).indices
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        middle = x[:, :, None].expand(-1, -1, self.neighbours, -1)
        edges = torch.cat((middle, x[batch, near] - middle), dim=-1)
        result: Tensor = F.leaky_relu(self.edge(edges), 0.2).max(dim=2).values
        return result


class DGCNN(Network):
    """Edge convolutions, the largest over all points, and a linear layer to classes."""

    def __init__(self, widths: tuple[int, ...], points: int, neighbours: int, classes: int) -> None:
        super().__init__()
        self.points, self.classes = points, classes
        self.layers = nn.ModuleList(
            EdgeConvolution(i, o, neighbours) for i, o in zip((3, *widths), widths, strict=False)
        )
        self.wide = nn.Linear(sum(widths), 4 * widths[-1])
        self.head = nn.Linear(4 * widths[-1], classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, found = inputs, []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        x = F.leaky_relu(self.wide(torch.cat(found, dim=-1)), 0.2).max(dim=1).values
        return token_loss(self.head(x), targets)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        points = torch.randn(batch, self.points, 3, generator=generator)
        return points, random_tokens((batch,), self.classes, generator)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.layers)
