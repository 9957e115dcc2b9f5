"""Kernels that eager code takes on a card that is absent: attention and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.compat.absent import attention, autocast
from fxremat.compat.absent.attention import Call, chosen_kernel
from fxremat.compat.absent.autocast import cuda_autocast
from fxremat.compat.tensors import Watching, fake_tensors
from fxremat.report.report import Report
from tests import graphs
from tests.absent_nets import net

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
CHOICES = [
    # capability, dtype, width, length of queries, masked, causal, kernel
    ((9, 0), BF16, 64, 128, False, True, "cudnn"),
    ((10, 0), HALF, 128, 128, False, False, "cudnn"),
    ((9, 0), BF16, 256, 128, False, True, "flash"),
    ((9, 0), BF16, 72, 128, True, False, "cudnn"),
    ((9, 0), FULL, 64, 128, False, True, "efficient"),
    ((8, 0), BF16, 64, 128, False, True, "flash"),
    ((8, 0), BF16, 60, 128, False, True, "flash"),
    ((8, 0), BF16, 60, 128, True, False, "math"),
    ((8, 0), BF16, 64, 128, True, False, "efficient"),
    ((8, 0), BF16, 64, 64, False, True, "efficient"),
    ((8, 0), BF16, 264, 128, False, True, "efficient"),
    ((8, 0), FULL, 64, 128, False, True, "efficient"),
    ((8, 0), FULL, 62, 128, False, True, "math"),
    ((8, 9), BF16, 208, 128, False, True, "efficient"),
    ((8, 9), BF16, 232, 128, False, True, "flash"),
    ((12, 0), BF16, 64, 128, False, True, "flash"),
    ((7, 5), HALF, 64, 128, False, True, "efficient"),
    ((7, 5), BF16, 64, 128, False, True, "math"),
    ((7, 0), FULL, 3, 128, False, True, "efficient"),
    ((8, 0), torch.float64, 64, 128, False, True, "math"),
]


def _call(dtype: torch.dtype, width: int, rows: int, masked: bool, causal: bool) -> Call:
    query = torch.empty(2, 4, rows, width, dtype=dtype, device="meta", requires_grad=True)
    key, value = (torch.empty(2, 4, 128, width, dtype=dtype, device="meta") for _ in range(2))
    mask = torch.empty(rows, 128, dtype=dtype, device="meta") if masked else None
    return Call(query, key, value, mask, 0.0, causal, None, False)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choice(choice: tuple[Any, ...]) -> None:
    capability, *how, name = choice
    assert chosen_kernel(_call(*how), capability).__name__ == f"_{name}"


def test_users_may_forbid_kernels() -> None:
    """What is switched off is not chosen, and cuDNN's is not where all has to be deterministic."""
    call = _call(BF16, 64, 128, False, True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert chosen_kernel(call, (9, 0)).__name__ == "_math"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_kernel(call, (9, 0)).__name__ == "_flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("grouped", [False, True])
def test_matmuls_and_a_softmax_give_what_torch_gives(
    masked: torch.dtype | None, grouped: bool
) -> None:
    torch.manual_seed(0)
    heads = 2 if grouped else 4
    query = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    key, value = (torch.randn(2, heads, 7, 6, dtype=torch.float64) for _ in range(2))
    mask = None if masked is None else (torch.rand(5, 7) > 0.3)
    if masked is torch.float32 and mask is not None:
        mask = torch.where(mask, 0.5, -1.0).double()
    given, how = (query, key, value, mask), {"scale": 0.4, "enable_gqa": grouped}
    expected = F.scaled_dot_product_attention(*given, **how)  # type: ignore[arg-type]
    found = attention.attention(*given, **how, capability=(7, 5))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kernel", "width", "heads_of_mask", "heads_given"),
    [("_flash", 60, 0, 0), ("_flash", 64, 0, 0), ("_cudnn", 64, 0, 0), ("_cudnn", 64, 1, 1),
     ("_efficient", 64, 0, 0), ("_efficient", 64, 1, 4)],
)  # fmt: skip
def test_operands_are_prepared_as_torch_does(
    kernel: str, width: int, heads_of_mask: int, heads_given: int
) -> None:
    """The output and its gradient have the sizes of torch's own; tensors have no memory.

    A mask that is the same for all heads is copied for each of them, but for cuDNN, which repeats
    it by itself.
    """
    masks: list[Any] = []

    def seen(op: Any, args: Any, *_: Any) -> None:
        masks.extend([args[3]] if kernel[1:] + "_attention.default" in str(op) else [])

    with fake_tensors(), Watching(seen):
        query, key, value = (
            torch.empty(2, 4, 50, width, dtype=BF16, requires_grad=True) for _ in range(3)
        )
        mask = torch.empty(2, heads_of_mask, 50, 50, dtype=torch.bool) if heads_of_mask else None
        call = Call(query, key, value, mask, 0.0, not heads_of_mask, None, False)
        output = getattr(attention, kernel)(call)
        gradient: Tensor = torch.autograd.grad(output.sum(), query)[0]
    assert output.shape == gradient.shape == (2, 4, 50, width)
    assert output.dtype is BF16
    if mask is not None:
        [given] = masks
        assert (given.shape, given.dtype) == ((2, heads_given, 50, 50), BF16)


# --- autocast -----------------------------------------------------------------------------


LOW = torch.bfloat16


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", TYPES)
def test_types_are_those_of_cuda(name: str, device: str) -> None:
    """And the card that is here has the same."""
    run, expected = TYPES[name]
    card = cuda_autocast(supports_bfloat16=True) if device == "cpu" else nullcontext()
    with card, torch.autocast("cuda", LOW):
        assert run(*squares(device)).dtype == expected


def test_each_op_that_cuda_treats_is_known() -> None:
    """Of this torch; one that is not would run as it is."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    treated = [n for n in names if autocast.has_kernel(n, "AutocastCUDA")]
    assert len(treated) > 100
    unknown = [n for n in treated if autocast._kernel(n) is None]
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
    full = squares("cpu")[1]
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


def in_low(outer: Any, tokens: Tensor, targets: Tensor) -> Any:
    """The net in float32, with its forward in low precision."""
    with torch.autocast("cuda", LOW):
        return outer.net(tokens, targets)


def tokens() -> tuple[Tensor, Tensor]:
    text = torch.zeros(8, 128, dtype=torch.long)
    return text, text.clone()


def saved_bytes(report: Report) -> int:
    return report.store_all_peak_bytes - report.resident_bytes - report.held_bytes


@pytest.mark.parametrize("around", [pytest.param("forward", marks=pytest.mark.slow), "call"])
def test_a_step_is_planned_as_it_runs_on_the_card(around: str) -> None:
    """Weights stay in 32 bits; what is saved is smaller than without, and attention is flash."""
    with fxremat.device.absent("A100"):
        wide = fxremat.explain(net(), *tokens()).graphs[0]
        if around == "forward":
            mixed = fxremat.explain(graphs.Net(in_low, net=net()), *tokens()).graphs[0]
        else:
            with torch.autocast("cuda", LOW):
                mixed = fxremat.explain(net(), *tokens()).graphs[0]
    assert mixed.resident_bytes == wide.resident_bytes
    assert saved_bytes(mixed) < 0.9 * saved_bytes(wide)
