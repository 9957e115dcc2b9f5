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
* softplus in float32: exp(x) is expm1(y), and y > 20 is x > 20.

Derivatives of tanh, sigmoid and ReLU are made from outputs already. GELU and SiLU have a minimum,
on whose side y is silent. Chains in which a result was rounded to a narrower dtype are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, Role, is_tensor, is_view, root
from fxremat.passes.nodes import Add, fake
from fxremat.passes.variants.insertion import Rule, Site, StandIns
from fxremat.passes.variants.saved_values import Inserter

_ATEN = torch.ops.aten
Step = tuple[fx.Node, Any, fx.Node]
"""A node, and the call that gives it: the one behind it and an operand of the forward."""


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


Rebuild = Callable[[Add, fx.Node], fx.Node]

# --- norms -------------------------------------------------------------------------------

_UNDO = {
    _ATEN.mul.Tensor: _ATEN.div.Tensor,
    _ATEN.add.Tensor: _ATEN.sub.Tensor,
    _ATEN.sub.Tensor: _ATEN.add.Tensor,
}


@dataclass(frozen=True)
class _WayBack:
    """What is made from an output: of an activation, what its derivative needs (``activated``).

    Then the steps back from that of a norm, from behind a leaky ReLU if there is one; ``read`` are
    the nodes on the way that get stand-ins.
    """

    output: fx.Node
    first_reader: fx.Node
    activated: tuple[tuple[fx.Node, Rebuild], ...]
    leaky: _Leaky | None = None
    steps: tuple[Step, ...] = ()
    read: frozenset[fx.Node] = frozenset()

    def insert(self, graph: fx.Graph, where: Mapping[fx.Node, fx.Node]) -> StandIns:
        output, reader = where[self.output], where[self.first_reader]
        add = Inserter(graph, output, reader, reader).late
        current, found = output, dict[fx.Node, fx.Node]()
        for old, make in self.activated:
            found[where[old]] = make(add, current)
        if self.leaky is not None:
            current = self.leaky.undo(add, current)
            if self.leaky.input in self.read:
                found[where[self.leaky.input]] = current
        for old, target, operand in self.steps:
            current = add(target, current, where[operand])
            if old in self.read:
                found[where[old]] = current
        return found


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
        steps.append((large, _UNDO[node.target], small))  # type: ignore[index]
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
        leaky = _leaky(output)
        steps, scaled = _norm(output if leaky is None else leaky.input)
        read = [old for old, *_ in steps if _late_readers(joint, old)]
        if not read or scaled is not want_scaled:
            continue
        needed = steps[: 1 + max(i for i, step in enumerate(steps) if step[0] in read)]
        activated = () if leaky is None else tuple(_rebuilt(joint, output))
        masks = [old for old, _ in activated]
        if leaky is not None and set(_late_readers(joint, leaky.input)) - {*masks}:
            read.append(leaky.input)
        first = _first_reader(joint, output, [*read, *masks])
        if first is not None:
            way = _WayBack(output, first, activated, leaky, tuple(needed), frozenset(read))
            yield Site(rule, f"{rule}:{output.name}", way.insert)


# --- activations -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaky:
    """A leaky ReLU of ``input``."""

    input: fx.Node
    slope: float

    def undo(self, add: Add, output: fx.Node) -> fx.Node:
        low = add(_ATEN.div.Tensor, output, self.slope)
        return add(_ATEN.where.self, add(_ATEN.gt.Scalar, output, 0), output, low)


def _leaky(output: fx.Node) -> _Leaky | None:
    """The leaky ReLU that a node is the output of, if it is one with a positive slope."""
    if not _calls(output, _ATEN.where.self) or not _calls(output.args[0], _ATEN.gt.Scalar):
        return None
    mask, above, below = output.args
    inner, slope = _scaled(below)  # type: ignore[arg-type]
    x, bound = mask.args  # type: ignore[union-attr]
    is_one = x is above is inner and bound == 0 and slope > 0 and _is_float(x)
    same = is_one and fake(x).dtype == fake(output).dtype  # type: ignore[arg-type]
    return _Leaky(x, slope) if same else None  # type: ignore[arg-type]


def _is_same(node: Any, x: fx.Node) -> bool:
    if isinstance(node, fx.Node) and node.target is _ATEN.mul.Tensor and node.args[1] == 1:
        node = node.args[0]
    return node is x


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _scaled(node: fx.Node) -> tuple[Any, float]:
    """What is multiplied, and the factor; 0 where there is none. torch 2.15 leaves out a one."""
    if _calls(node, _ATEN.expm1.default):
        return node, 1.0
    inner, scale = node.args if _calls(node, _ATEN.mul.Tensor) else (None, 0.0)
    return inner, scale if isinstance(scale, float) else 0.0


def _compare(target: Any, bound: Any, add: Add, y: fx.Node) -> fx.Node:
    return add(target, y, bound)


def _exp_of_elu(scale: float, add: Add, y: fx.Node) -> fx.Node:
    low = add(_ATEN.add.Tensor, add(_ATEN.div.Tensor, y, scale), 1.0)
    return add(_ATEN.where.self, add(_ATEN.gt.Scalar, y, 0), add(_ATEN.exp.default, y), low)


def _exp_from(output: fx.Node, x: fx.Node) -> Rebuild | Literal["no exponential"] | None:
    """How exp(x) comes from the output of an activation of x; None if it is none that we know."""
    mask, above, below = output.args
    assert isinstance(mask, fx.Node)
    if not _is_same(above, x) or not isinstance(below, fx.Node):
        return None
    if mask.args[1] == 20 and _calls(below, _ATEN.log1p.default):
        inner = below.args[0]
        exact = fake(output).dtype == torch.float32 and _calls(inner, _ATEN.exp.default)
        fits = exact and _is_same(inner.args[0], x)  # type: ignore[union-attr]
        return (lambda add, y: add(_ATEN.expm1.default, y)) if fits else None
    inner, scale = _scaled(below)
    if mask.args[1] != 0 or scale <= 0:
        return None
    if _calls(inner, _ATEN.expm1.default) and _is_same(inner.args[0], x):
        return partial(_exp_of_elu, scale)
    return "no exponential" if inner is x else None


def _rebuilt(joint: JointGraph, output: fx.Node) -> list[tuple[fx.Node, Rebuild]]:
    """What the backward reads of an activation's input that its output gives as well."""
    mask = output.args[0]
    if not _calls(mask, _ATEN.gt.Scalar) or not _is_float(mask.args[0]):  # type: ignore[union-attr]
        return []
    x, bound = mask.args  # type: ignore[union-attr]
    assert isinstance(x, fx.Node)
    exponential = _exp_from(output, x)
    if exponential is None or fake(x).dtype != fake(output).dtype:
        return []
    found: list[tuple[fx.Node, Rebuild]] = []
    for same in (x, *(u for u in x.users if _is_same(u, x))):
        for node in same.users:
            if node.target in (_ATEN.gt.Scalar, _ATEN.le.Scalar) and node.args[1] == bound:
                found.append((node, partial(_compare, node.target, bound)))
            elif node.target is _ATEN.exp.default and callable(exponential):
                found.append((node, exponential))
    return [(node, make) for node, make in found if _late_readers(joint, node)]


def _find_activations(joint: JointGraph) -> Iterator[Site]:
    for output in joint.module.graph.nodes:
        if output.target is not _ATEN.where.self or joint.role[output] is not Role.FORWARD:
            continue
        rebuild = _rebuilt(joint, output)
        first = _first_reader(joint, output, [node for node, _ in rebuild])
        if first is not None:
            way = _WayBack(output, first, tuple(rebuild))
            yield Site(_ACTIVATION, f"{_ACTIVATION}:{output.name}", way.insert)


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
