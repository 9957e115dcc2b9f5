"""Joint graphs of small models, planned by hand or at random, and run without Inductor.

`capture` traces a training step and gives its joint graph, its problem and what a plan made of
it. `train` runs a step and gives everything that can be observed of it, bit by bit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.prepared import prepare
from fxremat.compat.compilers import compile_with_aot_eager, trace_as_inductor
from fxremat.compat.joint_graph import extract_forward_backward
from fxremat.core.check import check
from fxremat.core.problem import Copies, Problem
from fxremat.core.schedule import Step
from fxremat.passes.halves import Rewritten, original
from fxremat.passes.inplace import INTO
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import TANGENTS, Estimate, estimate
from fxremat.passes.offload import MOVED
from fxremat.passes.recompute import apply_plan
from fxremat.planner.moves.offload import movable
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.verify.data_flow import check_data_flow, check_split, check_waits

Steps = tuple[Step, ...]
COPIES = Copies(to_host=1.0, to_device=1.0)
Choose = Callable[[Problem], Steps]
Function = Callable[..., Any]


def unit_time(nodes: tuple[fx.Node, ...], traffic: int) -> float:
    """Every op takes one microsecond."""
    return 1.0


def no_workspace(node: fx.Node) -> int:
    """No call needs scratch memory."""
    return 0


def store_all(problem: Problem) -> Steps:
    """Nothing runs again."""
    return problem.base_steps()


def again_after_tangents(*names: str) -> Choose:
    """The named ops run again, in this order, right when the backward begins."""

    def choose(problem: Problem) -> Steps:
        steps = list(problem.base_steps())
        here = steps.index(TANGENTS) + 1
        return tuple(steps[:here] + list(names) + steps[here:])

    return choose


def everything_again(problem: Problem) -> Steps:
    """All repeatable ops of the forward run again before each op of the backward."""
    forward = [op.name for op in problem.ops if op.repeatable and op.phase == "forward"]
    steps: list[str] = []
    for name in problem.base_steps():
        late = problem.op_of[name].phase == "backward" and name != TANGENTS
        steps += [*forward, name] if late else [name]
    return without_dead_runs(problem, steps)


def at_random(seed: int, repeats: int = 12) -> Callable[[Problem], tuple[str, ...]]:
    """Repeatable ops run again at random places, after the first time they ran."""

    def choose(problem: Problem) -> tuple[str, ...]:
        dice = random.Random(seed)
        names = [op.name for op in problem.ops if op.repeatable]
        steps = list(problem.base_steps())
        for _ in range(repeats if names else 0):
            name = dice.choice(names)
            earliest = max(steps.index(name), steps.index(TANGENTS)) + 1
            steps.insert(dice.randint(earliest, len(steps)), name)
        return without_dead_runs(problem, steps)

    return choose


def moved_at_random(seed: int, repeats: int = 12) -> Choose:
    """The same, but half of what may move comes back from the host, before a few of its readers."""

    def choose(problem: Problem) -> Steps:
        dice = random.Random(seed)
        moved = {name for name in movable(problem) if dice.random() < 0.5}
        may = {v for name in moved for v in problem.op_of[name].writes}
        steps = at_random(seed, repeats)(problem)
        once = [n for i, n in enumerate(steps) if n not in moved or n not in steps[:i]]
        items: list[Item] = []
        there: set[str] = set()
        for name in without_dead_runs(problem, once):
            op = problem.op_of[name]
            items += [Fetch(v) for v in op.reads if v in may & there and dice.random() < 0.4]
            items.append(name)
            there |= {*op.writes}
        return place(problem, items, dice.choice((0, None))).steps

    return choose


def without_dead_runs(problem: Problem, steps: Sequence[str]) -> tuple[str, ...]:
    """The steps less the repeats that nobody reads: torch drops such nodes as dead code.

    Values that are results of the graph are there anyway, and are not written again.
    """
    wanted, left = set[str](), list[str]()
    for index, name in reversed([*enumerate(steps)]):
        op = problem.op_of[name]
        is_read = wanted.intersection(op.writes) and not {*problem.outputs} & {*op.writes}
        if is_read or name not in steps[:index]:
            wanted = (wanted - {*op.writes}) | {*op.reads}
            left.append(name)
    return tuple(reversed(left))


def check_names(joint: fx.Graph, rewritten: fx.Graph) -> None:
    """Each copy is named after the node that it is a copy of, and no other node has that name."""
    of_name = {node.name: node for node in joint.nodes}
    for node in rewritten.nodes:
        if node.op != "output" and not any(mark in node.name for mark in (MOVED, INTO)):
            assert node.meta.get("val") is of_name[original(node.name)].meta.get("val"), node.name


@dataclass
class Capture:
    """A partition function that plans with ``choose``, checks, and keeps what it saw."""

    choose: Choose = store_all
    fused: bool = False
    workspace: Callable[[fx.Node], int] = no_workspace
    joint_text: str = ""
    joint: JointGraph = field(init=False)
    found: Estimate = field(init=False)
    steps: Steps = ()
    rewritten: Rewritten = field(init=False)
    forward: fx.GraphModule = field(init=False)
    backward: fx.GraphModule = field(init=False)

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called by AOTAutograd with the joint graph."""
        self.joint_text = str(module.graph)
        self.joint = prepare(module, num_fwd_outputs)
        self.found = estimate(
            self.joint, unit_time, self.workspace, fused=self.fused, device="cpu", name="test"
        )
        self.found = replace(self.found, problem=replace(self.found.problem, copies=COPIES))
        self.steps = self.choose(self.found.problem)
        verdict = check(self.found.problem, self.steps)
        assert verdict.ok, str(verdict)
        self.rewritten = apply_plan(self.found, self.steps)
        self.rewritten.module.graph.lint()
        check_names(self.joint.module.graph, self.rewritten.module.graph)
        mutated = [n.name for n in self.joint.mutated]
        check_data_flow(self.joint.module.graph, self.rewritten.module.graph, mutated)
        check_waits(self.rewritten.module.graph)
        self.forward, self.backward = extract_forward_backward(
            self.rewritten.module,
            list(self.rewritten.saved),
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=(),
        )
        saved = [n.name for n in self.rewritten.saved]
        check_split(self.backward.graph, saved, self.forward.graph)
        return with_seeds(self.forward), with_seeds(self.backward)

    @property
    def problem(self) -> Problem:
        return self.found.problem

    def node(self, name: str) -> fx.Node:
        """The node of the joint graph with this name."""
        nodes: dict[str, fx.Node] = {n.name: n for n in self.joint.module.graph.nodes}
        return nodes[name]

    def calls(self, target: Any) -> list[fx.Node]:
        """Nodes of the joint graph that call an overload, or any overload of a packet."""
        return calls(self.joint.module.graph, target)


def _random_from_seed(size: Sequence[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    draw = torch.randn if mode == "randn" else torch.rand
    return draw(list(size), generator=generator)


def with_seeds(module: fx.GraphModule) -> fx.GraphModule:
    """Inductor's random numbers follow from their seed; torch's eager stand-in ignores it."""
    for node in calls(module.graph, torch.ops.prims.inductor_random):
        node.target = _random_from_seed
    module.recompile()
    return module


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """Nodes that call an overload, or any overload of a packet."""
    return [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and target in (n.target, getattr(n.target, "overloadpacket", None))
    ]


def compiled(function: Function, capture: Capture | str, **options: Any) -> Function:
    """``function`` compiled with ``capture`` as its partition; the graphs run node by node.

    A fused capture sees the graph as Inductor would give it; it too runs node by node.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        assert isinstance(capture, Capture)
        if capture.fused:
            return trace_as_inductor(gm, inputs, {}, capture)
        return compile_with_aot_eager(gm, inputs, capture)

    torch._dynamo.reset()
    chosen = capture if isinstance(capture, str) else backend
    return torch.compile(function, backend=chosen, **options)


@dataclass(frozen=True)
class Observed:
    """What can be observed of a training step: results, gradients, the module's new content."""

    results: tuple[Any, ...]
    gradients: tuple[torch.Tensor | None, ...]
    state: tuple[torch.Tensor, ...]
    random: torch.Tensor


def _leaves(thing: Any) -> tuple[Any, ...]:
    return tuple(torch.utils._pytree.tree_leaves(thing))


def loss_of(results: Any) -> torch.Tensor:
    """Every differentiable result, weighted differently, added up."""
    parts = [r for r in _leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
    return sum((p.double() * (i + 1)).sum() for i, p in enumerate(parts))  # type: ignore[return-value]


def train(function: Function, inputs: Sequence[Any], wrap: Function | None = None) -> Observed:
    """One step of ``function`` on copies of it and of the inputs; ``wrap`` compiles the copy."""
    function, inputs = copy.deepcopy((function, tuple(inputs)))
    run = function if wrap is None else wrap(function)
    torch.manual_seed(0)
    results = run(*inputs)
    loss_of(results).backward()  # type: ignore[no-untyped-call]
    module = function if isinstance(function, nn.Module) else nn.Module()
    wanted = [*module.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
    return Observed(
        results=tuple(r.detach() if isinstance(r, torch.Tensor) else r for r in _leaves(results)),
        gradients=tuple(w.grad for w in wanted if w.requires_grad),
        state=tuple(x.detach() for x in (*module.state_dict().values(), *inputs)
                    if isinstance(x, torch.Tensor)),
        random=torch.rand(1),
    )  # fmt: skip


def is_same(one: Any, other: Any) -> bool:
    """Equal bit by bit, NaN included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        pairs = [(f(one), f(other)) for f in (torch.nan_to_num, torch.isnan)]
        return one.dtype == other.dtype and all(torch.equal(*pair) for pair in pairs)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def assert_same(one: Observed, other: Observed) -> None:
    """Two steps did the same, bit by bit."""
    for name in ("results", "gradients", "state", "random"):
        assert is_same(getattr(one, name), getattr(other, name)), name


def capture(
    function: Function, inputs: Sequence[Any], choose: Choose = store_all, *, fused: bool = False,
    **options: Any,
) -> Capture:  # fmt: skip
    """Trace a training step of ``function``, apply the plan of ``choose``, and run it once."""
    seen = Capture(choose, fused)
    train(function, inputs, lambda f: compiled(f, seen, **options))
    return seen


def joint_of_model(model: nn.Module, x: torch.Tensor, fused: bool = False) -> JointGraph:
    """The joint graph of a model whose only input has a gradient, too."""
    return capture(model, (x.requires_grad_(),), fused=fused).joint


def run_joint(joint: JointGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a joint graph gives."""
    found = fx.Interpreter(joint.module).run(*inputs)
    return [each for each in found if isinstance(each, torch.Tensor)]


def assert_plan_changes_nothing(
    function: Function, inputs: Sequence[Any], choose: Choose = everything_again,
    *, fused: bool = False, reference: str | None = None, **options: Any,
) -> Capture:  # fmt: skip
    """The step under the plan equals that of eager torch, bit by bit.

    Inductor's decompositions round differently, so a fused graph is compared with itself under
    the plan that keeps everything. (torch's own partition is no judge: with ``aot_eager`` of
    torch 2.13, what is computed from an input that the step overwrites is computed again in the
    backward from the new content.)
    """
    seen = Capture(choose, fused)
    judge = Capture(fused=True) if fused else reference
    wrap = None if judge is None else lambda f: compiled(f, judge, **options)
    expected = train(function, inputs, wrap)
    assert_same(train(function, inputs, lambda f: compiled(f, seen, **options)), expected)
    return seen


def mlp(width: int = 8, layers: int = 2, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with an activation after each; fixed weights."""
    torch.manual_seed(1)
    parts = [(nn.Linear(width, width), activation()) for _ in range(layers)]
    return nn.Sequential(*(module for pair in parts for module in pair))


def batch(*shape: int) -> torch.Tensor:
    """A fixed random tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def linear(width: int = 8) -> nn.Linear:
    """A square linear layer with fixed weights."""
    torch.manual_seed(1)
    return nn.Linear(width, width)


def replaced(node: fx.Node, by: Any) -> None:
    """Whoever reads the node reads another one instead, and it is gone."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def copied(node: fx.Node) -> fx.Node:
    """The same call once more, behind it."""
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


def results_of(graph: fx.Graph) -> list[Any]:
    """What the graph returns, to be changed and set again."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


class Net(nn.Module):
    """A module whose forward is a function of it and the inputs."""

    def __init__(self, function: Function, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        """Whatever the function says."""
        return self.function(self, *inputs)


def on_cuda(joint: JointGraph) -> JointGraph:
    """The same graph with fake tensors of a GPU, which need none."""
    device = torch.device("cuda:0")
    for node in joint.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            node.meta["val"] = FakeTensor(value.fake_mode, meta, device)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    return joint
