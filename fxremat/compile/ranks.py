"""One plan for all ranks of a job that compile the same graph.

Under torch.distributed, the rank that asks first plans a graph; what it has decided goes to the
store that the ranks have met at, under a digest of the graph and of the request. Ranks that come to
the same question later, or meanwhile, take that answer. So no two ranks plan the same graph, and
none has another plan for it. Ranks with other graphs, as the stages of a pipeline, or with other
sizes, plan for themselves. Nobody waits for a rank that has not asked.

Graphs with collectives inside are run by several ranks at the same time. So these ranks are to
compile the same graph, which they tell each other first (`agreed`); the first one's request counts
for all, with the smallest budget and the most that is held of any. A plan may run collectives
again. So when these ranks have compiled they tell each other what (`see_same_plan`): a cache of one
machine may have given it a plan of another job.

A rank that has to wait longer than the option ``rank_timeout`` raises `RankMissing`. A rank that
fails while it plans says so, and all that wait for it raise that.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fxremat.compat.ranks import has_within, is_a_rank, is_collective, job_store
from fxremat.compile import session
from fxremat.compile.request import Request
from fxremat.errors import GraphsDiffer, RankMissing

if TYPE_CHECKING:
    from fxremat.report.report import Report

_met: Counter[tuple[int, ...]] = Counter()
"""How often word was exchanged, by the ranks that run graphs together."""


def shared_answer(what: str, question: str, make: Callable[[], Any]) -> Any:
    """The answer of the rank that asks first, as JSON data.

    ``what`` is looked for, as a noun. Raises `RankMissing` where the other rank gives none.
    """
    if not is_a_rank():
        return make()
    store, rank = job_store(), torch.distributed.get_rank()
    claim, answer = f"claim/{question}", f"answer/{question}"
    if _reached(store.add, what, claim, 1) == 1:
        told: dict[str, Any] = {"rank": rank}
        try:
            told["made"] = make()
        except BaseException as error:
            told["failed"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            _reached(store.set, what, answer, json.dumps(told))
        return told["made"]
    found = _received(store, what, answer, None)
    if "failed" in found:
        raise RankMissing(what, session.STATE.rank_timeout, found["rank"], found["failed"])
    return found["made"]


BESIDE = ("held", "between", "autotune", "coming", "optimizer_step")
"""Fields of a budget of which all ranks take the most that one of them has."""


def agreed(gm: fx.GraphModule, ranks: tuple[int, ...], request: Request) -> Request:
    """The request, as the ``ranks`` that run this graph together have it in common.

    Raises `GraphsDiffer` where they compile different graphs, and `RankMissing` where one of them
    compiles none.
    """
    if not ranks:
        return request
    mine = {
        "graph": [graph_digest(gm), request.inputs.accumulated, request.inputs.parameters],
        "about": f"{len(gm.graph.nodes)} nodes, {len(request.inputs.parameters)} parameters",
        "budget": request.budget.limit,
        "beside": [getattr(request.budget, name) for name in BESIDE],
        "request": pickle.dumps(request).hex(),
    }
    told = _exchanged(ranks, "word of the graph that ranks compile together", mine)
    _see_same(told, "graph")
    budgets = [one["budget"] for one in told.values() if one["budget"] is not None]
    most = map(max, zip(*(one["beside"] for one in told.values()), strict=True))
    first: Request = pickle.loads(bytes.fromhex(told[ranks[0]]["request"]))
    limit = min(budgets, default=None)
    return first.with_budget(limit=limit, **dict(zip(BESIDE, most, strict=True)))


def see_same_plan(ranks: tuple[int, ...], report: Report | None) -> None:
    """Raises `GraphsDiffer` where ``ranks`` that run a graph together have different plans of it.

    The report is that of this rank; None where nothing is planned.
    """
    if ranks:
        steps = None if report is None else list(map(str, report.plan.steps))
        mine = {"plan": session.digest(steps), "about": f"{len(steps or ())} steps"}
        told = _exchanged(ranks, "word of the plan that ranks run together", mine)
        _see_same(told, "plan")


def _exchanged(ranks: tuple[int, ...], what: str, mine: dict[str, Any]) -> dict[int, Any]:
    """What each of the ranks says at the same place in its program, as JSON data."""
    _met[ranks] += 1
    store, rank = job_store(), torch.distributed.get_rank()
    place = f"together/{'-'.join(map(str, ranks))}/{_met[ranks]}"
    _reached(store.set, what, f"{place}/{rank}", json.dumps(mine))
    return {one: _received(store, what, f"{place}/{one}", one) for one in ranks}


def _see_same(told: dict[int, Any], what: Literal["graph", "plan"]) -> None:
    first = next(iter(told))
    others = tuple(one for one, each in told.items() if each[what] != told[first][what])
    if others:
        about = {one: told[one]["about"] for one in (first, *others)}
        raise GraphsDiffer(first, others, about, what)


def graph_digest(gm: fx.GraphModule) -> str:
    """Equal on all ranks for the same graph: whatever device, and group of ranks, is theirs."""
    nodes = [
        (node.op, node.name, _same(str(node.target)), _arguments(node), _described(node))
        for node in gm.graph.nodes
    ]
    return session.digest(nodes)


def _arguments(node: fx.Node) -> str:
    given: Any = node.args, dict(node.kwargs)
    if is_collective(node):  # each rank names groups in its own way
        given = map_aggregate(given, lambda one: "" if isinstance(one, str) else one)
    return _same(repr(given))


def _same(text: str) -> str:
    """Without what differs from process to process: addresses, and numbers of devices."""
    return _OF_THIS_PROCESS.sub("", text)


def _described(node: fx.Node) -> Any:
    leaves = pytree.tree_leaves(node.meta.get("val", node.meta.get("example_value")))
    return [
        (tuple(map(str, x.shape)), tuple(map(str, x.stride())), str(x.dtype), x.device.type)
        for x in leaves
        if isinstance(x, torch.Tensor) and not x.is_sparse
    ]


_OF_THIS_PROCESS = re.compile(r"0x[0-9a-f]+|, index=\d+|(?<=cuda):\d+")


def _reached(ask: Callable[..., Any], what: str, *given: Any) -> Any:
    """What the store answers."""
    try:
        return ask(*given)
    except Exception as error:
        raise RankMissing(what, 0, None, f"the store cannot be reached: {error}") from error


def _received(store: Any, what: str, key: str, rank: int | None) -> Any:
    """What another rank has left there, as JSON data; it may be long in coming."""
    limit, end = session.STATE.rank_timeout, time.monotonic() + session.STATE.rank_timeout
    while not _reached(has_within, what, store, key, min(1.0, max(0.01, end - time.monotonic()))):
        if time.monotonic() >= end:
            raise RankMissing(what, limit, rank)
    return json.loads(_reached(store.get, what, key))
