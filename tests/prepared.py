"""Joint graphs as torch gives them, and passes that prepare them, one of them spoilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.compilers import compile_with_aot_eager, trace_as_inductor
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import PREPARE, Runner
from fxremat.compile.request import GraphInputs, Policy, Request
from fxremat.compile.stage_times import StageTimes
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import JointGraph
from tests.graphs import Net

Spoil = Callable[[fx.Graph], None]


class _Given(Exception):
    """Ends a compilation where a graph would be cut."""


def as_given(model: Callable[..., Any], inputs: Sequence[Any], *, fused: bool = False) -> Draft:
    """The joint graph of a training step, before anything was done to it."""
    found: list[Draft] = []

    def keep(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        found.append(Draft(module, num_fwd_outputs))
        raise _Given

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if fused:
            return trace_as_inductor(gm, inputs, {}, keep)
        return compile_with_aot_eager(gm, inputs, keep)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        try:
            torch.compile(model, backend=backend)(*inputs)
        except Exception:
            if not found:
                raise
    return found[0]


@dataclass(frozen=True)
class _Seen(Pass):
    """Does what a pass does, and then ``see`` what the graph was before and is now."""

    name = "seen"
    right: Pass
    see: Callable[[str, fx.Graph], None]

    def call(self, module: fx.GraphModule) -> Changed:
        """Works in place."""
        before = str(module.graph)
        changed = self.right.call(module)
        self.see(before, module.graph)
        return changed


@dataclass(frozen=True)
class _AroundRunner(Runner):
    """Runs each pass as ``around`` gives it."""

    around: Callable[[Pass], Pass] = lambda one: one

    def run_pass(self, stage: str, one: Pass, module: fx.GraphModule) -> Changed:
        return super().run_pass(stage, self.around(one), module)


def prepare(
    draft: Draft, *, fused: bool, accumulate: bool = False, around: Callable[[Pass], Pass]
) -> JointGraph:
    """Run and verify the stage, each of its passes as ``around`` gives it."""
    request = Request(
        policy=Policy(executor="inductor" if fused else "aot_eager"),
        inputs=GraphInputs(accumulated=tuple(range(100)) if accumulate else ()),
    )
    costs = cost_model(request, draft.module.graph, "test", measured=False)
    return _AroundRunner(costs, StageTimes(), around).run("prepare", PREPARE, draft).joint


def prepared(draft: Draft, *, fused: bool, accumulate: bool = False) -> list[str]:
    """The names of the passes that did something, when all were found right."""
    noted: list[str] = []

    def around(one: Pass) -> Pass:
        return _Seen(one, lambda was, now: noted.extend([one.name] if str(now) != was else []))

    prepare(draft, fused=fused, accumulate=accumulate, around=around)
    return noted


def prepare_wrongly(
    draft: Draft, name: str, spoil: Spoil, *, fused: bool, accumulate: bool = False
) -> None:
    """Run and verify the stage with the pass of this name spoilt."""

    def around(one: Pass) -> Pass:
        return _Seen(one, lambda _, graph: spoil(graph)) if one.name == name else one

    prepare(draft, fused=fused, accumulate=accumulate, around=around)


def twice() -> Net:
    """One layer that is used twice, with as many rows as columns."""
    parts = {name: nn.Linear(8, 8, bias=False) for name in ("linear", "other")}
    return Net(lambda net, x: net.linear(net.other(net.linear(x).sin())).cos().sum(), **parts)
