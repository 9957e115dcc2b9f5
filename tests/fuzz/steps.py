"""Small training steps to try rules on: a fixed few that every rule fits in, and random ones.

Sizes are odd, so that loops over rows or images have a shorter last turn, and half of the labels
are ignored, so that rows are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxremat.compat.compilers import compile_with_aot_eager
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.insertion import Site
from fxremat.passes.variants.table import RULES
from tests import attentions
from tests.graphs import Function, Net, train
from tests.row_sites import Traced
from tests.variants import small_values

WIDTH, WORDS = 6, 61
LAST_WORD = WORDS - 1
ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish
)  # fmt: skip


class _AsEager(Traced):
    """The joint graph that eager torch would run, in which less is decomposed."""

    def compiled(self, function: Function) -> Function:
        """``function``, run as its joint graph."""

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            return compile_with_aot_eager(gm, inputs, self)

        torch._dynamo.reset()
        return torch.compile(function, backend=backend)


@dataclass(frozen=True)
class Step:
    """A function or module, and what one training step of it is given."""

    function: Any
    inputs: Sequence[Any]
    as_inductor: bool = True
    """Whether its graph is decomposed as Inductor asks for."""

    def traced(self) -> Traced:
        """Its joint graph and what that is given, from one run of the step."""
        seen = Traced() if self.as_inductor else _AsEager()
        train(self.function, self.inputs, seen.compiled)
        return seen


def sites_of(joint: JointGraph) -> list[Site]:
    """The sites of all rules in a graph, of values of any size."""
    with small_values():
        return [site for rule in RULES for site in rule.find(joint)]


class Turned(nn.Module):
    """Linear layers over the channels of an image, which then lie in memory as the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Squares(nn.Module):
    """The mean of the squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def largest() -> Net:
    """The largest of each row, whose place is saved."""
    return Net(lambda net, x: x.max(1).values)


def next_words(layers: nn.Module, tokens: Tensor, **how: Any) -> Step:
    """Words in, a loss over the scores of all words out; labels that are 0 are ignored."""
    width = 8

    def run(net: Any, tokens: Tensor) -> Tensor:
        scores = net.head(net.layers(net.embedding(tokens)))
        return F.cross_entropy(scores, tokens, ignore_index=0, **how)

    parts = {"embedding": nn.Embedding(WORDS, width), "head": nn.Linear(width, WORDS)}
    return Step(Net(run, layers=layers, **parts), [tokens])


def masked_words(tokens: Tensor, mask: Tensor) -> Step:
    """The losses of some words only."""

    def run(net: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(net.head(net.embedding(tokens)), tokens, reduction="none")
        return (losses * mask).sum()

    embedding, head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
    return Step(Net(run, embedding=embedding, head=head), [tokens, mask])


def tokens(count: int) -> Tensor:
    """Random words, of which a third are 0 and a third `LAST_WORD`."""
    words = torch.randint(0, WORDS, (count,))
    kind = torch.randint(0, 3, (count,))
    return words.where(kind > 0, 0).where(kind < 2, LAST_WORD)


def attention(name: str, dtype: torch.dtype) -> Step:
    """A way to write attention."""
    function, make = attentions.CASES[name]
    return in_dtype(Step(function, make(dtype)), dtype)


def in_dtype(step: Step, dtype: torch.dtype) -> Step:
    """The same step with its floats in another dtype."""

    def changed(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return copy.deepcopy(x).to(dtype)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype).requires_grad_(x.requires_grad)

    function, inputs = changed(step.function), [changed(x) for x in step.inputs]
    return replace(step, function=function, inputs=inputs)


def corpus() -> dict[str, Step]:
    """Steps that every rule fits in."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(16, elementwise_affine=False)
    return {
        "mlp": Step(
            nn.Sequential(nn.Linear(24, 100), nn.GELU(), nn.Linear(100, 24)), [torch.randn(63, 24)]
        ),
        "dropout": Step(
            nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 24)),
            [torch.randn(63, 24)],
        ),
        "norms": Step(
            nn.Sequential(
                nn.Linear(16, 16), nn.LayerNorm(16), nn.LeakyReLU(0.1), nn.Linear(16, 16), norm,
                nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 16),
            ),
            [torch.randn(33, 16)],
        ),
        "largest": Step(nn.Sequential(nn.Linear(24, 100), largest()), [torch.randn(63, 24)]),
        "words": next_words(nn.Tanh(), tokens(63)),
        "masked words": masked_words(tokens(63), torch.randint(0, 2, (63,)).float()),
        "images": Step(
            nn.Sequential(
                nn.Conv2d(3, 14, 3, padding=1), nn.BatchNorm2d(14), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(14, 14, 3, padding=1, groups=14), Turned(14), nn.Conv2d(14, 14, 3),
                nn.ReLU(), nn.MaxPool2d(3, 2, 1), Squares(),
            ),
            [torch.randn(9, 3, 16, 16)],
        ),
        "attention": attention("causal", torch.float32),
        "added mask": attention("added", torch.float32),
    }  # fmt: skip


@st.composite
def row_layers(draw: st.DrawFn, width: int) -> nn.Sequential:
    """Layers for rows of a width, which give rows of the same width.

    A norm follows a linear layer, here and below: what is zero all over a row has no variance, and
    one over that is far off if the variance is saved inexactly.
    """
    layers: list[nn.Module] = []
    now = width
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("linear", "linear", "activation", "norm", "dropout")))
        if kind == "linear":
            wider = draw(st.sampled_from((WIDTH, 17, 4 * WIDTH, 96)))
            layers.append(nn.Linear(now, wider, bias=draw(st.booleans())))
            now = wider
        elif kind == "activation":
            layers.append(draw(st.sampled_from(ACTIVATIONS))())
        elif kind == "norm":
            norm = draw(st.sampled_from((nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)))
            layers += [nn.Linear(now, now), norm(now)]
        else:
            layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers, nn.Linear(now, width))


@st.composite
def image_layers(draw: st.DrawFn, channels: int) -> nn.Sequential:
    """Layers for images of so many channels."""
    layers: list[nn.Module] = []
    now = channels
    for _ in range(draw(st.integers(2, 5))):
        kind = draw(st.sampled_from(("convolution", "convolution", "turned", "norm", "pool")))
        if kind == "convolution":
            alone = draw(st.booleans())
            wider = now if alone else draw(st.sampled_from((4, 6, 10)))
            kernel, stride = draw(st.sampled_from((1, 3))), draw(st.sampled_from((1, 1, 2)))
            layers.append(
                nn.Conv2d(now, wider, kernel, stride, padding=kernel // 2,
                          groups=now if alone else 1, bias=draw(st.booleans()))
            )  # fmt: skip
            now = wider
            if draw(st.booleans()):
                layers.append(draw(st.sampled_from(ACTIVATIONS))())
        elif kind == "turned":
            layers.append(Turned(now))
        elif kind == "norm":
            layers += [nn.Conv2d(now, now, 1), nn.BatchNorm2d(now)]
        else:
            layers.append(draw(st.sampled_from((nn.MaxPool2d, nn.AvgPool2d)))(3, 2, 1))
    return nn.Sequential(*layers, Squares())


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Rows, words, images or attention, in a dtype."""
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    dtype = draw(st.sampled_from((torch.float64, torch.float64, torch.float32, torch.bfloat16)))
    kind = draw(st.sampled_from(("rows", "words", "images", "attention")))
    count = draw(st.integers(2, 70))
    if kind == "attention":
        step = attention(draw(st.sampled_from(sorted(attentions.CASES))), dtype)
    elif kind == "rows":
        step = Step(draw(row_layers(WIDTH)), [torch.randn(count, WIDTH).requires_grad_()])
    elif kind == "images":
        given = torch.randn(2 + count % 9, 3, 12, 11)
        if draw(st.booleans()):
            given = given.to(memory_format=torch.channels_last)
        step = Step(draw(image_layers(3)), [given.requires_grad_()])
    elif draw(st.booleans()):
        step = masked_words(tokens(count), torch.randint(0, 2, (count,)).float())
    else:
        how = {"label_smoothing": 0.1} if draw(st.booleans()) else {}
        step = next_words(draw(row_layers(8)), tokens(count), **how)
    return replace(in_dtype(step, dtype), as_inductor=draw(st.booleans()))
