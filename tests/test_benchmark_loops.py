"""The benchmark of loops: its models, its rows, what its recorder sees, and a model judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.allocator import EmptyCache
from benchmarks.loops import rows
from benchmarks.loops.__main__ import arguments
from benchmarks.loops.judge import half_of_batch
from benchmarks.loops.models import MODELS
from benchmarks.loops.recorded import TUNING_BYTES, Recorded, recorded_steps, reserved_in_steps
from benchmarks.loops.recorder import Libraries, LoopRecord, LoopRecorder
from benchmarks.loops.replay import replay_loop
from benchmarks.loops.rows import LoopRow, all_rows, budget_of
from benchmarks.loops.stand_in import Arena, LoopGraph, StandIn, on_device, runs_as
from benchmarks.loops.steps import LOOPS
from fxremat.compat.absent.pretending import has_triton
from fxremat.compat.tensors import is_fake
from fxremat.core.events import Allocate, Free, Given, RunEvents
from fxremat.core.layout import CodeBuffer, HalfLayout, RunLayout
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
    loops = "adamw_fused" if between == "pass" else "adamw_fused,accumulate4"
    words = [f"{file}:net", "--loops", loops, "--together", "1", "--budget", "80%"]
    row, *more = all_rows(arguments(words))
    assert isinstance(row, LoopRow)
    for one in (row, *more):
        assert one.status == "ok"
        assert one.outcome is not None
        assert one.promised is not None
        assert one.outcome.reserved == pytest.approx(one.promised, rel=0.005)
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


# --- loops recorded on tensors without memory ---------------------------------------------


WEIGHTS, WIDTH = 3, 1024
WEIGHT = 4 * WIDTH * WIDTH
SAVED, TEMPORARY = 8 * MIB, 16 * MIB
NextStep = Callable[[], None]
Loop = Callable[[nn.Module, NextStep], None]


def _model() -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(WEIGHTS))


def _events() -> RunEvents:
    """Saves one value, and makes the gradients when a temporary one is gone."""
    gradients = [f"gradient {k}" for k in range(WEIGHTS)]
    forward = Allocate("temporary", TEMPORARY), Allocate("saved", SAVED), Free("temporary")
    return RunEvents(
        forward=(*forward, Allocate("loss", 4)),
        backward=(
            Allocate("other", TEMPORARY),
            Free("other"),
            *(Allocate(name, WEIGHT) for name in gradients),
            *(Free("saved"), Free("incoming")),
        ),
        inputs=tuple(Given(WEIGHT, again=True, gradient=name) for name in gradients),
        results=("loss",),
        incoming=(("incoming", 4),),
        forward_buffers=(_buffer("temporary", TEMPORARY), _buffer("saved", SAVED)),
        backward_buffers=(
            _buffer("other", TEMPORARY),
            *(_buffer(name, WEIGHT) for name in gradients),
        ),
    )


def _buffer(block: str, nbytes: int) -> CodeBuffer:
    return CodeBuffer(block, (nbytes // 4,), (1,), "torch.float32", 4)


def _layout() -> RunLayout:
    """What is saved comes first, then gradients; temporary ones lie where gradients come later."""
    events = _events()
    behind = [SAVED + k * WEIGHT for k in range(WEIGHTS)]
    forward = HalfLayout(events.forward_buffers, (SAVED, 0), frozenset({1}))
    backward = HalfLayout(events.backward_buffers, (SAVED, *behind), frozenset({1, 2, 3}))
    return RunLayout(forward, backward)


ARENA_BYTES = SAVED + max(TEMPORARY, WEIGHTS * WEIGHT)


def _recorded(
    loop: Loop, libraries: Libraries | None = None, layout: RunLayout | None = None
) -> LoopRecord:
    recorder = LoopRecorder(libraries or Libraries())
    with recorder.running():
        like = torch.empty((), device="cuda")
        graph = LoopGraph(_events(), tuple(map(str, range(WEIGHTS))), (like,), layout)
        del like
        model = _model()
        with on_device(model, (), recorder):
            arena = Arena(recorder, ARENA_BYTES)
            compiled = StandIn(model, recorder, lambda *_: graph, arena)
            loop(compiled, recorder.next_step)
            return recorder.record()


def _bytes(record: LoopRecord, holder: str | None, step: int | None = None) -> list[int]:
    """Bytes of the blocks of a holder as they were allocated; None: of what an optimizer makes."""
    return [
        one.event.nbytes
        for one in record.happenings
        if isinstance(one.event, Allocate) and step in (None, one.step)
        and (record.holders[one.event.name] == holder if holder else one.moment == "optimizer")
    ]  # fmt: skip


def _trained_with(
    optimizer: Callable[..., torch.optim.Optimizer],
    micro_batches: int = 1,
    late: bool = False,
    **options: object,
) -> Loop:
    """Gradients are dropped ``late``, when the next forward has run, or once they are used."""

    def loop(model: nn.Module, next_step: NextStep) -> None:
        own = optimizer(model.parameters(), **options)
        for step in range(3):
            if step:
                next_step()
            for _ in range(micro_batches):
                loss = model()
                if late:
                    own.zero_grad()
                loss.backward()
                del loss
            own.step()
            if not late:
                own.zero_grad()

    return loop


SGD, DROPPED_LATE = (_trained_with(torch.optim.SGD, lr=0.1, late=late) for late in (False, True))


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        ({"fused": True}, [4, WEIGHT, WEIGHT] * WEIGHTS, []),
        ({"foreach": True}, [WEIGHT] * 3 * WEIGHTS, [WEIGHT] * WEIGHTS),
        ({}, [WEIGHT] * 3 * WEIGHTS, [WEIGHT] * WEIGHTS),
    ],
    ids=["fused", "foreach", "as torch chooses"],
)
def test_adamw_makes_two_states_and_the_square_roots_of_one(
    options: dict[str, bool], first: list[int], later: list[int]
) -> None:
    record = _recorded(_trained_with(torch.optim.AdamW, **options))
    assert _bytes(record, None, 0) == first
    assert _bytes(record, None, 1) == _bytes(record, None, 2) == later
    states = [nbytes for nbytes in first if nbytes > 4][: 2 * WEIGHTS]
    assert [n for n in _bytes(record, "states") if n > 4] == states


def test_momentum_is_a_copy_of_the_first_gradients() -> None:
    record = _recorded(_trained_with(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert _bytes(record, "states") == [WEIGHT] * WEIGHTS
    assert _bytes(record, None, 1) == []


def test_gradients_are_those_of_the_graph_and_go_where_the_loop_drops_them() -> None:
    """The peak says who holds what."""
    record = _recorded(_trained_with(torch.optim.AdamW, fused=True))
    assert _bytes(record, "gradients") == [WEIGHT] * WEIGHTS * 3
    assert _bytes(record, "parameters") == [WEIGHT] * WEIGHTS
    usage = replay_loop(record)
    parameters, states, gradients = WEIGHTS * WEIGHT, 2 * WEIGHTS * WEIGHT, WEIGHTS * WEIGHT
    small = usage.steps[1].allocated - (parameters + states + TEMPORARY + SAVED)
    assert 0 <= small < 0.01 * MIB
    assert gradients < TEMPORARY + SAVED  # which are gone when these come
    assert usage.steps[1].moment in ("forward", "backward")
    assert usage.held["parameters"] == parameters
    assert usage.unused == usage.reserved - sum(usage.held.values())
    assert usage.reserved == max(step.reserved for step in usage.steps)


def test_gradients_of_later_micro_batches_are_added_and_freed() -> None:
    record = _recorded(_trained_with(torch.optim.SGD, micro_batches=4, lr=0.1))
    assert _bytes(record, "gradients", 0) == [WEIGHT] * WEIGHTS * 4
    usage = replay_loop(record)
    needed = WEIGHTS * WEIGHT * 2 + TEMPORARY + SAVED  # parameters, gradients, and the graph
    assert needed > WEIGHTS * WEIGHT * 3 + SAVED  # where new gradients come beside the old ones
    assert needed <= usage.steps[0].allocated < needed + 0.01 * MIB


@pytest.mark.parametrize(("loop", "late"), [(SGD, False), (DROPPED_LATE, True)])
def test_gradients_live_through_the_next_forward_where_they_are_dropped_late(
    loop: Loop, late: bool
) -> None:
    record = _recorded(loop)
    second = [one for one in record.happenings if one.step == 1]
    forward, backward = (
        [k for k, one in enumerate(second) if one.moment == moment]
        for moment in ("forward", "backward")
    )
    freed = [k for k, one in enumerate(second) if isinstance(one.event, Free)
             and record.holders[one.event.name] == "gradients"]  # fmt: skip
    assert min(freed) > max(forward)
    assert (min(freed) < min(backward)) is late


def _clipped(model: nn.Module, next_step: NextStep) -> None:
    model().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _scaled(model: nn.Module, next_step: NextStep) -> None:
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("loop", [_clipped, _scaled])
def test_clipping_and_scaling_take_numbers_only(loop: Loop) -> None:
    record = _recorded(loop)
    assert _bytes(record, "gradients") == [WEIGHT] * WEIGHTS
    made = _bytes(record, "eager")
    assert made
    assert max(made) <= 4 * max(WEIGHTS, 2)


def test_a_moving_average_is_a_copy_and_evaluation_frees_what_it_makes() -> None:
    """Emptying the cache is an event."""

    def loop(model: nn.Module, next_step: NextStep) -> None:
        average = copy.deepcopy(model)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
            average()
        torch.cuda.empty_cache()

    record = _recorded(loop)
    assert sum(isinstance(one.event, EmptyCache) for one in record.happenings) == 1
    assert [n for n in _bytes(record, "eager") if n > 4] == [WEIGHT] * WEIGHTS
    freed = {one.event.name for one in record.happenings if isinstance(one.event, Free)}
    made = {name for name, holder in record.holders.items() if holder == "graph"}
    assert made <= freed


def test_libraries_take_workspaces_once_and_tuning_writes_over_memory_once() -> None:
    libraries = Libraries(workspace=32 * MIB, tuning=60 * MIB)
    record = _recorded(SGD, libraries)
    assert sorted(_bytes(record, "libraries")) == [32 * MIB] * 2 + [60 * MIB] * 2


def test_what_is_placed_lies_in_the_arena_unless_something_lives_there() -> None:
    record = _recorded(DROPPED_LATE, layout=_layout())
    places = [(one.step, one.event.nbytes, one.place) for one in record.happenings
              if isinstance(one.event, Allocate) and one.event.nbytes >= WEIGHT
              and record.holders[one.event.name] in ("graph", "gradients")]  # fmt: skip
    assert places[0] == (0, ARENA_BYTES, "graphs")
    first = [place for step, _, place in places[1:] if step == 0]
    assert first == ["arena"] * (3 + WEIGHTS)
    [temporary] = [place for step, n, place in places if (step, n) == (1, TEMPORARY)][:1]
    assert temporary == "graphs"  # the gradients of the first step are still there


def test_graphs_stand_in_for_what_is_compiled_between_eager_code() -> None:
    recorder = LoopRecorder()
    with recorder.running():
        model, like = _model(), torch.empty((), device="cuda")
        graph = LoopGraph(_events(), ("", "", ""), (like,))
        with on_device(model, (), recorder):
            [loss] = runs_as(lambda: graph, 1, recorder, Arena(recorder, 0))(7, *model.parameters())
            torch.autograd.backward(loss * 2)
            gradients = [one.grad for one in model.parameters()]
            assert all(one is not None and one.shape == (WIDTH, WIDTH) for one in gradients)
            record = recorder.record()
    assert _bytes(record, "gradients") == [WEIGHT] * WEIGHTS


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
