"""The operator that runs convolutions a few images at a time: values, bytes, and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.grad import conv2d_weight

from fxremat.compat.inductor.generated_code import generate
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.variants.chunks.inductor_kernels import suit_rows
from fxremat.runtime import kernels
from fxremat.runtime.chunks.buffers import places_of_images
from fxremat.runtime.chunks.operator import ROWS, RunningStatistics
from fxremat.runtime.chunks.program import Instruction, Program, Ref, dump
from tests.images import WIDTH, images
from tests.row_sites import assert_close


def program(dtype: torch.dtype = torch.float32) -> str:
    """x, w -> the convolution's result halved, its mean and variance, and a weight's gradient."""
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    row_shape = (WIDTH, 6, 6)
    steps = (
        Instruction("aten.convolution.default", (Ref(0), Ref(1), None, *how), {}, "row", row_shape,
                    dtype),
        Instruction("aten.mul.Tensor", (Ref(2), 0.5), {}, "row", row_shape, dtype),
        Instruction("aten.var_mean.correction#0", (Ref(2), [0, 2, 3]), {"correction": 1}, "sum",
                    (WIDTH,), dtype),
        Instruction("aten.var_mean.correction#1", (Ref(2), [0, 2, 3]), {"correction": 1}, "sum",
                    (WIDTH,), dtype),
        Instruction("aten.convolution_backward.default#1",
                    (Ref(3), Ref(0), Ref(1), None, *how, [False, True, False]), {}, "sum",
                    (WIDTH, 3, 3, 3), dtype),
    )  # fmt: skip
    return dump(Program(1, 1, (), steps, (3, 4, 5, 6)))


def expected(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The same of all images at once, in float64."""
    x, w = x.double(), w.double()
    c = F.conv2d(x, w, padding=1)
    variance, mean = torch.var_mean(c, (0, 2, 3))
    gradient = conv2d_weight(x, [*w.shape], c / 2, padding=1)  # type: ignore[no-untyped-call]
    return [c / 2, variance, mean, gradient]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [(8, 2, 1), (9, 4, 2), (5, 5, 5), (7, 1, 1)])
def test_the_operator(sizes: tuple[int, int, int], fused: bool) -> None:
    """Values, and bytes: what is predicted is enough, and not by more than odds and ends."""
    count, chunk, tile = sizes
    x, w = images(count, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach()
    args = ([x], [w], program(), chunk, tile, fused)
    found = ROWS(*args)
    for one, best in zip(found, expected(x, w), strict=True):
        assert_close(one, best, 1e-5)
    made = sum(t.nbytes for t in found)
    peak = measure_peak(lambda: ROWS(*args)).above_start_bytes
    predicted = kernels.WORKSPACES[ROWS](*args, measure=Workspaces(x.device).of_call)
    assert 0 <= predicted - (peak - made) <= 16 * WIDTH * x.itemsize


def alone() -> str:
    """x, w -> the convolution's result."""
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    one = Instruction("aten.convolution.default", (Ref(0), Ref(1), None, *how), {}, "row",
                      (WIDTH, 6, 6), torch.float32)  # fmt: skip
    return dump(Program(1, 1, (), (one,), (2,)))


def test_results_with_the_channels_last() -> None:
    """Same values; real and fake results lie alike, and take no more bytes than predicted."""
    x, w, text = images(9, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach(), alone()
    assert places_of_images(text) == {0}
    assert places_of_images(program()) == set(), "what a kernel writes lies densely"
    args, last = ([x], [w], text, 4, 1), {"fused": True, "channels_last": True}
    (plain,), (found,) = ROWS(*args), ROWS(*args, **last)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, plain)
    torch.library.opcheck(ROWS, args, last, test_utils=("test_schema", "test_faketensor"))
    peak = measure_peak(lambda: ROWS(*args, **last)).above_start_bytes
    predicted = kernels.WORKSPACES[ROWS](*args, **last, measure=Workspaces(x.device).of_call)
    assert 0 <= predicted - (peak - found.nbytes) <= 16 * WIDTH * x.itemsize


def rows_and(after: Callable[..., Any]) -> fx.GraphModule:
    """A graph of convolutions of a few images at a time, and what is made of them."""
    x, w, text = images(9, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach(), alone()

    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return after(ROWS([x], [w], text, 4, 1)[0], v)

    module = make_fx(run, tracing_mode="fake")(x, w, images(4, WIDTH, 3, 3).detach())
    suit_rows(module)
    return module


def again(h: torch.Tensor) -> torch.Tensor:
    """Another call that has these rows."""
    one = Instruction("aten.sum.dim_IntList", (Ref(0), [0]), {}, "sum", (WIDTH, 6, 6),
                      torch.float32)  # fmt: skip
    (total,) = ROWS([h], [], dump(Program(1, 0, (), (one,), (1,))), 4, 1)
    assert isinstance(total, torch.Tensor)
    return total


@pytest.mark.parametrize(
    ("after", "is_last"),
    [
        (lambda y, v: F.conv2d(F.relu(y), v), True),
        (lambda y, v: F.relu(y), False),  # no convolution, no such layout
        (lambda y, v: (y, F.conv2d(F.relu(y), v)), False),  # the caller sees it
        (lambda y, v: (again(y), F.conv2d(F.relu(y), v)), False),
        (lambda y, v: (again(F.relu(y)), F.conv2d(F.relu(y), v)), False),
    ],
)
def test_results_lie_as_inductor_lays_out_what_is_around(
    after: Callable[..., Any], is_last: bool
) -> None:
    module = rows_and(after)
    call = next(iter(module.graph.find_nodes(op="call_function", target=ROWS)))
    assert call.kwargs["fused"]
    assert call.kwargs.get("channels_last", False) is is_last
    for user in call.users:
        assert user.meta["val"].is_contiguous(memory_format=torch.channels_last) is is_last


def test_a_loop_writes_over_a_result_that_lies_in_its_order() -> None:
    module = rows_and(lambda y, v: [F.conv2d(F.relu(y), v)])
    (call,) = module.graph.find_nodes(op="call_function", target=ROWS)
    over = []
    for last in (True, False):
        call.kwargs = {**call.kwargs, "channels_last": last}
        source = generate(module, is_backward=False, seen_outputs=1).source
        over.append("# reuse" in source)
    assert over == [True, False]


def test_the_variance_of_values_far_from_zero() -> None:
    """Sums of squares would lose all digits."""
    one = Instruction("aten.var_mean.correction#0", (Ref(0), [0, 2]), {"correction": 1}, "sum",
                      (4,), torch.float32)  # fmt: skip
    x = 1000 + 0.01 * torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(5))
    statistics = RunningStatistics(one, 0, x.device)
    for part in (x[:5], x[5:6], x[6:]):
        statistics.add(part)
    best = x.double().var((0, 2))
    assert (statistics.variance(1).double() - best).abs().max() <= 1e-3 * best.max()
    assert (statistics.mean.double() - x.double().mean((0, 2))).abs().max() <= 1e-3
