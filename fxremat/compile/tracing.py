"""The problem of a training step, found without compiling it and without running it.

The step is traced just as the backend would trace it, and given up where the backend would plan.
The tensors may be fake, so that a model takes no memory; the times may be those of a device that
is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxremat.compat.compilers import compile_with_aot_eager, trace_as_inductor
from fxremat.compat.dynamo import fresh_dynamo_caches
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import PLAN, PREPARE, Runner
from fxremat.compile.request import Policy, Request
from fxremat.compile.search.variant_sets import variant_set
from fxremat.compile.stage_times import StageTimes
from fxremat.cost.device import DeviceSpec
from fxremat.errors import FxrematError, NotTraceable
from fxremat.passes.joint_graph import root
from fxremat.passes.memory_estimation import Estimate
from fxremat.passes.variants.insertion import Rule
from fxremat.runtime.grouped_products import trace_experts


@dataclass(frozen=True)
class TracedStep:
    """The problem of a step, and the tensors that its graph takes, in the graph's order."""

    found: Estimate
    inputs: Sequence[Any]

    def weights(self, parameters: dict[str, nn.Parameter]) -> dict[str, tuple[str, str | None]]:
        """Of each named parameter that the graph reads: its value, and that of its gradient."""
        joint = self.found.joint
        gradients = joint.results[joint.num_forward_outputs :]
        known = self.found.problem.bytes_of.keys()
        names = {id(parameter): name for name, parameter in parameters.items()}
        found: dict[str, tuple[str, str | None]] = {}
        for node, result, given in zip(joint.primals, gradients, self.inputs, strict=False):
            name = names.get(id(given))
            if name is not None:
                value = root(result).name if isinstance(result, fx.Node) else None
                found[name] = node.name, value if value in known else None
        return found


class Ended(Exception):
    """Ends a compilation as soon as what is wanted of it is known: the ``result``."""

    is_no_fault = True

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


def compile_until_ended(
    name: str,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None = None,
) -> Any:
    """Compile ``model(*inputs)`` with its loss until the ``backend`` raises `Ended`: its result.

    Raises `NotTraceable` where that never happens, and what the backend raises of our own errors.
    """
    trace_experts()
    try:
        with fresh_dynamo_caches():
            step = torch.compile(WithLoss(model), backend=backend, fullgraph=True, dynamic=dynamic)
            step(*inputs)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, Ended):
            return inner.result
        if isinstance(inner, FxrematError):
            raise inner from None
        raise NotTraceable(name, f"cannot be traced as one graph: {error}") from error
    raise NotTraceable(name, "nothing in the model needs a gradient, so there is no backward")


class WithLoss(nn.Module):
    """A module whose result is one number to go backward from: its ``loss``, where it has one."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> torch.Tensor:
        result = self.model(*inputs)
        loss = getattr(result, "loss", None)
        leaves = pytree.tree_leaves(result if loss is None else loss)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        sums = [x.sum() if x.dim() else x for x in tensors]
        return sum(sums[1:], sums[0]) if sums else torch.zeros(())


def trace_step(
    name: str,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    mode: str = "inductor",
    workspaces: bool = False,
    spec: DeviceSpec | None = None,
    rules: Sequence[Rule] = (),
) -> TracedStep:
    """Trace ``model(*inputs)``, summed up to one number, and its backward.

    ``mode`` is what would run the graphs; ``workspaces`` are measured by running each distinct
    library call, on real memory; times are those of ``spec``, by default of the device here.
    The problem has the variants of ``rules`` to choose from. Raises `NotTraceable`.
    """

    request = Request(policy=Policy(executor=mode))

    def offered(module: fx.GraphModule, num_fwd_outputs: int) -> Estimate:
        """What the backend would plan, with all that the rules offer."""
        costs = cost_model(request, module.graph, name, measured=workspaces, spec=spec)
        runner = Runner(costs, StageTimes())
        prepared = runner.run("prepare", PREPARE, Draft(module, num_fwd_outputs))
        variants = variant_set(prepared, rules, costs)
        found = runner.run("estimate", PLAN, prepared) if variants is None else variants
        return found.estimate

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def partition(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            found = offered(module, kwargs["num_fwd_outputs"])
            raise Ended(TracedStep(found, example_inputs))

        if mode == "aot_eager":
            return compile_with_aot_eager(gm, example_inputs, partition)
        return trace_as_inductor(gm, example_inputs, {}, partition)

    step: TracedStep = compile_until_ended(name, model, inputs, backend, dynamic=False)
    return step
