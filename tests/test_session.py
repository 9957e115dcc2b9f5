"""What is asked of a graph, what outlives its compilation, and files of answers."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxremat
from fxremat.compat.tensors import without_memory
from fxremat.compile import request, session
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.cost.cuda_scratch import allocate_cublas
from fxremat.cost.op_timers import TRAFFIC
from fxremat.disk_cache import Answers, write_whole
from fxremat.memory import optimizers
from fxremat.options import Options, parse_options
from fxremat.report.report import MemoryFigures, Provenance, Report, Row, StepMemory, ValueTables
from fxremat.runtime.host_memory import is_on
from fxremat.sizes import GIB, MIB
from tests.conftest import Golden
from tests.graphs import batch
from tests.step_reports import altered

REPORT = Report(
    graph=2,
    time_overhead=0.125,
    memory=MemoryFigures(
        budget_bytes=8 * MIB,
        resident_bytes=MIB,
        held_bytes=2 * MIB,
        store_all_peak_bytes=10 * MIB,
        planned_peak_bytes=7 * MIB,
        predicted_peak_bytes=7 * MIB + MIB // 2,
        minimum_peak_bytes=5 * MIB,
    ),
    values=ValueTables(
        tuple(Row(f"gelu_{i} [layers.{i}, model.py:{8 + i}]", MIB // 4) for i in range(12)),
        (Row("addmm_3 [layers.3, model.py:8]", MIB, 2, 11.5), Row("mul", 512, 1, 0.5)),
        at_peak=(Row("primals_1 [graph input]", MIB),),
    ),
    provenance=Provenance(nodes=40, dry_runs=3, seconds={"plan": 0.25, "apply": 0.5}),
    step=StepMemory((MIB, 7 * MIB, 2 * MIB)),
    problem=Problem(
        "p",
        (Value("x", MIB),),
        (Op("a", (), ("x",), 12.5), Op("b", ("x",), (), 0.0, inplace=())),
        (),
        (),
        (),
    ),
    plan=Plan(("a", "b", "a"), "greedy", 8 * MIB, 7 * MIB, 12.5, 0.25, 10.0, 4 * MIB),
)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.compile.session.cache_directory", lambda: tmp_path / "fxremat")


def test_report_text(golden: Golden) -> None:
    golden(str(REPORT))


def test_report_summary_text(golden: Golden) -> None:
    golden(altered(replace(REPORT, from_cache=True), budget_bytes=None).summary())


def test_a_stored_report_is_read_back() -> None:
    session.store("key", REPORT)
    assert session.load("key", 5) == replace(REPORT, graph=5, from_cache=True)
    assert session.load("other key", 5) is None
    assert len(list(session._kept().directory.iterdir())) == 1


def test_a_cache_that_cannot_be_written_fails_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder for our files should be."""
    monkeypatch.setattr("fxremat.cost.op_timers.TRAFFIC", TRAFFIC[:1])  # measured each time
    (tmp_path / "fxremat").write_text("no folder")
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "executor": "aot_eager",
        "memory_budget": "2MiB",
        "op_times": "measured",
    }
    model, x = nn.Conv2d(3, 4, 3), torch.ones(2, 3, 8, 8)
    call = torch.compile(model, backend="fxremat", options=options)
    call(x).sum().backward()
    assert model.weight.grad is not None
    assert len(session.reports()) == 1
    assert (tmp_path / "fxremat").read_text() == "no folder"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"graph": 1, "saved": []}', "\x00"])
def test_what_is_no_report_counts_as_none(text: str) -> None:
    session.store("key", REPORT)
    (path,) = session._kept().directory.iterdir()
    path.write_text(text, encoding="utf-8")
    assert session.load("key", 0) is None


def test_planning_apart_leaves_no_trace_and_reset_forgets() -> None:
    with session.separate():
        session.STATE.reports.append(REPORT)
        assert session.begin().graph == 0
        with session.separate():
            assert session.reports() == []
        assert session.reports() == [REPORT]
        assert session.begin().graph == 1
        session.reset()
        assert session.reports() == []
        assert session.begin().graph == 0


# --- request ------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)
TOTAL, CACHE = 80 * GIB, 1000
Card = Callable[..., None]


def options(**given: Any) -> Options:
    return parse_options(given, device_total_bytes=TOTAL)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Sets what a card of 80 GiB would say."""

    def say(allocated: int = 0, idle: int = 0, free: int = TOTAL, fraction: float = 1.0) -> None:
        cuda: Any = torch.cuda
        monkeypatch.setattr(request, "allocate_cublas", lambda device: None)
        properties = SimpleNamespace(L2_cache_size=CACHE)
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: allocated)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: allocated + idle)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (free, TOTAL))
        monkeypatch.setattr(
            cuda, "get_per_process_memory_fraction", lambda device: fraction, raising=False
        )

    return say


@pytest.mark.parametrize(
    ("says", "least", "most"),
    [
        ({"allocated": 8 * GIB, "idle": 2 * GIB, "free": 60 * GIB}, 63 * GIB, 68.6 * GIB),
        ({"free": 70 * GIB, "fraction": 0.5}, 0.45 * TOTAL, 0.5 * TOTAL),
        ({"free": MIB}, MIB, MIB),
    ],
    ids=["a margin is left", "the part that a process may have", "a card that is nearly full"],
)
def test_a_budget_that_nobody_asked_for(
    card: Card, says: dict[str, Any], least: float, most: float
) -> None:
    card(**says)
    found = request._budget(options(), GPU, None)
    assert found is not None
    assert least <= found <= most


def test_a_budget_that_was_asked_for_is_taken(card: Card) -> None:
    """Else nearly equal free sizes give equal budgets."""
    budgets = []
    for free in (70 * GIB, 70 * GIB + 3 * MIB):
        card(free=free)
        budgets.append(request._budget(options(), GPU, None))
    assert budgets[0] == budgets[1]
    assert request._budget(options(memory_budget="8GiB"), GPU, None) == 8 * GIB
    assert request._budget(options(), torch.device("cpu"), None) is None


def test_of_a_slice_the_rest_is_held(card: Card) -> None:
    """The graph counts the slice alone; what overlaps does not count twice."""
    whole = torch.zeros(1024)
    card(allocated=4096)
    here = torch.device("cpu")
    assert request.unseen_bytes([whole], here) == 0
    assert request.unseen_bytes([whole[:256]], here) == 3072
    assert request.unseen_bytes([whole[:256], whole[256:512]], here) == 2048
    assert request.unseen_bytes([whole, whole[:512]], here) == 0


def asked(inputs: list[Any], around: int = 0, **given: Any) -> request.Budget:
    """The budget of a graph with these inputs."""
    return request.request_for(inputs, options(**given), around).budget


def test_a_reserve_adds_to_all_that_is_counted_without_it(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA what is allocated and what tuning takes; on the CPU what lies around."""
    here = [torch.empty(8)]
    assert (asked(here, 100).held, asked(here, 100, reserve=7).held) == (100, 107)
    assert asked(here).autotune == 0
    card(allocated=100 * MIB)
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    allocated: dict[str, Any] = {"count": "allocated"}
    without, given = asked(here, 40 * MIB, **allocated), asked(here, reserve=7, **allocated)
    assert (without.held, without.autotune, without.coming) == (100 * MIB, CACHE, 0)
    assert (given.held, given.autotune, given.coming) == (100 * MIB + 7, CACHE, 7)
    assert asked(here, executor="aot_eager", **allocated).autotune == 0  # has no kernels
    without, given = asked(here), asked(here, reserve=7)  # tuning takes a segment of small blocks
    assert (without.held, without.autotune, without.coming) == (102 * MIB, 0, 0)
    assert (given.held, given.autotune, given.coming) == (102 * MIB + 7, 0, 7)


def test_states_of_an_optimizer_are_held() -> None:
    """On the CPU nobody else counts those that are there."""
    weight = torch.nn.Parameter(torch.ones(256))
    batch, optimizer = torch.ones(16), torch.optim.SGD([weight], momentum=0.9)
    before = asked([weight, batch], reserve=7)
    assert (before.held, before.coming) == (1024 + 7, 1024 + 7)
    assert before.optimizer_step == 3 * 1024 + 64 + 7 + 32  # with single numbers
    weight.grad = torch.ones(256)
    optimizer.step()
    assert asked([weight, batch], reserve=7) == before
    off = asked([weight, batch], optimizer="none")
    assert (off.held, off.coming) == (0, 0)


def test_on_cuda_states_are_held_that_are_not_there_yet(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are allocated, and in blocks of 512 bytes."""
    card(allocated=8 * MIB)
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    with without_memory():
        weight = torch.nn.Parameter(torch.empty(250, device="cuda:0"))
        optimizer = torch.optim.AdamW([weight], fused=True)
    assert asked([weight]).coming == 3 * 1024 - 512  # the number of steps is there, too
    monkeypatch.setattr(optimizers, "_states_there", lambda optimizer, device: 1024)
    assert asked([weight]).coming == 2 * 1024 - 512
    assert optimizer.param_groups


@pytest.mark.parametrize(("count", "tuned"), [("allocated", 0), ("reserved", 2 * MIB)])
def test_bytes_that_no_graph_sees_count_in_steps_after_workspaces_of_cublas_are_there(
    card: Card, monkeypatch: pytest.MonkeyPatch, count: str, tuned: int
) -> None:
    """So a few more, as a metric that is kept from one run to the next, ask for no other plan.

    Where reserved bytes count, tuning takes a segment of small blocks.
    """
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    held = []
    for allocated in (64 * MIB + 1, 64 * MIB + 5000, 66 * MIB, 66 * MIB + 1):
        card(allocated=allocated)
        held.append(asked([], count=count).held - tuned)
    assert held == [66 * MIB, 66 * MIB, 66 * MIB, 68 * MIB]
    card(allocated=100)
    monkeypatch.setattr(request, "allocate_cublas", lambda device: card(allocated=5 * MIB))
    assert asked([torch.empty(8, device="meta")], count=count).held == 6 * MIB + tuned


def test_both_threads_compute_a_product() -> None:
    """The forward's and that of the backward."""
    products: list[int] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            products.append("mm" in str(op))
            return op(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():  # type: ignore[no-untyped-call]
        allocate_cublas(torch.device("cpu"))
    assert sum(products) == 3


def test_tensors_of_another_device_are_no_inputs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(8, device="meta")
    assert request.size_of_inputs([x], torch.device("meta")) == 32
    assert not is_on(x, torch.device("meta", 1))
    assert request.size_of_inputs([x], torch.device("meta", 1)) == 0


# --- answers ------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
QUESTIONS = st.dictionaries(st.text(max_size=3), JSON, max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUESTIONS, JSON, QUESTIONS)
def test_an_answer_belongs_to_its_question(
    tmp_path: Path, question: dict[str, Any], answer: Any, other: dict[str, Any]
) -> None:
    answers = Answers(tmp_path / str(len(list(tmp_path.iterdir()))))
    assert answers.read(question) is None
    answers.keep(question, answer)
    assert answers.read(question) == answer
    if json.dumps(other, sort_keys=True) != json.dumps(question, sort_keys=True):
        assert answers.read(other) is None


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    Answers(tmp_path).keep({}, 1)
    assert list(tmp_path.iterdir()) == []


def test_several_writers_at_once(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 50_000]
    write_whole(path, texts[0])

    def write(text: str) -> None:
        for _ in range(50):
            write_whole(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


# --- explanation --------------------------------------------------------------------------

EAGER = {"executor": "aot_eager"}
RAN: list[torch.Size] = []


@torch.library.custom_op(
    "fxremat_tests::noted", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noted(x: torch.Tensor) -> torch.Tensor:
    """A copy; says that it ran."""
    RAN.append(x.shape)
    return x.clone()


@noted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Noted(nn.Module):
    """Two layers; the graph ends between them if it is ``broken``."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.broken, self.calls = nn.BatchNorm1d(16), broken, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.first(x))
        with torch.no_grad():
            more = noted(x)
        if self.broken:
            torch._dynamo.graph_break()
        result: torch.Tensor = self.second(x.relu()) + more
        return result.sum()


def test_a_model_that_is_one_graph_does_not_run() -> None:
    RAN.clear()
    model = Noted(broken=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    [graph] = fxremat.explain(model, batch(8, 16), options=EAGER).graphs
    assert graph.predicted_peak_bytes > 0
    assert not RAN
    assert model.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_graph_that_another_follows_runs() -> None:
    RAN.clear()
    model = Noted(broken=True)
    assert len(fxremat.explain(model, batch(8, 16), options=EAGER).graphs) == 2
    assert [tuple(shape) for shape in RAN] == [(8, 16)]
    hooked = Noted(broken=False)
    results: list[torch.Tensor] = []
    hooked.register_forward_hook(lambda module, given, result: results.append(result))
    assert fxremat.explain(hooked, batch(8, 16), options=EAGER).graphs
    assert len(RAN) == 2


def test_a_model_that_was_refused_may_be_freed() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(fxremat.InfeasibleBudget):
        fxremat.explain(model, batch(8, 16), memory_budget="1B", options=EAGER)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
