"""Which attention CUDA would run, by capability, dtype, widths and mask; and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.compat.absent import attention
from fxremat.compat.absent.attention import Call, chosen_kernel
from fxremat.compat.tensors import fake_tensors
from fxremat.cost.cuda_scratch import cublas_workspace

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


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "rows", "masked", "causal", "name"), CHOICES
)
def test_choice(
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    rows: int,
    masked: bool,
    causal: bool,
    name: str,
) -> None:
    kernel = chosen_kernel(_call(dtype, width, rows, masked, causal), capability)
    assert kernel.__name__ == f"_{name}"


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
    expected = functional.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=grouped, scale=0.4
    )
    found = attention.attention(
        query, key, value, mask, scale=0.4, enable_gqa=grouped, capability=(7, 5)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kernel", "width"), [("_flash", 60), ("_flash", 64), ("_cudnn", 64), ("_efficient", 64)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_operands_are_prepared_as_torch_does(kernel: str, width: int, masked: bool) -> None:
    """The output and its gradient have the sizes of torch's own; tensors have no memory."""
    if masked and kernel == "_flash":
        pytest.skip("takes no mask")
    with fake_tensors():
        query, key, value = (
            torch.empty(2, 4, 50, width, dtype=BF16, requires_grad=True) for _ in range(3)
        )
        mask = torch.empty(50, 50, dtype=torch.bool) if masked else None
        call = Call(query, key, value, mask, 0.0, not masked, None, False)
        output = getattr(attention, kernel)(call)
        gradient: Tensor = torch.autograd.grad(output.sum(), query)[0]
    assert output.shape == gradient.shape == (2, 4, 50, width)
    assert output.dtype is BF16


class _Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The masks that attention is given; nothing runs but their own making."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            self.seen.append(args[3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kernel", "shape"), [("_cudnn", (2, 1, 50, 50)), ("_efficient", (2, 4, 50, 50))]
)
def test_cudnn_repeats_masks_by_itself(kernel: str, shape: tuple[int, ...]) -> None:
    """A mask that is the same for all heads; repeated here it would be copied for each of them."""
    with fake_tensors(), _Masks() as masks:
        query = torch.empty(2, 4, 50, 64, dtype=BF16)
        mask = torch.empty(2, 1, 50, 50, dtype=torch.bool)
        getattr(attention, kernel)(Call(query, query, query, mask, 0.0, False, None, False))
    [given] = masks.seen
    assert given.shape == shape
    assert given.dtype is BF16


def test_cublas_works_in_32_mebibytes_from_hopper_on() -> None:
    assert cublas_workspace((8, 9)) == 8_519_680
    assert cublas_workspace((9, 0)) == 32 * 2**20
