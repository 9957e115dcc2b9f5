"""Sites of a rule, taken as shipped in the joint graph of a small step, which runs node by node.

A step is traced once. Its joint graph is then run on the very inputs and tangents of that step, as
it was and with each site.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from benchmarks.prepared import prepare
from fxremat.compat.compilers import trace_as_inductor
from fxremat.compat.joint_graph import torch_partition
from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants.chunks.rules import RULES
from fxremat.passes.variants.insertion import Rule, Site, take
from fxremat.runtime import kernels
from fxremat.runtime.chunks.operator import ROWS
from tests.graphs import Observed, train
from tests.variants import assert_alike, sites

Function = Callable[..., Any]


def taken(joint: JointGraph, site: Site) -> JointGraph:
    """The graph with the site, whose stand-ins lie in memory like what they stand for."""
    assert_alike(joint, site)
    return take(joint, [site])


@dataclass
class Traced:
    """A partition function that keeps the joint graph, and what it is given when it runs."""

    joint: JointGraph = field(init=False)
    observed: Observed = field(init=False)
    inputs: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called with each joint graph; of a step with breaks the last is kept."""
        self.inputs = {}
        self.joint = prepare(module, num_fwd_outputs)
        kwargs["num_fwd_outputs"] = num_fwd_outputs
        halves = torch_partition(copy.copy(self.joint.module), joint_inputs, **kwargs)
        for half in halves:
            keep_inputs(half.graph, self.inputs)
        return halves

    def compiled(self, function: Function) -> Function:
        """``function``, run as its joint graph."""

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            return trace_as_inductor(gm, inputs, {}, self)

        torch._dynamo.reset()
        return torch.compile(function, backend=backend)

    def values(self, joint: JointGraph) -> list[Any]:
        """What a graph makes of the step's inputs: see `run_on`."""
        return run_on(joint, self.inputs)


def keep_inputs(graph: fx.Graph, inputs: dict[str, Any]) -> None:
    """Before a half does anything else, it says what it was given."""

    def keep(names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            inputs[name] = value.clone() if isinstance(value, torch.Tensor) else value

    given = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        graph.call_function(keep, ([node.name for node in given], given))


def run_on(joint: JointGraph, inputs: Mapping[str, Any]) -> list[Any]:
    """What a graph makes of the inputs of these names, and what it leaves in those.

    The last is the next random number.
    """
    torch.manual_seed(0)
    names = [node.name for node in joint.module.graph.nodes if node.op == "placeholder"]
    given = [copy.deepcopy(inputs[name].detach()) for name in names]
    with torch.no_grad():
        found = fx.Interpreter(joint.module).run(*given)
    return [*found, *given, torch.rand(1)]


def given_to_rows(joint: JointGraph, inputs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Arguments by position and by name of the calls of ``rows`` in a graph, on these inputs."""
    seen: list[tuple[Any, Any]] = []

    class Given(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.target is ROWS:
                seen.append(self.fetch_args_kwargs_from_env(n))
            return super().run_node(n)

    names = [node.name for node in joint.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        Given(joint.module).run(*[inputs[name] for name in names])
    return seen


def workspace_too_large(*args: Any, measure: Any = kernels.unmeasured, **named: Any) -> int:
    """Bytes that are predicted for a call of ``rows`` and that it does not take."""
    made: int = sum(one.nbytes for one in ROWS(*args, **named))
    peak = measure_peak(lambda: ROWS(*args, **named)).above_start_bytes
    said: int = kernels.WORKSPACES[ROWS](*args, **named, measure=measure)
    return said - (peak - made)


def real(value: Any) -> Any:
    """A tensor of data that every operator takes."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(1)
        return made.uniform_(0.5, 1.5) if value.dtype.is_floating_point else made
    return [real(v) for v in value] if isinstance(value, (list, tuple)) else value


def trace(function: Function, inputs: Sequence[Any]) -> Traced:
    """One step of a function."""
    seen = Traced()
    seen.observed = train(function, inputs, seen.compiled)
    return seen


def in_double(thing: Any) -> Any:
    """Modules and tensors of floats in float64."""
    thing = copy.deepcopy(thing)
    if isinstance(thing, nn.Module):
        return thing.double()
    is_float = isinstance(thing, torch.Tensor) and thing.is_floating_point()
    return thing.detach().double().requires_grad_(thing.requires_grad) if is_float else thing


def _is_double(function: Function, inputs: Sequence[Any]) -> bool:
    """Whether a step is in float64 as it is."""
    state = function.state_dict().values() if isinstance(function, nn.Module) else ()
    tensors = [x for x in (*inputs, *state) if isinstance(x, torch.Tensor)]
    return all(x.dtype == torch.float64 for x in tensors if x.is_floating_point())


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    """Close, relative to the largest entry; infinities and NaN in the same places."""
    assert (one is None) == (other is None)
    if not isinstance(one, torch.Tensor):
        assert one == other
        return
    one, other = one.double(), other.double()
    finite = other.isfinite()
    assert torch.equal(one.isfinite(), finite)
    if finite.any():
        scale = other[finite].abs().max().item()
        error = (one - other)[finite].abs().max().item()
        assert error <= tolerance * max(scale, 1e-6), (error, scale)


def names_of(function: Function, inputs: Sequence[Any], rules: Sequence[Rule] = RULES) -> list[str]:
    """The sites of these rules in the step of a function."""
    joint = trace(function, inputs).joint
    return [site.name for rule in rules for site in sites(rule, joint)]


def _traced_in_double(function: Function, inputs: Sequence[Any], tolerance: float) -> Traced:
    """The step in float64, which computes what eager torch does."""
    function, inputs = in_double(function), [in_double(x) for x in inputs]
    eager, exact = train(function, inputs), trace(function, inputs)
    both = ((*seen.results, *seen.gradients) for seen in (exact.observed, eager))
    for one, other in zip(*both, strict=True):
        assert_close(one, other, tolerance)
    return exact


def check(
    function: Function, inputs: Sequence[Any], rule: Rule, tolerance: float = 2e-5
) -> dict[str, fx.Graph]:
    """Every site of the rule gives the values and gradients of the step; at least one is there.

    Compared with float64 and with the graph as it was. The result is the graph with each site, by
    its name.
    """
    exact = _traced_in_double(function, inputs, tolerance)
    seen = exact if _is_double(function, inputs) else trace(function, inputs)
    best, before = exact.values(exact.joint), seen.values(seen.joint)
    graphs = {}
    for site in sites(rule, seen.joint):
        variant = taken(seen.joint, site)
        graphs[site.name] = variant.module.graph
        for new, old, right in zip(seen.values(variant), before, best, strict=True):
            assert_close(new, old, tolerance)
            assert_close(new, right, tolerance)
    assert graphs
    return graphs
