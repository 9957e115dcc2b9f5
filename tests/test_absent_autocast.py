"""Autocast for a card that is not here does to each op what CUDA's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.compat.absent import eager
from fxremat.compat.absent.eager import cuda_autocast
from fxremat.report.report import Report
from tests.absent_nets import Net

LOW, FULL = torch.bfloat16, torch.float32


def numbers(like: Tensor) -> Tensor:
    """Places in a tensor."""
    return torch.zeros(like.shape, dtype=torch.long, device=like.device)


def attended(x: Tensor) -> Tensor:
    """By itself."""
    return F.scaled_dot_product_attention(x, x, x)


TYPES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda low, full: F.linear(full, full), LOW),
    "matmul": (lambda low, full: low @ full, LOW),
    "bmm": (lambda low, full: torch.bmm(full[None], full[None]), LOW),
    "conv1d": (lambda low, full: F.conv1d(full[None], full[:, :, None]), LOW),
    "attention": (lambda low, full: attended(full[None]), LOW),
    "softmax": (lambda low, full: torch.softmax(low, -1), FULL),
    "softmax of a type": (lambda low, full: torch.softmax(low, -1, torch.float16), torch.float16),
    "log_softmax": (lambda low, full: F.log_softmax(low, -1), FULL),
    "layer_norm": (lambda low, full: F.layer_norm(low, (8,)), FULL),
    "group_norm": (lambda low, full: F.group_norm(low, 2), FULL),
    "cross_entropy": (lambda low, full: F.cross_entropy(low, numbers(low)[0]), FULL),
    "mse_loss": (lambda low, full: F.mse_loss(low, low), FULL),
    "with_logits": (lambda low, full: F.binary_cross_entropy_with_logits(low, low), FULL),
    "sum": (lambda low, full: low.sum(), FULL),
    "sum of a type": (lambda low, full: low.sum(0, dtype=torch.float16), torch.float16),
    "cumsum": (lambda low, full: low.cumsum(0), FULL),
    "norm": (lambda low, full: low.norm(), FULL),
    "norms of rows": (lambda low, full: torch.norm(low, 2, 1, keepdim=True), FULL),
    "aten norm": (lambda low, full: torch.ops.aten.norm.Scalar(low), FULL),
    "aten norms of rows": (lambda low, full: torch.ops.aten.norm.ScalarOpt_dim(low, 2, [1]), FULL),
    "pow": (lambda low, full: low.pow(2), FULL),
    "exp": (lambda low, full: low.exp(), FULL),
    "rsqrt": (lambda low, full: low.abs().rsqrt(), FULL),
    "mean": (lambda low, full: low.mean(), LOW),
    "gelu": (lambda low, full: F.gelu(low), LOW),
    "add": (lambda low, full: low + full, FULL),
    "cat": (lambda low, full: torch.cat([low, full]), FULL),
    "stack of low ones": (lambda low, full: torch.stack([low, low]), LOW),
    "addcmul": (lambda low, full: torch.addcmul(low, low, full), FULL),
    "addcmul of low ones": (lambda low, full: torch.addcmul(low, low, low), LOW),
    "scatter_add": (lambda low, full: low.scatter_add(0, numbers(low), full), FULL),
    "64 bits": (lambda low, full: full.double() @ full.double(), torch.float64),
}  # fmt: skip
"""What comes out, by CUDA's autocast in bfloat16, of a square of that type and one in float32."""


def squares(device: str) -> tuple[Tensor, Tensor]:
    full = torch.rand(8, 8, device=device)
    return full.to(LOW), full


@pytest.fixture
def on_a_card() -> Iterator[None]:
    with cuda_autocast(supports_bfloat16=True):
        yield


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("name", list(TYPES))
def test_types_are_those_of_cuda(name: str) -> None:
    run, expected = TYPES[name]
    with torch.autocast("cuda", LOW):
        assert run(*squares("cpu")).dtype == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(TYPES))
def test_the_card_that_is_here_has_the_same(name: str) -> None:
    run, expected = TYPES[name]
    with torch.autocast("cuda", LOW):
        assert run(*squares("cuda")).dtype == expected


def test_each_op_that_cuda_treats_is_known() -> None:
    """Of this torch; one that is not would run as it is."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    treated = [n for n in names if eager._has(n, "AutocastCUDA")]
    assert len(treated) > 100
    unknown = [n for n in treated if eager._kernel(n) is None]
    assert set(unknown) <= {"aten::_cudnn_rnn"}  # of which nothing is traced on the CPU


@pytest.mark.usefixtures("on_a_card")
def test_numbers_and_gradients_are_those_of_casts_by_hand() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cuda", LOW):
        loss = F.layer_norm(layer(x), (8,)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    weight = layer.weight.detach().clone().requires_grad_()
    low = F.linear(x.to(LOW), weight.to(LOW), layer.bias.detach().to(LOW))
    by_hand = F.layer_norm(low.float(), (8,)).square().sum()
    by_hand.backward()  # type: ignore[no-untyped-call]
    assert loss == by_hand
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == FULL
    assert torch.equal(layer.weight.grad, weight.grad if weight.grad is not None else x)


@pytest.mark.usefixtures("on_a_card")
def test_inner_contexts_and_the_cpu_s() -> None:
    low, full = squares("cpu")
    with torch.autocast("cpu", LOW):
        assert (full @ full).dtype == FULL  # on a card it has no effect
    with torch.autocast("cuda", LOW):
        with torch.autocast("cuda", enabled=False):
            assert (full @ full).dtype == FULL
        assert (full @ full).dtype == LOW
        with torch.autocast("cuda", torch.float16):
            assert (full @ full).dtype == torch.float16
        assert (full @ full).dtype == LOW
    assert (full @ full).dtype == FULL
    with torch.autocast("cuda", LOW), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(low.float(), full)


def test_all_is_as_before_at_the_end() -> None:
    """Also after an error: the CPU's autocast has its own ops, CUDA's is not there."""
    _, full = squares("cpu")
    before = torch.set_autocast_enabled, torch.set_autocast_dtype
    with pytest.raises(ZeroDivisionError), cuda_autocast(True), torch.autocast("cuda", LOW):
        raise ZeroDivisionError
    assert before == (torch.set_autocast_enabled, torch.set_autocast_dtype)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", LOW):
        assert (full @ full).dtype == LOW
        assert F.layer_norm((full @ full), (8,)).dtype == LOW


def test_bfloat16_needs_a_card_that_has_it() -> None:
    with cuda_autocast(supports_bfloat16=False):
        with pytest.raises(RuntimeError, match="bfloat16"):
            torch.autocast("cuda", LOW)
        with torch.autocast("cuda"):
            assert (squares("cpu")[1] @ squares("cpu")[1]).dtype == torch.float16


class Mixed(nn.Module):
    """The net in float32, with its forward in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", LOW):
            loss: Tensor = self.net(tokens, targets)
        return loss


def tokens() -> tuple[Tensor, Tensor]:
    text = torch.zeros(8, 128, dtype=torch.long)
    return text, text.clone()


def saved_bytes(report: Report) -> int:
    return report.store_all_peak_bytes - report.resident_bytes - report.held_bytes


@pytest.mark.parametrize("around", [pytest.param("forward", marks=pytest.mark.slow), "call"])
def test_a_step_is_planned_as_it_runs_on_the_card(around: str) -> None:
    """Weights stay in 32 bits; what is saved is smaller than without, and attention is flash."""
    with fxremat.device.absent("A100"):
        wide = fxremat.explain(Net(), *tokens()).graphs[0]
        if around == "forward":
            mixed = fxremat.explain(Mixed(), *tokens()).graphs[0]
        else:
            with torch.autocast("cuda", LOW):
                mixed = fxremat.explain(Net(), *tokens()).graphs[0]
    assert mixed.resident_bytes == wide.resident_bytes
    assert saved_bytes(mixed) < 0.9 * saved_bytes(wide)
