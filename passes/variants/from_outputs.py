"""Values of the backward that are rebuilt from the output of an op instead of its input.

The next product often keeps the output y of a norm or an activation. Then its input x need not be
kept as well.

    x ── sub m ── mul r ── y ── mm                              forward
    y ── div r ── add m ── x' ── ...                            backward, in place of x

**Norms** (`norm_from_output`): y = (x - m) * r gives x = y / r + m up to rounding, where r is the
result of a `rsqrt`. With a scale and a shift (`scaled_norm_from_output`) x - m is (y - b) / g / r.
Where g is near zero rounding grows by 1 / g, so that row is lossy. Where a leaky ReLU follows, y is
rebuilt from what comes out of it (In-Place Activated BatchNorm, Rota Bulò et al. 2018).

**Activations** (`activation_from_output`), where y tells what the derivative needs:

* leaky ReLU with a positive slope: y > 0 is x > 0, bit for bit; the mask is not kept;
* ELU: where x <= 0, exp(x) is y / scale + 1, within 2^-24 of one in float32;
* softplus in float32, log(1 + exp(a x)) / a: exp(a x) is expm1(a y), and a y > 20 is a x > 20.

Derivatives of tanh, sigmoid and ReLU are made from outputs already. GELU and SiLU have a minimum,
on whose side y is silent. Chains in which a result was rounded to a narrower dtype are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, Role, is_tensor, is_view, root
from fxremat.passes.nodes import Add, fake
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target

_ATEN = torch.ops.aten
_SOFTPLUS_IS_X = 20
"""From there on log(1 + exp(x)) is x in float32, so that both are above a bound or neither is."""
Rebuild = Callable[..., fx.Node]
"""Given where to add calls, what is there already and values of the forward, rebuilds another."""
Step = tuple[fx.Node, Rebuild, tuple[fx.Node, ...]]
"""A node, how it is rebuilt, and the values of the forward that this takes."""


def _late_readers(joint: JointGraph, node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.op != "output" and joint.role[u] is not Role.FORWARD]


def _is_kept(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the backward reads a node, or a view of it that the forward made."""
    views = (u for u in node.users if is_view(u) and joint.role[u] is Role.FORWARD)
    return bool(_late_readers(joint, node)) or any(_is_kept(joint, view) for view in views)


def _first_reader(joint: JointGraph, output: fx.Node, rebuilt: Iterable[fx.Node]) -> fx.Node | None:
    """Where the rebuilt nodes have to be there.

    None where nobody in the backward reads them, or somebody does before the output is there, or
    where the output is not kept: nobody in the backward reads that.
    """
    first = min((user for node in rebuilt for user in _late_readers(joint, node)), default=None)
    if first is None or not _is_kept(joint, output):
        return None
    return first if first > output else None


_UNDO = {
    _ATEN.mul.Tensor: _ATEN.div.Tensor,
    _ATEN.add.Tensor: _ATEN.sub.Tensor,
    _ATEN.sub.Tensor: _ATEN.add.Tensor,
}


def _rebuild(
    output: fx.Node,
    reader: fx.Node,
    activated: Iterable[Step],
    steps: Iterable[Step],
    read: Container[fx.Node],
    into: Target,
) -> StandIns:
    """Make from an output each of ``activated``, then ``steps`` back, one from another.

    ``read`` are the nodes on the way that get stand-ins, before their first ``reader``.
    """
    output, add = into(output), into.before(into(reader))
    found = {old: rebuild(add, output) for old, rebuild, _ in activated}
    for old, rebuild, operands in steps:
        output = rebuild(add, output, *map(into, operands))
        if old in read:
            found[old] = output
    return found


def _apply(target: Any, add: Add, y: fx.Node, other: Any) -> fx.Node:
    return add(target, y, other)


def _is_float(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_tensor(node) and fake(node).is_floating_point()


def _step(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The large operand of a step of a norm, and the small one, which has fewer elements."""
    if node.target not in _UNDO or node.kwargs or not all(map(_is_float, node.args)):
        return None
    large, small = node.args
    if fake(large).shape != fake(node).shape and node.target is not _ATEN.sub.Tensor:  # type: ignore[arg-type]
        large, small = small, large
    assert isinstance(large, fx.Node)
    assert isinstance(small, fx.Node)
    one, other, result = fake(large), fake(small), fake(node)
    known = all(type(n) is int for t in (one, other) for n in t.shape)
    fits = known and one.shape == result.shape and other.numel() < one.numel()
    return (large, small) if fits and one.dtype == result.dtype == other.dtype else None


def _norm(output: fx.Node) -> tuple[list[Step], bool]:
    """The steps back from the output of a norm, and whether there is a scale or a shift."""
    steps: list[Step] = []
    node, scaled, divided = output, False, False
    while (found := _step(node)) is not None:
        large, small = found
        if divided and node.target is not _ATEN.sub.Tensor:
            break
        steps.append((large, partial(_apply, _UNDO[node.target]), (small,)))  # type: ignore[index]
        if divided:
            break
        divided = node.target is _ATEN.mul.Tensor and root(small).target is _ATEN.rsqrt.default
        scaled = scaled or not divided
        node = large
    return (steps if divided else []), scaled


def _find_norms(rule: str, want_scaled: bool, joint: JointGraph) -> Iterator[Site]:
    for output in joint.module.graph.nodes:
        if output.op != "call_function" or joint.role[output] is not Role.FORWARD:
            continue
        steps_on = (_step(u) for u in output.users if joint.role.get(u) is Role.FORWARD)
        if any(found is not None and found[0] is output for found in steps_on):
            continue
        before, slope = _leaky(output)
        steps, scaled = _norm(before or output)
        read = [old for old, *_ in steps if _late_readers(joint, old)]
        if not read or scaled is not want_scaled:
            continue
        steps = steps[: 1 + max(i for i, step in enumerate(steps) if step[0] in read)]
        activated = [] if before is None else _rebuilt(joint, output)
        masks = [old for old, *_ in activated]
        if before is not None:
            steps.insert(0, (before, partial(_without_slope, slope), ()))
            read += [before] if {*_late_readers(joint, before)} - {*masks} else []
        first = _first_reader(joint, output, [*read, *masks])
        if first is not None:
            insert = partial(_rebuild, output, first, activated, steps, read)
            yield Site(rule, f"{rule}:{output.name}", insert)


# --- activations -------------------------------------------------------------------------


def _activation(output: fx.Node) -> tuple[Any, float, Any, Any]:
    """x, a, b and z of ``where(a x > b, x, z)``, all in one type of floats; or nothing of it."""
    if _calls(output, _ATEN.where.self) and _calls(output.args[0], _ATEN.gt.Scalar):
        mask, above, below = output.args
        x, (scaled, bound) = _without_one(above), mask.args  # type: ignore[union-attr]
        fits = isinstance(bound, (int, float)) and _is_float(x)  # a size may be a node
        if fits and fake(x).dtype == fake(output).dtype and (factor := _factor(scaled, x)):
            return x, factor, bound, below
    return None, 0.0, None, None


def _leaky(output: fx.Node) -> tuple[fx.Node | None, float]:
    """The input of a leaky ReLU and its slope, if that is above 0; None for all else."""
    x, factor, bound, below = _activation(output)
    inner, slope = _scaled(below)
    fits = factor == 1 and bound == 0 and inner is x and slope > 0
    return (x, slope) if fits else (None, 0.0)


def _without_slope(slope: float, add: Add, y: fx.Node) -> fx.Node:
    low = add(_ATEN.div.Tensor, y, slope)
    return add(_ATEN.where.self, add(_ATEN.gt.Scalar, y, 0), y, low)


def _without_one(node: Any) -> Any:
    """What is multiplied, where it is by one."""
    return node.args[0] if _calls(node, _ATEN.mul.Tensor) and node.args[1] == 1 else node


def _factor(node: Any, x: Any) -> float:
    """By which x is multiplied there; 0 where that is something else."""
    if node is x:
        return 1.0
    of_x = _calls(node, _ATEN.mul.Tensor) and node.args[0] is x
    factor = node.args[1] if of_x else 0.0
    return float(factor) if isinstance(factor, (int, float)) else 0.0


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _scaled(node: Any) -> tuple[Any, float]:
    """What is multiplied, and the factor; 0 where there is none. torch 2.15 leaves out a one."""
    if _calls(node, _ATEN.expm1.default):
        return node, 1.0
    inner, scale = node.args if _calls(node, _ATEN.mul.Tensor) else (None, 0.0)
    return inner, scale if isinstance(scale, float) else 0.0


def _exp_of_elu(scale: float, add: Add, y: fx.Node) -> fx.Node:
    low = add(_ATEN.add.Tensor, add(_ATEN.div.Tensor, y, scale), 1.0)
    return add(_ATEN.where.self, add(_ATEN.gt.Scalar, y, 0), add(_ATEN.exp.default, y), low)


def _exp_of_softplus(factor: float, add: Add, y: fx.Node) -> fx.Node:
    return add(_ATEN.expm1.default, _times(factor, add, y))


def _times(factor: float, add: Add, y: fx.Node) -> fx.Node:
    return y if factor == 1 else add(_ATEN.mul.Tensor, y, factor)


def _compared(target: Any, factor: float, bound: float, add: Add, y: fx.Node) -> fx.Node:
    return add(target, _times(factor, add, y), bound)


def _exponential(output: fx.Node) -> Rebuild | None:
    """How exp(a x) comes from the output of an ELU or a softplus of x; None for all else."""
    x, factor, bound, below = _activation(output)
    if x is None:
        return None
    divided = _calls(below, _ATEN.div.Tensor) and below.args[1] == factor
    inside = below.args[0] if divided else below
    if bound >= _SOFTPLUS_IS_X and (divided or factor == 1) and _calls(inside, _ATEN.log1p.default):
        inner = inside.args[0]
        exact = fake(output).dtype == torch.float32 and _calls(inner, _ATEN.exp.default)
        is_softplus = exact and _factor(inner.args[0], x) == factor > 0
        return partial(_exp_of_softplus, factor) if is_softplus else None
    inner, scale = _scaled(below)
    is_elu = factor == 1 and bound == 0 and scale > 0 and _calls(inner, _ATEN.expm1.default)
    return partial(_exp_of_elu, scale) if is_elu and _factor(inner.args[0], x) == 1 else None


def _rebuilt(joint: JointGraph, output: fx.Node) -> list[Step]:
    """What the backward reads of an activation's input that its output gives as well."""
    x, factor, bound, _ = _activation(output)
    exponential = _exponential(output)
    if exponential is None and _leaky(output)[0] is None:
        return []
    found: list[Step] = []
    for same in (u for u in (x, *x.users) if _factor(u, x) == factor):
        for node in same.users:
            if node.target in (_ATEN.gt.Scalar, _ATEN.le.Scalar) and node.args[1] == bound:
                found.append((node, partial(_compared, node.target, factor, bound), ()))
            elif node.target is _ATEN.exp.default and exponential is not None:
                found.append((node, exponential, ()))
    return [step for step in found if _late_readers(joint, step[0])]


def _find_activations(joint: JointGraph) -> Iterator[Site]:
    for output in joint.module.graph.nodes:
        if output.target is not _ATEN.where.self or joint.role[output] is not Role.FORWARD:
            continue
        rebuild = _rebuilt(joint, output)
        first = _first_reader(joint, output, [node for node, *_ in rebuild])
        if first is not None:
            insert = partial(_rebuild, output, first, rebuild, (), ())
            yield Site(_ACTIVATION, f"{_ACTIVATION}:{output.name}", insert)


_EXACT, _SCALED = "norm_from_output", "scaled_norm_from_output"
_ACTIVATION = "activation_from_output"
RULES: tuple[Rule, ...] = (
    Rule(
        _EXACT,
        "the input of a norm without scale, from its output or that of a leaky ReLU behind it",
        partial(_find_norms, _EXACT, False),
        by_default=False,  # results/rules.json: no bytes, 0.5 points of time beside the others
    ),
    Rule(
        _SCALED,
        "the normalised input of a norm, from its output: wrong where a scale is near zero",
        partial(_find_norms, _SCALED, True),
        lossy=True,
    ),
    Rule(
        _ACTIVATION,
        "what a derivative of leaky ReLU, ELU or softplus needs, from the output",
        _find_activations,
    ),
)
