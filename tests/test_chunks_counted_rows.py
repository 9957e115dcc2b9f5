"""Rows that are ignored are not computed: the same results, in the same memory for any number."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS
from fxremat.runtime import kernels
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import dump, parse
from tests.graphs import Net
from tests.row_nets import D, head, labels, rows
from tests.row_sites import Traced, given_to_rows, taken, trace
from tests.variants import sites

ROWS_OF_ALL, IGNORED = 50, -100
Call = tuple[Any, Any]


@cache
def traced(dtype: torch.dtype) -> Traced:
    """The step of a loss in float32 or more, whatever the type of its head."""
    wide = torch.promote_types(dtype, torch.float32)
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x).to(wide), y), head=head().to(dtype))
    return trace(net, (rows(ROWS_OF_ALL, D).detach().to(dtype).requires_grad_(), labels(50)))


@cache
def in_chunks(dtype: torch.dtype) -> JointGraph:
    """The joint graph with the loss and its gradients in one loop."""
    joint = traced(dtype).joint
    (site,) = (site for site in sites(CHUNKED_LOSS, joint) if "at once 16" in site.name)
    return taken(joint, site)


def with_labels(y: torch.Tensor, dtype: torch.dtype = torch.float64, **changed: Any) -> Call:
    """What the loop is given; some inputs of the graph may change."""
    step = traced(dtype)
    (name,) = (n for n, v in step.inputs.items() if getattr(v, "dtype", None) is torch.int64)
    (call,) = given_to_rows(in_chunks(dtype), {**step.inputs, name: y, **changed})
    return call


def ignoring(ignored: Any) -> torch.Tensor:
    """Labels, some of which are ignored."""
    chosen = torch.as_tensor(ignored)
    return torch.where(chosen, IGNORED, labels(ROWS_OF_ALL))


def of_all_rows(call: Call) -> list[torch.Tensor]:
    """What the call gives where it leaves nothing out."""
    args, kwargs = call
    text = dump(replace(parse(args[2]), ignored=None))
    found: list[torch.Tensor] = ROWS(*args[:2], text, *args[3:], **kwargs)
    return found


def run(call: Call) -> list[torch.Tensor]:
    args, kwargs = call
    found: list[torch.Tensor] = ROWS(*args, **kwargs)
    return found


class Multiplied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the rows of all products with the head."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.addmm and args[1].shape[1:] == (D,):
            self.rows += len(args[1])
        return func(*args, **(kwargs or {}))


@given(st.lists(st.booleans(), min_size=ROWS_OF_ALL, max_size=ROWS_OF_ALL), st.integers(1, 20),
       st.integers(1, 20))  # fmt: skip
def test_any_rows_may_be_ignored(ignored: list[bool], chunk: int, tile: int) -> None:
    args, kwargs = with_labels(ignoring(ignored))
    call = (*args[:3], chunk, tile), kwargs
    for new, old in zip(run(call), of_all_rows(call), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 20, 33, 49, 50])
def test_in_low_precision(dtype: torch.dtype, count: int) -> None:
    call = with_labels(ignoring(torch.arange(ROWS_OF_ALL) >= count), dtype)
    most = 1e-5 if dtype is torch.float32 else 2e-2
    for new, old in zip(run(call), of_all_rows(call), strict=True):
        scale = float(old.abs().max())
        torch.testing.assert_close(new.double(), old.double(), rtol=most, atol=most * scale)


def test_memory_is_the_same_for_any_number() -> None:
    """To the byte what is said; labels in any order."""
    order = torch.randperm(ROWS_OF_ALL, generator=torch.Generator().manual_seed(0))
    for count in (0, 1, 20, 33, 49, 50):
        args, kwargs = call = with_labels(ignoring(order >= count), torch.float32)
        made = sum(one.nbytes for one in run(call))
        peak = measure_peak(lambda call=call: run(call)).above_start_bytes  # type: ignore[misc]
        said = kernels.WORKSPACES[ROWS](*args, **kwargs, measure=kernels.unmeasured)
        assert peak - made == said


@pytest.mark.parametrize(
    ("count", "computed"), [(50, 50), (49, 50), (33, 39), (14, 26), (13, 13), (1, 13), (0, 50)]
)
def test_what_is_ignored_is_not_computed(count: int, computed: int) -> None:
    """A chunk, and here a tile, has 13 rows. Where no row counts, all are computed."""
    args, kwargs = with_labels(ignoring(torch.arange(ROWS_OF_ALL) >= count))
    assert args[3:5] == (16, 16)
    with Multiplied() as seen:
        kernels.IMPLEMENTATIONS[ROWS](*args, **kwargs)
    assert seen.rows == computed


def test_a_row_that_is_ignored_may_hold_anything() -> None:
    """It adds nothing; computed, it would make NaN of every sum."""
    step = traced(torch.float64)
    (name,) = (n for n, v in step.inputs.items() if getattr(v, "shape", ()) == (ROWS_OF_ALL, D))
    x = step.inputs[name].clone()
    x[3], x[7] = float("nan"), float("inf")
    y = ignoring([row in (3, 7, 8) or row > 20 for row in range(ROWS_OF_ALL)])
    call = with_labels(y, **{name: x})
    assert any(one.isnan().any() for one in of_all_rows(call))
    kept = with_labels(y)
    for new, old in zip(run(call), of_all_rows(kept), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-14)


def test_a_small_call_on_a_gpu_looks_for_nothing() -> None:
    """There it would have to wait for the labels."""
    args, _ = with_labels(labels(ROWS_OF_ALL))
    program_ = parse(args[2])
    assert program_.ignored is not None
    on_gpu = [[one.to("meta") for one in part] for part in args[:2]]
    without = dump(replace(program_, ignored=None))
    said = (
        kernels.WORKSPACES[ROWS](*on_gpu, text, *args[3:], measure=kernels.unmeasured)
        for text in (args[2], without)
    )
    assert len({*said}) == 1
