"""One plan for all ranks of a job: who makes it, who gets it, and what is said where none comes."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.compat.ranks import is_collective, job_store, ranks_together
from fxremat.compile import ranks, session
from fxremat.errors import GraphsDiffer, RankMissing
from fxremat.sizes import MIB
from tests.graphs import Net
from tests.ranks import on_ranks
from tests.small import Stack

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import distributed
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, ROWS = 64, 512
OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "rank_timeout": 20.0}


def step_of(model: nn.Module, budget: int, **more: Any) -> float:
    """The seconds of a step, compiling among them."""
    torch._dynamo.reset()
    options = {**OPTIONS, "memory_budget": budget, **more}
    call = torch.compile(lambda x: model(x).square().mean(), backend="fxremat", options=options)
    begin = time.monotonic()
    call(torch.ones(ROWS, WIDTH)).backward()
    return time.monotonic() - begin


def parallel(*, more: bool = False) -> nn.Module:
    """Two layers that two ranks share; ``more`` makes the graph another one."""
    torch.manual_seed(0)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))

    def forward(net: Any, x: torch.Tensor) -> Any:
        hidden = torch.nn.functional.gelu(net.first(x))
        return net.second(hidden.tanh() if more else hidden)

    model = Net(forward, first=nn.Linear(WIDTH, 4 * WIDTH), second=nn.Linear(4 * WIDTH, WIDTH))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def one_plans(rank: int) -> dict[str, Any]:
    """Steps within several budgets; searches are counted."""
    torch.manual_seed(0)
    model, searches = Stack(width=WIDTH, depth=6), list[int]()
    from fxremat.compile.search.search import Search

    run = Search.run

    def counted(self: Search) -> Any:
        searches.append(rank)
        return run(self)

    Search.run = counted  # type: ignore[method-assign]
    for budget in (4 * MIB, 4 * MIB, 6 * MIB):
        step_of(model, budget)
    plans = [list(map(str, report.plan.steps)) for report in fxremat.reports()]
    refused = None
    try:
        step_of(model, MIB)
    except Exception as error:
        cause: Any = getattr(error, "inner_exception", error)
        refused = cause.minimum_bytes
    distributed.barrier()
    return {"searches": len(searches), "plans": plans, "refused": refused}


@pytest.mark.slow
def test_the_rank_that_asks_first_plans_for_all(tmp_path: Path) -> None:
    """Two budgets, one of them asked for twice, and one that is refused: three searches."""
    first, second = on_ranks(2, tmp_path, one_plans)
    assert first["searches"] + second["searches"] == 3
    assert first["plans"] == second["plans"]
    assert first["plans"]
    assert first["refused"] == second["refused"] > MIB


def other_graph(rank: int, ways: tuple[str, ...]) -> dict[str, Any]:
    said, budgets = [another_plan(rank)], list[int | None]()
    for way in ways:
        model = parallel(more=way == "another" and rank == 1)
        begin = time.monotonic()
        try:
            if way != "none" or rank == 0:
                step_of(model, (1000 - rank) * MIB, rank_timeout=3.0)
                budgets += [report.budget_bytes for report in fxremat.reports()]
            said.append("")
        except Exception as error:
            cause: Any = getattr(error, "inner_exception", error)
            said.append(f"{type(cause).__name__}: {cause}")
        assert time.monotonic() - begin < 30
    return {"said": said, "budgets": budgets, "together": ranks_of_a_collective()}


def another_plan(rank: int) -> str:
    """What is said where each rank has a plan of its own; the same plan is fine."""

    def planned(steps: str) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(steps=tuple(steps)))

    ranks.see_same_plan((0, 1), planned("abc"))
    ranks.see_same_plan((0, 1), None)
    with pytest.raises(GraphsDiffer) as differ:
        ranks.see_same_plan((0, 1), planned("abcb" if rank else "abc"))
    return str(differ.value)


def ranks_of_a_collective() -> list[int]:
    """Those that have to run a graph with a collective of all ranks among its calls."""
    graph = torch.fx.Graph()
    name = distributed.group.WORLD.group_name  # type: ignore[union-attr]
    all_reduce: Any = torch.ops._c10d_functional.all_reduce.default
    graph.output(graph.call_function(all_reduce, (graph.placeholder("x"), "sum", name)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert [is_collective(node) for node in graph.nodes] == [False, True, False]
    return list(ranks_together(gm, [torch.ones(2)]))


@pytest.mark.slow
def test_ranks_that_compile_different_graphs_say_so(tmp_path: Path) -> None:
    """On all of them, in a graph with collectives; and where one of them compiles none."""
    work = partial(other_graph, ways=("same", "another", "none"))
    found = on_ranks(2, tmp_path, work)
    first, second = (each["said"] for each in found)
    assert [each["together"] for each in found] == [[0, 1], [0, 1]]
    assert [each["budgets"][0] for each in found] == [999 * MIB, 999 * MIB]
    for each in (first, second):
        assert each.pop(0).startswith("rank 1 compiles a different plan than rank 0")
    assert first[0] == second[0] == ""
    for each in (first, second):
        assert each[1].startswith("GraphsDiffer: rank 1 compiles a different graph than rank 0")
    assert first[2].startswith(
        "RankMissing: no word of the graph that ranks compile together came from rank 1"
    )
    assert "within 3 s" in first[2]
    assert second[2] == ""


def dying(rank: int) -> list[str]:
    """The rank that plans fails, then is gone; then the store cannot be written."""
    session.STATE.rank_timeout = 2.0
    said = []

    def fail() -> Any:
        raise MemoryError("out of memory")

    def vanish() -> Any:
        raise AssertionError("asked to plan")

    if rank == 0:
        with pytest.raises(MemoryError):
            ranks.shared_answer("plan", "fails", fail)
        job_store().add("claim/gone", 1)
    distributed.barrier()
    if rank == 1:
        for question in ("fails", "gone"):
            with pytest.raises(RankMissing) as missing:
                ranks.shared_answer("plan", question, vanish)
            said.append(str(missing.value))
    distributed.barrier()
    return said


def test_a_rank_that_fails_while_it_plans_is_not_waited_for(tmp_path: Path) -> None:
    _, second = on_ranks(2, tmp_path, dying)
    assert "no plan came from rank 0: MemoryError: out of memory" in second[0]
    assert "no plan came from another rank within 2 s" in second[1]
    assert "rank_timeout" in second[1]


class _Store:
    """One that nobody can reach, or nobody can write to."""

    def __init__(self, *, claims: bool) -> None:
        self.claims = claims

    def add(self, key: str, count: int) -> int:
        if not self.claims:
            raise ConnectionError("broken pipe")
        return count

    def set(self, key: str, value: str) -> None:
        raise OSError("no space left")

    def wait(self, keys: list[str], limit: timedelta) -> None:
        raise RuntimeError("connection reset")


@pytest.mark.parametrize(("claims", "why"), [(True, "no space left"), (False, "broken pipe")])
def test_a_store_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, claims: bool, why: str
) -> None:
    monkeypatch.setattr("fxremat.compile.ranks.is_a_rank", lambda: True)
    monkeypatch.setattr("fxremat.compile.ranks.job_store", lambda: _Store(claims=claims))
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    with pytest.raises(RankMissing, match=f"the store cannot be reached: {why}"):
        ranks.shared_answer("plan", "question", lambda: 1)
    with pytest.raises(RankMissing, match="the store cannot be reached: connection reset"):
        ranks._received(_Store(claims=True), "plan", "answer", None)


def test_a_digest_is_the_same_on_all_devices() -> None:
    def graph(device: str) -> str:
        made = torch.fx.Graph()
        made.output(made.call_function(torch.arange, (5,), {"device": torch.device(device)}))
        return ranks.graph_digest(torch.fx.GraphModule(nn.Module(), made))

    assert graph("cuda:0") == graph("cuda:3") == graph("cuda")
    assert graph("cpu") != graph("cuda")
