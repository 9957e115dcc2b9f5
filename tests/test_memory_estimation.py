"""Joint graph to problem: values, bytes, phases, base order, and what is written to memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxremat.core.check import check
from fxremat.core.problem import Op, problem_from_json, problem_to_json, validate
from fxremat.core.timeline import replay
from fxremat.passes import inplace
from fxremat.passes.joint_graph import Role, is_tensor, is_view, root
from fxremat.passes.materialisation import (
    Materialisation,
    _is_put_by,
    is_fusable,
    is_reduction,
    materialise,
    users_through_views,
)
from fxremat.passes.memory_estimation import TANGENTS, _base_order, estimate, nbytes
from tests import nets
from tests.conftest import Golden
from tests.graphs import Capture, Net, batch, capture, linear, mlp, no_workspace
from tests.single_calls import ATEN, X, call, item

FLOAT = 4


def as_text(data: dict[str, Any]) -> str:
    """JSON with one op, and one value, a line."""
    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()
            if key not in ("ops", "values")]  # fmt: skip
    for key in ("values", "ops"):
        rows += [f"{key}:", *(f"  {json.dumps(row)}" for row in data[key])]
    return "\n".join(rows)


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
def test_problem_of_an_mlp(golden: Golden, fused: bool) -> None:
    seen = capture(mlp(), [batch(4, 8)], fused=fused)
    golden(as_text(problem_to_json(replace(seen.problem, copies=None))))


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("name", nets.NAMES)
def test_problems_are_valid(name: str, fused: bool) -> None:
    seen = nets.traced(name, fused)
    problem = validate(seen.problem)
    assert problem_from_json(problem_to_json(problem)) == problem
    verdict = check(problem, problem.base_steps())
    assert verdict.ok, str(verdict)
    assert verdict.peak_bytes == replay(problem, problem.base_steps()).peak_bytes
    values = [value for op in problem.ops for value in op.writes]
    assert len(values) == len(set(values))
    storages = [root(seen.found.node_of[v]) for v in values]
    assert not any(is_view(node) for node in storages)
    assert len(storages) == len(set(storages))  # no storage is counted twice
    phases = [op.phase for op in problem.ops]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    begin = next(op for op in problem.ops if op.phase == "backward")
    assert (begin.name, begin.repeatable) == (TANGENTS, False)


def test_bytes_are_those_of_the_storage() -> None:
    assert nbytes(torch.empty(4, 8)) == 4 * 8 * FLOAT
    assert nbytes(torch.empty(8, 4).t()) == 4 * 8 * FLOAT
    assert nbytes(torch.empty(1).expand(1000)) == FLOAT
    assert nbytes(torch.empty(0, 8)) == 0
    assert nbytes(torch.empty(3, dtype=torch.bool)) == 3
    assert nbytes(torch.empty(3, dtype=torch.int64)) == 24
    assert nbytes(torch.empty(10, 10)[:, :2]) == (9 * 10 + 2) * FLOAT


def test_parameters_and_inputs_are_resident_once() -> None:
    model, inputs = nets.make("tied")
    problem = capture(model, inputs).problem
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    index = inputs[0].numel() * 8
    assert problem.resident_bytes == weights + index


def test_writing_into_an_input_takes_no_new_bytes() -> None:
    model, inputs = nets.make("batch norm")
    seen = capture(model, inputs)
    copies = [op for op in seen.problem.ops if "copy_" in op.name]
    assert len(copies) == 6
    assert all(seen.problem.bytes_of[v] == 0 for op in copies for v in op.writes)
    assert not any(op.repeatable for op in copies)


def test_results_that_nobody_reads_are_there_while_the_call_runs() -> None:
    """topk's indices are saved for the backward; sort's values alone are not, without it."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            order = x.sort(1)[0]
        return net.linear(x) * order  # type: ignore[no-any-return]

    seen = capture(Net(run, linear=linear()), [batch(4, 8)])
    assert seen.problem.op_of["sort"].workspace_bytes == 4 * 8 * 8
    assert all(op.workspace_bytes == 0 for op in seen.problem.ops if op.name != "sort")


def test_lazy_ops_stand_right_before_their_first_reader() -> None:
    waves = Net(lambda n, x: n.b(n.a(x).sin()).sin(), a=linear(), b=linear())
    seen = capture(waves, [batch(4, 8)], fused=False)
    ops = list(seen.problem.ops)
    lazy = [op for op in ops if op.phase == "backward" and op.repeatable]
    assert lazy
    for op in lazy:
        rest = ops[ops.index(op) + 1 :]
        reader = next(i for i, later in enumerate(rest) if set(op.writes) & set(later.reads))
        assert all(later.repeatable for later in rest[:reader])


def test_a_deep_chain_of_lazy_ops() -> None:
    """No recursion: a chain of ops that only the backward needs may be thousands long."""
    count = 3000
    chain = [Op(f"l{i}", (f"v{i - 1}",) if i else (), (f"v{i}",), 0, 0, "backward")
             for i in range(count)]  # fmt: skip
    last = Op("g", (f"v{count - 1}",), ("w",), 0, 0, "backward", repeatable=False)
    order = _base_order({op.name: op for op in (*chain, last)})
    assert [op.name for op in order] == [op.name for op in (*chain, last)]


def test_in_place_pairs_are_of_one_half_and_one_size() -> None:
    for name in ("mlp", "dropout", "batch norm", "attention"):
        seen = nets.traced(name, fused=True)
        for op in seen.problem.ops:
            for read, write in op.inplace:
                assert seen.problem.bytes_of[read] == seen.problem.bytes_of[write]
                halves = {seen.joint.role[seen.node(v)] is Role.FORWARD for v in (read, write)}
                assert len(halves) == 1


def test_what_is_added_to_zeros_takes_their_place() -> None:
    """The gradient of an embedding is there once, not beside the zeros that it began with."""
    words = nn.Embedding(100, 8)
    seen = capture(words, [torch.randint(0, 100, (4,))], fused=True)
    gradient = next(op for op in seen.problem.ops if "index_put" in op.name)
    zeros = next(read for read in gradient.reads if read.startswith("full"))
    assert gradient.inplace == ((zeros, gradient.name),)


def test_what_was_added_into_is_not_written_over() -> None:
    """Inductor has no loop take the place of what a call of it has changed."""

    def add_rows(net: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 8).index_put((index,), net.linear(x), accumulate=True)
        result: torch.Tensor = rows.sin() + net.linear(x).sin()
        return result

    seen = capture(Net(add_rows, linear=linear()), [batch(4, 8), torch.arange(4)], fused=True)
    (loop,) = (op for op in seen.problem.ops if "index_put" in op.reads and op.phase == "forward")
    assert set(loop.reads) == {"index_put", "sin_1"}  # both have the size of what it writes
    assert loop.inplace == (("sin_1", "add"),)


def test_times_come_from_the_timer() -> None:
    asked: list[int] = []

    def timer(nodes: Any, traffic: int) -> float:
        asked.append(traffic)
        return float(traffic)

    joint = capture(mlp(), [batch(4, 8)]).joint
    found = estimate(joint, timer, no_workspace, fused=False, device="cpu", name="")
    assert sum(asked) == found.problem.base_time_us
    gelu = found.problem.op_of["gelu"]
    assert gelu.time_us == 2 * 4 * 8 * FLOAT  # one read, one write


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
def test_an_op_that_reads_what_the_step_overwrites_runs_once(fused: bool) -> None:
    def shift(net: Any, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = net.linear(x) + (net.level + 1.0).exp()
        net.level.copy_(net.level * 0.5)
        return shifted.sin()

    net = Net(shift, linear=nn.Linear(8, 8), level=torch.ones(4, 8))
    seen = capture(net, [batch(4, 8)], fused=fused)
    reading = {
        op.name: op.repeatable
        for op in seen.problem.ops
        for node in (seen.found.slices[op.name].nodes if op.name in seen.found.slices else ())
        if any(root(source) in seen.joint.mutated for source in node.all_input_nodes)
    }
    assert {"add", "mul", "copy_"} <= set(reading)
    assert not any(reading.values())


class _AddedInTheBackward(torch.autograd.Function):
    """A matmul whose gradient is added onto its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = x @ weight
        ctx.save_for_backward(weight, made)
        return made.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight, made = ctx.saved_tensors
        return torch.addmm(made, grads[0], weight.t()), None


def test_a_call_may_write_over_an_operand_of_its_own_half() -> None:
    """What the forward saved is autograd's."""

    def add(net: Any, x: torch.Tensor) -> torch.Tensor:
        function: Any = _AddedInTheBackward
        result: torch.Tensor = function.apply(net.linear(x), net.linear.weight)
        return result

    joint = capture(Net(add, linear=nn.Linear(8, 8)), [batch(4, 8)], fused=True).joint
    calls = [n for n in joint.module.graph.nodes if inplace.operand_of(n) is not None]
    halves = [
        [joint.role[one] is Role.FORWARD for one in (node, inplace.operand_of(node)) if one]
        for node in calls
    ]
    assert [False, True] in halves
    assert all(node not in inplace.overwritable(joint) for node in calls)


# --- materialisation ----------------------------------------------------------------------


def rule(seen: Capture) -> Materialisation:
    return materialise(seen.joint, fused=seen.fused)


def written(seen: Capture) -> list[str]:
    """Names of what is written, in graph order."""
    found = rule(seen).written
    return [n.name for n in seen.joint.module.graph.nodes if n in found]


def test_written_values_of_a_block(golden: Golden) -> None:
    model = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(8), linear(), nn.Softmax(1))
    seen = capture(model, [batch(4, 8)], fused=True)
    found = rule(seen).written
    rows = [("* " if n in found else "  ") + n.name for n in seen.joint.module.graph.nodes]
    golden("\n".join(rows))


CHOICES = {
    # a step: what is written of it, and what is not
    "a chain of loops is one value": (lambda n, x: n.linear(x.sin().cos().tanh()), "tanh", "sin"),
    "of a converted sum what it becomes": (
        lambda n, x: n.linear(x).sum(0, dtype=torch.float64).to(torch.float16),
        "convert_element_type", "sum_1"),
    "a sum that others read too": (
        lambda n, x: (s := n.linear(x).sum(0, dtype=torch.float64)).to(torch.float16) + s.sin(),
        "sum_1", "sin"),
    "a loop read on both sides of a matmul": (lambda n, x: n.linear(y := x.sin()) + y, "sin", ""),
    "a mask that the backward reads": (lambda n, x: F.dropout(n.linear(x)), "gt", "mul"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_which_loops_are_written(name: str) -> None:
    step, yes, no = CHOICES[name]
    found = written(capture(Net(step, linear=linear()), [batch(4, 8)], fused=True))
    assert yes in found
    assert no not in found


@pytest.mark.parametrize(
    ("node", "fusable", "reduction"),
    [
        (call(ATEN.sin.default, X), True, False),
        (call(ATEN.sum.default, X), True, True),
        (call(ATEN.amax.default, X, [1]), True, True),
        (call(ATEN.cat.default, [X, X]), True, False),
        (call(ATEN.where.self, X > 0, X, X), True, False),
        (call(ATEN.clone.default, X), True, False),
        (call(ATEN.mm.default, X, X), False, False),
        (call(ATEN.sort.default, X), False, False),
        (call(ATEN.topk.default, X, 2), False, False),
        (item(call(ATEN.topk.default, X, 2), 0), False, False),
    ],
    ids=lambda value: str(getattr(value, "target", "")),
)
def test_kinds_of_kernels(node: fx.Node, fusable: bool, reduction: bool) -> None:
    assert (is_fusable(node), is_reduction(node)) == (fusable, reduction)


def test_loops_of_the_backward_centre_again_what_a_norm_reads() -> None:
    """A sum over the gradient and the gradient itself, on both sides of nothing but loops."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3))
    seen = capture(model, [batch(2, 2, 8, 8)], fused=True)
    lazy = [n for n in seen.joint.module.graph.nodes if seen.joint.role.get(n) is Role.LAZY]
    centred = [n for n in lazy if n.name.startswith("sub")]
    assert centred
    assert not {n for n in lazy if is_fusable(n) and not is_reduction(n)} & rule(seen).written


def test_dynamic_sizes_leave_no_guards() -> None:
    """Comparing symbolic sizes would make the graph valid for one size alone."""
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    seen = capture(nn.Sequential(linear(), nn.ReLU(), linear()), [x], fused=True)
    symbols = [n for n in seen.joint.primals if isinstance(n.meta["val"], torch.SymInt)]
    env = symbols[0].meta["val"].node.shape_env
    before = len(env.guards)
    rule(seen)
    assert len(env.guards) == before


def reused(*layers: nn.Module, x: torch.Tensor) -> set[str]:
    """What is written although only loops of one group read it."""
    seen = capture(nn.Sequential(*layers), [x], fused=True)
    loops = [n for n in seen.joint.module.graph.nodes if n in rule(seen).written and is_fusable(n)]
    return {
        n.name
        for n in loops
        if seen.joint.role[n] is Role.BACKWARD
        and not is_reduction(n)
        and all(is_fusable(user) for user in users_through_views(n))
    }


def test_a_dear_result_that_two_loops_read_is_written() -> None:
    """The gradient of a group norm needs sums of sums: the loop that ends it comes later."""
    image = batch(2, 8, 4, 4)
    ends = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
    assert len(reused(*ends[:2], nn.SiLU(), ends[2], x=image)) == 1
    assert reused(*ends, x=image) == set()  # the gradient is read as it is


def test_rows_share_a_loop_with_what_follows() -> None:
    """In a layer norm sums are of rows: nothing is written between them and what reads them."""
    assert reused(linear(), nn.LayerNorm(8), nn.SiLU(), linear(), x=batch(4, 8)) == set()
    assert reused(linear(), nn.SiLU(), nn.Softmax(1), linear(), x=batch(4, 8)) == set()


@pytest.mark.parametrize(("mode", "axes"), [("trilinear", 3), ("bicubic", 2)])
def test_neighbours_are_read_and_added_to_in_one_loop(mode: str, axes: int) -> None:
    """Interpolation reads 8 or 16 of them: its result is stored, and what its gradient is of."""
    conv: Any = nn.Conv3d if axes == 3 else nn.Conv2d
    first, last = conv(2, 4, 3, padding=1), conv(4, 2, 3, padding=1)
    model = nn.Sequential(first, nn.Upsample(scale_factor=2, mode=mode), last)
    seen = capture(model, [batch(1, 2, *[4] * axes)], fused=True)
    stored = [n for n in rule(seen).written if is_tensor(n)]
    large = [n for n in stored if n.meta["val"].numel() >= 4 * 8**axes]
    assert len(large) == 2


@pytest.mark.parametrize(
    ("index", "values", "inlined"),
    [
        (torch.zeros(3, dtype=torch.int64), torch.ones(3, 4), True),
        (torch.ones(3, dtype=torch.bool), torch.ones(3, 4), False),
        (torch.ones(3, dtype=torch.uint8), torch.ones(3, 4), False),
        (torch.zeros(3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64), False),
    ],
    ids=["rows", "a mask", "a mask of bytes", "integers"],
)
def test_what_is_put_at_indices_is_computed_there_where_inductor_makes_a_loop(
    index: torch.Tensor, values: torch.Tensor, inlined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fx.Graph()
    made = [graph.placeholder(name) for name in ("place", "index", "values")]
    for node, value in zip(made, (torch.ones_like(values), index, values), strict=True):
        node.meta["val"] = value
    place, at, given = made
    put = graph.call_function(ATEN.index_put.default, (place, [at], given, True))
    put.meta["val"] = values
    assert _is_put_by(put, given) is inlined
    assert not _is_put_by(put, place)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not _is_put_by(put, given)
