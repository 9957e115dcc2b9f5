"""The partitioner that Inductor (or AOTAutograd) calls with the joint graph, and what it does.

Inductor pickles the object into its cache keys and does not call it when a cache answers. So
it is frozen plain data that holds everything a plan depends on, and nothing else.
"""

from __future__ import annotations

import logging
import time
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import CustomPartitionerFn
from fxremat.compat.joint_graph import is_tangent, torch_partition
from fxremat.compat.ranks import is_a_rank
from fxremat.compat.sizes import plan_for_sizes_seen
from fxremat.compat.tensors import SPARSE
from fxremat.compile import session
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import EXPLAIN, FINISH, PREPARE, Runner
from fxremat.compile.ranks import graph_digest, shared_answer
from fxremat.compile.report_builder import large_output, refusal_of, report_of
from fxremat.compile.request import Request
from fxremat.compile.search.candidates import Evaluator
from fxremat.compile.search.known_least import search_with_known_least
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.search import Search, SearchResult, decision_of
from fxremat.compile.search.variant_sets import GraphInVariants
from fxremat.compile.session import Session
from fxremat.compile.stage_times import StageTimes
from fxremat.errors import output_advice
from fxremat.memory.measured_peak import uncollected
from fxremat.passes.halves import Halves
from fxremat.report.files import tell_halves
from fxremat.report.report import describe
from fxremat.version import build

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Joint graph to (forward, backward), planned for ``request``.

    Where only the plan is asked for, they are made ready to run uncompiled.
    """

    request: Request
    plan_only: bool = False

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Halves:
        """Called once per joint graph; raises fxremat's errors as `plan_graph` does."""
        current = session.STATE.current or session.begin()
        if not any(is_tangent(n) for n in gm.graph.nodes):
            return torch_partition(gm, joint_inputs, **kwargs)
        draft = draft_of(gm, joint_inputs, self.plan_only, kwargs)
        return plan_graph(draft, self.request, current)

    def uuid(self) -> str:
        """Everything the partition depends on, as text."""
        return repr((build(), astuple(self.request)))


def draft_of(
    gm: fx.GraphModule, joint_inputs: Any, plan_only: bool, kwargs: dict[str, Any]
) -> Draft:
    """The joint graph as it was handed over; ``kwargs`` are those of torch's own partition."""
    static = tuple(kwargs.get("static_lifetime_input_indices") or ())
    partition = partial(torch_partition, joint_inputs=joint_inputs, **kwargs)
    return Draft(gm, kwargs["num_fwd_outputs"], static, partition, plan_only)


@uncollected()  # a graph that is compiled lives on: there is little to collect
def plan_graph(draft: Draft, request: Request, current: Session) -> Halves:
    """The halves of the best candidate; its report goes to the session.

    Where only the plan is asked for, they are made ready to run uncompiled. Raises
    `InfeasibleBudget` where not even the candidate of least peak fits the budget, and
    `VerificationFailed` where a step of ours is wrong.
    """
    times = StageTimes({"trace": time.perf_counter() - current.started})
    if request.budget.limit is not None and (sparse := _sparse(draft.module.graph)):
        log.warning("fxremat: graph %d: %s is sparse: its bytes are not known, and nothing of the "
                    "graph is planned. Have dense gradients, as Embedding(sparse=False) has, for "
                    "the budget to hold.", current.graph, sparse)  # fmt: skip
        request = request.with_budget(limit=None)
    if request.budget.limit is not None:
        plan_for_sizes_seen(draft.module.graph)
    costs = cost_model(request, draft.module.graph, f"graph {current.graph}")
    runner = Runner(costs, times)
    prepared = runner.run("prepare", PREPARE, draft)
    evaluator, graphs = Evaluator(runner), GraphInVariants(runner, prepared)
    found = _searched(Search(Planning(request, times), evaluator, graphs))
    refusal = refusal_of(found, request)
    if refusal is None and not draft.plan_only:
        if found.evaluation.dry_run is not None:
            found.evaluation.dry_run.hand_over()
        runner.run("kernels", FINISH, found.evaluation.draft)
    current.report = report_of(found, request, current.graph, times.seconds)
    if refusal is not None:
        raise refusal
    output = large_output(found)
    if output is not None and request.budget.limit is not None:
        log.warning("fxremat: graph %d: %s", current.graph, output_advice(*output))
    if session.STATE.study is not None:
        session.STATE.study(found, runner)
    halves = found.evaluation.draft.halves
    if draft.plan_only:
        runner.run("apply", EXPLAIN, found.evaluation.draft)
    else:
        tell_halves(current.graph, halves)
    return halves


def _sparse(graph: fx.Graph) -> str:
    """A value without a storage of its own, by its module; "" without any."""
    values = ((node, node.meta.get("val")) for node in graph.nodes)
    found = (n for n, x in values if isinstance(x, torch.Tensor) and x.layout in SPARSE)
    return next(map(describe, found), "")


def _searched(search: Search) -> SearchResult:
    """What this rank's search ends with, or that of a rank that has looked for the same."""
    request = search.planning.request
    if request.budget.limit is None:
        return search.run()
    if not is_a_rank():
        return search_with_known_least(search)
    own: list[SearchResult] = []

    def decide() -> Any:
        own.append(search.run())
        return decision_of(own[0])

    graph = graph_digest(search.graphs.prepared.module)
    question = session.digest("plan", build(), graph, astuple(request))
    decision = shared_answer("plan", question, decide)
    return own[0] if own else search.taken(decision)
