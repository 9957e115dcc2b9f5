"""The benchmark of loops: its models, its rows, a model judged, and what a GPU recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.loops import rows
from benchmarks.loops.__main__ import arguments
from benchmarks.loops.judge import half_of_batch
from benchmarks.loops.models import MODELS
from benchmarks.loops.recorded import TUNING_BYTES, Recorded, recorded_steps, reserved_in_steps
from benchmarks.loops.rows import LoopRow, all_rows, budget_of
from benchmarks.loops.steps import LOOPS
from fxremat.compat.absent.pretending import CUDA, has_triton
from fxremat.compat.absent.without_device import without_device
from fxremat.compat.tensors import is_fake
from fxremat.sizes import MIB
from fxremat.whatif.device import absent

# --- loops --------------------------------------------------------------------------------


NAMES = {"bert_amp": "bert", "clip_amp": "clip", "deberta_amp": "deberta", "gemma2": "gemma2",
         "llamab": "llama", "lora": "lora", "t5": "t5"}  # fmt: skip


@pytest.mark.parametrize("recorded", recorded_steps(), ids=lambda one: one.name)
def test_models_train_as_many_bytes_as_those_that_a_gpu_ran(recorded: Recorded) -> None:
    with torch.device("meta"):
        model, _ = MODELS[NAMES[recorded.name]]()
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    assert trained == sum(recorded.trained)


def test_another_shape_is_half_the_batch_or_half_the_text() -> None:
    text, mask = torch.zeros(4, 6), torch.zeros(6, 6)
    assert [x.shape for x in half_of_batch((text, mask, text[:, 0]))] == [(2, 6), (6, 6), (2,)]
    assert [x.shape for x in half_of_batch((text[:1], mask))] == [(1, 3), (6, 3)]


def test_what_is_asked_for_is_checked() -> None:
    """A budget is bytes, or a part of what plain compile takes."""
    assert budget_of("60%", 1000) == 600
    assert budget_of("8MiB", 1000) == 8 * MIB
    assert arguments([]).models == list(MODELS)
    assert arguments([]).loops == list(LOOPS)
    for words in (["nobody"], ["--loops", "none"], ["--device", "abacus"]):
        with pytest.raises(SystemExit):
            arguments(words)


def test_a_model_that_is_not_there_has_failed_in_each_loop() -> None:
    asked = arguments(["nowhere.py:net", "--loops", "adamw_fused,evaluate", "--together", "1"])
    rows = list(all_rows(asked))
    assert [(row.loop, row.status) for row in rows] == [("adamw_fused", "failed"),
                                                       ("evaluate", "failed")]  # fmt: skip
    assert "reserved" in rows[0].as_json()


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x):
        for layer in self.layers[:5]:
            x = torch.relu(layer(x))
        {between}
        for layer in self.layers[5:]:
            x = torch.relu(layer(x))
        return x.mean()


def net():
    return Net(), {{"x": torch.zeros(65536, 512)}}
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("between", ["pass", "torch._dynamo.graph_break()"])
def test_a_model_is_judged(between: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(NET.format(between=between), encoding="utf-8")
    others = "sgd_momentum,zero_grad_late_and_clip,evaluate"
    loops = "adamw_fused," + (others if between == "pass" else "accumulate4")
    words = [f"{file}:net", "--loops", loops, "--together", "1", "--budget", "80%"]
    row, *more = all_rows(arguments(words))
    assert isinstance(row, LoopRow)
    for one in (row, *more):
        assert one.status == "ok"
        assert one.outcome is not None
        assert one.promised is not None
        if one.loop == "zero_grad_late_and_clip":
            # A segment of 8 MiB is promised that is not taken.
            assert one.outcome.reserved <= one.promised <= one.outcome.reserved + 8 * MIB
        else:
            assert one.outcome.reserved == pytest.approx(one.promised, rel=0.005)
        if one.loop == "sgd_momentum":
            assert one.outcome.held["states"] == one.outcome.held["parameters"]
    assert row.outcome is not None
    assert row.plain is not None
    assert len(row.outcome.reserved_by_step) == 6
    assert row.outcome.held["parameters"] == 8 * (512 * 512 + 512) * 4
    assert row.outcome.held["states"] >= 2 * row.outcome.held["parameters"]
    assert row.outcome.held["eager"] >= 65536 * 512 * 4
    assert row.outcome.reserved == max(row.outcome.reserved_by_step)
    assert row.outcome.reserved < row.plain


class Rates(nn.Module):
    """As nets with stochastic depth have them: read from a tensor when the net is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 0.5, 3).tolist()
        self.linear = nn.Linear(4, 4)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_a_model_that_reads_values_when_it_is_made_gets_some() -> None:
    with absent("H200"):
        model, (x,) = rows._made_without_memory(lambda: (Rates(), torch.zeros(2, 4)))
    assert model.rates == [0.0, 0.25, 0.5]
    assert not is_fake(x)


# --- what a GPU recorded -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "tuned"),
    [
        *[("bert_amp", 0.005, 0), ("clip_amp", 0.005, 0), ("llamab", 0.01, 0)],
        *[("lora", 0.01, TUNING_BYTES), ("t5", 0.01, TUNING_BYTES)],
    ],
)
def test_recorded_loops_reserve_what_a_gpu_said(name: str, error: float, tuned: int) -> None:
    """Where kernels were tuned, it reserved more than without."""
    [step] = [one for one in recorded_steps() if one.name == name]
    assert max(reserved_in_steps(step, tuned)) == pytest.approx(step.measured, rel=error)
    assert not tuned or max(reserved_in_steps(step)) < 0.95 * step.measured


# --- without a device ---------------------------------------------------------------------


ATEN = torch.ops.aten


@contextmanager
def _inside(emptied: Callable[[], None] = lambda: None) -> Iterator[list[Any]]:
    """Yields the ops that are seen."""
    ops: list[Any] = []
    with without_device(lambda op, *_: ops.append(op), emptied):
        yield ops


@pytest.mark.parametrize("built_for_cuda", [False, True])
def test_autograd_runs_through_modules_and_functions_of_the_user(
    built_for_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if built_for_cuda:  # then torch says of accelerators what torch.cuda says
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: torch.cuda.is_available())

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    with _inside():
        model = nn.Linear(3, 4).to("cuda")
        loss = Double.apply(model(torch.ones(2, 3, device="cuda"))).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        gradient = model.weight.grad
        assert gradient is not None
        assert is_fake(gradient)
        assert gradient.device == model.weight.device == loss.device == CUDA
        assert model.weight.is_cuda
        model.weight.grad = None
        assert model.to(torch.bfloat16).weight.device == CUDA


@pytest.mark.parametrize("gradients", [True, False])
def test_tensors_move_where_they_are_not_and_are_not_copied_where_they_are(gradients: bool) -> None:
    with _inside() as ops, torch.set_grad_enabled(gradients):
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        ops.clear()
        assert there.to("cuda") is there
        assert there.to(there) is there
        assert there.cuda() is there
        assert not ops
        assert here.to("cuda").device == here.cuda().device == here.to(there).device == CUDA
        assert there.cpu().device == there.to("cpu").device == torch.device("cpu")
        assert there.to(torch.float16).device == there.to("cuda", torch.float16).device == CUDA
        ops.clear()
        assert there.to("cuda", copy=True) is not there
        assert ops == [ATEN._to_copy.default]


def test_a_decomposed_op_is_seen_once() -> None:
    with _inside() as ops:
        x = [torch.ones(3, device="cuda") for _ in range(2)]
        ops.clear()
        torch._foreach_addcdiv_(x, x, x, 0.5)
        x[0].softmax(-1)
    assert ops == [ATEN._foreach_addcdiv_.Scalar, ATEN._softmax.default]


@pytest.mark.parametrize(("asked", "op"), [({}, ATEN._foreach_sqrt.default),
                                           ({"fused": True}, ATEN._fused_adamw_.default),
                                           ({"foreach": False}, ATEN.sqrt.default)])  # fmt: skip
def test_optimizers_choose_as_on_the_device(asked: dict[str, bool], op: Any) -> None:
    with _inside() as ops:
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], **asked).step()  # type: ignore[arg-type]
    chosen = {ATEN._foreach_sqrt.default, ATEN._fused_adamw_.default, ATEN.sqrt.default}
    assert chosen & {*ops} == {op}


def test_numbers_of_the_device_are_0_and_counts_of_the_host_are_1() -> None:
    with _inside():
        assert torch.ones((), device="cuda").item() == 0.0
        assert torch.zeros(()).item() == 1.0
        assert not torch.ones((), device="cuda").isnan()
        assert torch.ones((), dtype=torch.int64, device="cuda").item() == 0


def test_torch_cuda_answers_and_is_as_before_at_the_end() -> None:
    emptied: list[None] = []
    before = torch.cuda.is_available()
    with _inside(lambda: emptied.append(None)):
        assert torch.cuda.is_available()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    assert emptied == [None]
    assert torch.cuda.is_available() == before
    assert torch.ones(2).to("cpu").sum().item() == 2
