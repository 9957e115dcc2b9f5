"""Applying a site of an operator variant to a joint graph, and comparing what both compute.

`with_site` takes sites as the pipeline does. `results` runs a joint graph on real inputs. `Taken`
does the same on the way through Inductor, and says how many bytes the forward saves before and
after.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from benchmarks.prepared import prepare
from fxremat.compat.joint_graph import copy_module, extract_forward_backward, module_of
from fxremat.compile.verification import taken_variant
from fxremat.passes.joint_graph import JointGraph, Role, is_tensor, root
from fxremat.passes.nodes import adder, fake
from fxremat.passes.variants import saved_values
from fxremat.passes.variants.insertion import Rule, Site, Target, take, take_with_inserted
from fxremat.passes.variants.table import RULES
from fxremat.verify.taken_variants import check_variants
from tests.compat_graphs import inductor_by
from tests.graphs import capture, with_seeds

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LOSSY = frozenset(rule.name for rule in RULES if rule.lossy)


@contextlib.contextmanager
def small_values(elements: int = 1) -> Iterator[None]:
    """Inside, also small values are offered in other forms."""
    with mock.patch.object(saved_values, "LEAST_ELEMENTS", elements):
        yield


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random input that wants a gradient."""
    return torch.randn(*shape).to(dtype).requires_grad_()


def joint_of(function: Callable[..., Any], inputs: Sequence[Any], fused: bool = True) -> JointGraph:
    """The joint graph of a training step, as Inductor would get it."""
    return capture(function, inputs, fused=fused).joint


def sites(rule: Rule, joint: JointGraph) -> list[Site]:
    """The sites of a rule, with names that are distinct."""
    found = list(rule.find(joint))
    assert len({s.name for s in found}) == len(found)
    assert all(s.rule == rule.name for s in found)
    return found


def found(
    rule: Rule, function: Callable[..., Any], *inputs: torch.Tensor, fused: bool = True
) -> tuple[JointGraph, list[Site]]:
    """The joint graph of a step, and the sites of a rule, small ones included."""
    with small_values():
        joint = joint_of(function, inputs, fused)
        return joint, sites(rule, joint)


def in_order(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """A random tensor whose dimensions lie in memory in this order."""
    order = [d for d in order if d < len(shape)]
    x = torch.rand([shape[d] for d in order])
    return x.permute([order.index(d) for d in range(len(order))])


def calls(x: torch.Tensor, make: Callable[[Callable[..., fx.Node], fx.Node], Any]) -> Any:
    """What the calls that ``make`` adds behind ``x`` give."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    graph.output(make(adder(graph, given), given))
    return fx.Interpreter(module_of(nn.Module(), graph)).run(x)


def assert_alike(joint: JointGraph, site: Site) -> None:
    """The stand-ins of a site lie in memory like what they stand for."""
    where: dict[fx.Node, fx.Node] = {}
    stand_ins = site.insert(Target(copy_module(joint.module, where).graph, where))
    assert stand_ins
    for old, new in stand_ins.items():
        assert form(fake(old)) == form(fake(new))


def form(one: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in memory; a dimension of one element may have any stride."""
    strides = [step for step, size in zip(one.stride(), one.shape, strict=True) if size > 1]
    return one.shape, strides if one.numel() else [], one.dtype, one.device


def with_site(joint: JointGraph, *chosen: Site) -> fx.GraphModule:
    """A copy of the joint graph in these variants, each of which is read."""
    for site in chosen:
        assert_alike(joint, site)
    module = take(joint, chosen).module
    for site in chosen:
        begin = re.sub("[^0-9a-zA-Z]+", "_", site.name)
        assert any(n.name.startswith(begin) for n in module.graph.nodes), f"{site.name} is not read"
    return module


def verify(joint: JointGraph, *chosen: Site, lossy: Container[str] = LOSSY) -> None:
    """Take sites, and have the verifier compare the graphs before and after."""
    after, inserted = take_with_inserted(joint, chosen)
    check_variants(
        joint.module.graph,
        after.module.graph,
        [taken_variant(form, lossy=form.rule in lossy) for form in inserted],
        num_forward_outputs=joint.num_forward_outputs,
    )


def real_inputs(joint: JointGraph, seed: int = 0) -> list[torch.Tensor]:
    """Random tensors for the inputs of a joint graph."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            value = fake(node)
            assert value.is_floating_point() or value.numel() == 1, f"{node} is no float"
            data = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(data)
            made.append(data)
    return made


def results(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What a joint graph returns; random numbers are the same in each call."""
    torch.manual_seed(0)
    run = fx.Interpreter(with_seeds(copy_module(module))).run
    return list(run(*[i.clone() for i in inputs]))


def compare(joint: JointGraph, *chosen: Site, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Results without and with sites."""
    inputs = real_inputs(joint, seed)
    return results(joint.module, inputs), results(with_site(joint, *chosen), inputs)


def stand_ins_of(joint: JointGraph, site: Site) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Old values and their stand-ins, in pairs."""
    where: dict[fx.Node, fx.Node] = {}
    module = copy_module(joint.module, where)
    pairs = site.insert(Target(module.graph, where)).items()
    results_of = tuple(node for old, new in pairs for node in (where[old], new))
    module.graph.output_node().args = (results_of,)
    found = results(module, real_inputs(joint))
    return list(zip(found[::2], found[1::2], strict=True))


def assert_exact(joint: JointGraph, *chosen: Site) -> None:
    """Same results bit by bit."""
    expected, found = compare(joint, *chosen)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype


def gradients(joint: JointGraph, all_results: Sequence[Any]) -> list[torch.Tensor]:
    late = all_results[joint.num_forward_outputs :]
    return [g for g in late if isinstance(g, torch.Tensor)]


def shown(joint: JointGraph, *chosen: Site) -> str:
    """The graph before and after, for golden texts."""
    return f"before\n{joint.module.graph}\n\nafter\n{with_site(joint, *chosen).graph}"


def crossing(joint: JointGraph) -> list[fx.Node]:
    """What the forward has to save for the backward, where that computes the lazy nodes."""
    nodes = joint.module.graph.nodes
    ends = ("output", "placeholder")
    late = {n for n in nodes if n.op not in ends and joint.role[n] is not Role.FORWARD}
    late = {n for n in late if not saved_values.made_in_forward(joint, n)}
    early = [n for n in nodes if n not in late and n.op != "output" and n not in joint.tangents]
    return [n for n in early if not late.isdisjoint(n.users)]


def saved_bytes(joint: JointGraph) -> int:
    """Bytes of what the forward saves, each storage once; inputs of the graph are there anyway."""
    roots = {root(n) for n in crossing(joint) if is_tensor(n)}
    return sum(fake(n).numel() * fake(n).dtype.itemsize for n in roots if n.op != "placeholder")


@dataclass
class Taken:
    """A partition function that takes the sites that ``choose`` picks, and keeps what it saw."""

    rule: Rule
    choose: Callable[[list[Site]], list[Site]]
    bytes_before: int = 0
    bytes_after: int = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called by AOTAutograd with the joint graph."""
        count = kwargs["num_fwd_outputs"]
        before = prepare(gm, count)
        after = take(before, self.choose(sites(self.rule, before)))
        self.bytes_before, self.bytes_after = saved_bytes(before), saved_bytes(after)
        return extract_forward_backward(
            after.module, crossing(after), num_fwd_outputs=count, static_inputs=()
        )


def inductor_with(function: Callable[..., Any], taken: Taken) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=inductor_by(taken, force_disable_caches=True))
