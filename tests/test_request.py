"""What is asked of a graph: its budget, and the bytes that lie beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.compat.tensors import without_memory
from fxremat.compile import request
from fxremat.cost.cuda_scratch import allocate_cublas
from fxremat.memory import optimizers
from fxremat.options import Options, parse_options
from fxremat.runtime.host_memory import is_on
from fxremat.sizes import GIB, MIB

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


def budget() -> int:
    found = request._budget(options(), GPU, None)
    assert found is not None
    return found


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
    assert least <= budget() <= most


def test_nearly_equal_free_sizes_give_equal_budgets(card: Card) -> None:
    card(free=70 * GIB)
    first = budget()
    card(free=70 * GIB + 3 * MIB)
    assert budget() == first


def test_a_budget_that_was_asked_for_is_taken(card: Card) -> None:
    assert request._budget(options(memory_budget="8GiB"), GPU, None) == 8 * GIB
    assert request._budget(options(), torch.device("cpu"), None) is None


def test_of_a_slice_the_rest_is_held(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph counts the slice alone; what overlaps does not count twice."""
    whole = torch.zeros(1024)
    card(allocated=4096)
    here = torch.device("cpu")
    assert request.unseen_bytes([whole], here) == 0
    assert request.unseen_bytes([whole[:256]], here) == 3072
    assert request.unseen_bytes([whole[:256], whole[256:512]], here) == 2048
    assert request.unseen_bytes([whole, whole[:512]], here) == 0


def test_on_cuda_what_is_allocated_is_what_others_hold(card: Card) -> None:
    """Other graphs, too."""
    card(allocated=100 * MIB)
    assert request._held_bytes(GPU, [], None, 40 * MIB) == 100 * MIB
    assert request._held_bytes(torch.device("cpu"), [], None, 40 * MIB) == 40 * MIB


def asked(inputs: list[Any], around: int = 0, **given: Any) -> request.Budget:
    """The budget of a graph with these inputs."""
    return request.request_for(inputs, options(**given), around).budget


def test_a_reserve_adds_to_all_that_is_counted_without_it(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA what is allocated and what tuning takes; on the CPU what lies around."""
    here = [torch.empty(8)]
    assert (asked(here, 100).held, asked(here, 100, reserve=7).held) == (100, 107)
    card(allocated=100 * MIB)
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    allocated: dict[str, Any] = {"count": "allocated"}
    without, given = asked(here, **allocated), asked(here, reserve=7, **allocated)
    assert (without.held, without.autotune, without.coming) == (100 * MIB, CACHE, 0)
    assert (given.held, given.autotune, given.coming) == (100 * MIB + 7, CACHE, 7)
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
    monkeypatch.setattr(optimizers, "_states_there", lambda optimizer, device: {0: 1024})
    assert asked([weight]).coming == 2 * 1024 - 512
    assert optimizer.param_groups


def test_kernels_are_tuned_only_where_there_are_some(card: Card) -> None:
    """In the first step, beside all that is there."""
    eager = options(executor="aot_eager")
    card(allocated=100)
    assert request._size_of_tuning(eager, GPU, None) == 0
    assert request._size_of_tuning(options(), torch.device("cpu"), None) == 0
    assert request._size_of_tuning(options(), GPU, None) == CACHE


def test_workspaces_of_cublas_are_allocated_before_bytes_are_counted(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(allocated=100)
    monkeypatch.setattr(request, "allocate_cublas", lambda device: card(allocated=5 * MIB))
    weight = torch.empty(8, device="meta")
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    asked = request.request_for([weight], options(count="allocated"))
    assert asked.budget.held == 6 * MIB
    asked = request.request_for([weight], options())
    assert asked.budget.held == (6 + 2) * MIB  # with a segment of small blocks for tuning


@pytest.mark.parametrize(("count", "tuned"), [("allocated", 0), ("reserved", 2 * MIB)])
def test_a_few_bytes_more_that_no_graph_sees_ask_for_no_other_plan(
    card: Card, monkeypatch: pytest.MonkeyPatch, count: str, tuned: int
) -> None:
    """As a metric that is kept from one run to the next; the next larger step counts in full."""
    monkeypatch.setattr(request, "device_of_inputs", lambda inputs: GPU)
    held = []
    for allocated in (64 * MIB + 1, 64 * MIB + 5000, 66 * MIB, 66 * MIB + 1):
        card(allocated=allocated)
        held.append(asked([], count=count).held - tuned)
    assert held == [66 * MIB, 66 * MIB, 66 * MIB, 68 * MIB]


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
