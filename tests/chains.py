"""Chains of layers and of blocks: problems of planner tests, with and without copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from fxremat.core.problem import Copies, Op, Phase, Problem, Value, Variant, validate

PHASED: tuple[Phase, Phase] = ("forward", "backward")
UNPHASED: tuple[Phase, Phase] = ("any", "any")
TEN_BYTES_PER_US = Copies(to_host=10.0, to_device=10.0)


def chain(
    sizes: list[int],
    times: list[float],
    grad: int = 1,
    phases: bool = True,
    reads_output: bool = True,
) -> Problem:
    """One forward and one backward op per layer.

    The backward of a layer reads what its forward read and perhaps wrote, and the gradient.
    """
    count = len(sizes)
    values = [Value("x", grad), *(Value(f"y{k}", size) for k, size in enumerate(sizes))]
    values += [Value(f"g{k}", grad) for k in range(count + 1)]
    ops, (forward, _) = [], PHASED if phases else UNPHASED
    for k in range(count):
        read = f"y{k - 1}" if k else "x"
        ops.append(Op(f"f{k}", (read,), (f"y{k}",), times[k], 0, forward))
    last = f"y{count - 1}"
    ops.append(Op("loss", (last,), (f"g{count}",), 1.0, 0, "backward", False))
    for k in reversed(range(count)):
        read = f"y{k - 1}" if k else "x"
        reads = (read, f"y{k}", f"g{k + 1}") if reads_output else (read, f"g{k + 1}")
        ops.append(Op(f"b{k}", reads, (f"g{k}",), 2.0 * times[k], 0, "backward", False))
    return validate(Problem("chain", tuple(values), tuple(ops), (), ("x",), ("g0",)))


def homogeneous(count: int, nbytes: int = 4) -> Problem:
    """Layers that are all the same."""
    return chain([nbytes] * count, [1.0] * count)


def blocks(count: int, wide: int = 16, narrow: int = 4, skips: bool = True) -> Problem:
    """Residual blocks: a norm, a wide layer, its activation, and a sum with what enters.

    Only ``x`` crosses from block to block; the backward reads the norm, the wide layer and its
    activation, but not the sum.
    """
    values, ops = [Value("x0", narrow), Value("d", narrow)], []
    for k in range(count):
        sizes = {"norm": narrow, "wide": wide, "act": wide, "x": narrow}
        values += [Value(f"{name}{k + (name == 'x')}", size) for name, size in sizes.items()]
        ops.append(Op(f"norm{k}", (f"x{k}",), (f"norm{k}",), 1.0, 0, "forward"))
        ops.append(Op(f"wide{k}", (f"norm{k}",), (f"wide{k}",), 8.0, 0, "forward"))
        ops.append(Op(f"act{k}", (f"wide{k}",), (f"act{k}",), 1.0, 0, "forward"))
        reads = (f"act{k}", f"x{k}") if skips else (f"act{k}",)
        ops.append(Op(f"sum{k}", reads, (f"x{k + 1}",), 8.0, 0, "forward"))
    ops.append(Op("loss", (f"x{count}",), ("d",), 1.0, 0, "backward", False))
    grad = "d"
    for k in reversed(range(count)):
        values += [Value(f"da{k}", wide), Value(f"dw{k}", wide), Value(f"dx{k}", narrow)]
        for name, reads in (("da", (grad, f"act{k}")), ("dw", (f"da{k}", f"wide{k}"))):
            ops.append(Op(f"{name}{k}", reads, (f"{name}{k}",), 8.0, 0, "backward", False))
        back = (f"dw{k}", f"norm{k}", grad)
        ops.append(Op(f"dx{k}", back, (f"dx{k}",), 8.0, 0, "backward", False))
        grad = f"dx{k}"
    return validate(Problem("blocks", tuple(values), tuple(ops), ("x0",), (), (grad,)))


def skipping() -> Problem:
    """A U-Net in small: what the first half writes the second half reads, in reverse order."""
    depth = 8
    values = [Value(f"v{k}", 4) for k in range(4 * depth)]
    ops = []
    for k in range(2 * depth):
        reads = [f"v{k - 1}"] if k else []
        if k >= depth:
            reads.append(f"v{2 * depth - 1 - k}")
        ops.append(Op(f"o{k}", tuple(dict.fromkeys(reads)), (f"v{k}",), 1.0, 0, "forward"))
    for k in range(2 * depth, 4 * depth):
        reads = [f"v{k - 1}", f"v{4 * depth - 1 - k}"]
        ops.append(Op(f"o{k}", tuple(dict.fromkeys(reads)), (f"v{k}",), 1.0, 0, "backward", False))
    return validate(Problem("skipping", tuple(values), tuple(ops), outputs=(f"v{4 * depth - 1}",)))


def phased_chain(
    count: int,
    *,
    nbytes: int = 4,
    grad: int = 1,
    times: Sequence[float] = (),
    grad_us: float = 1.0,
    phases: bool = True,
) -> Problem:
    """A chain whose backward needs every forward value: y0..yn-1, then gn-1..g0."""
    values = [Value(f"y{k}", nbytes) for k in range(count)]
    ops, (forward, backward) = list[Op](), PHASED if phases else UNPHASED
    for k in range(count):
        reads: tuple[str, ...] = (f"y{k - 1}",) if k else ()
        ops.append(Op(f"y{k}", reads, (f"y{k}",), times[k] if times else 1.0, 0, forward))
    for k in reversed(range(count)):
        reads = (f"y{k}", f"g{k + 1}") if k + 1 < count else (f"y{k}",)
        values.append(Value(f"g{k}", grad))
        ops.append(Op(f"g{k}", reads, (f"g{k}",), grad_us, 0, backward, False))
    return validate(Problem("chain", tuple(values), tuple(ops), outputs=("g0",)))


def growing_chain(count: int) -> Problem:
    """Forward ops that take longer and longer, the first of which reads a resident value."""
    times = [1.0 + k for k in range(count)]
    chain = phased_chain(count, nbytes=10, grad=10, times=times, grad_us=2.0)
    ops = (replace(chain.ops[0], reads=("x",)), *chain.ops[1:])
    values = (Value("x", 10), *chain.values)
    return validate(replace(chain, values=values, ops=ops, resident=("x",)))


def chain_with_copies(
    layers: int, *, time_us: float = 10.0, copies: Copies | None = TEN_BYTES_PER_US
) -> Problem:
    """A chain: layer i keeps a value of 100 bytes for its backward, which takes twice as long."""
    ops, values = [], [Value("w", 7), Value("x0", 100)]
    for i in range(layers):
        ops.append(Op(f"f{i}", (f"x{i}", "w"), (f"x{i + 1}",), time_us, 0, "forward"))
        values.append(Value(f"x{i + 1}", 100))
    ops.append(Op("loss", (f"x{layers}",), (f"d{layers}",), 1.0, 0, "backward", False))
    values.append(Value(f"d{layers}", 100))
    for i in reversed(range(layers)):
        reads, writes = (f"x{i}", f"d{i + 1}", "w"), (f"d{i}",)
        ops.append(Op(f"b{i}", reads, writes, 2 * time_us, 0, "backward", False))
        values.append(Value(f"d{i}", 100))
    return Problem("net", tuple(values), tuple(ops), ("x0",), ("w",), ("d0",), copies)


def chain_with_host_weights(layers: int, *, time_us: float = 10.0, rate: float = 10.0) -> Problem:
    """The same with a weight of 100 bytes for each layer, and its gradient, in host memory."""
    base = chain_with_copies(layers, time_us=time_us, copies=Copies(rate, rate))
    names = [f"w{i}" for i in range(layers)] + [f"g{i}" for i in range(layers)]

    def with_weight(op: Op) -> Op:
        layer = op.name[1:]
        reads = tuple(f"w{layer}" if name == "w" else name for name in op.reads)
        writes = (*op.writes, f"g{layer}") if op.name.startswith("b") else op.writes
        return replace(op, reads=reads, writes=writes)

    return validate(
        replace(
            base,
            values=(*base.values, *(Value(name, 100) for name in names)),
            ops=tuple(op if op.name == "loss" else with_weight(op) for op in base.ops),
            resident=(),
            host=tuple(names),
        )
    )


@st.composite
def chains(draw: st.DrawFn, least: int = 2, most: int = 4) -> Problem:
    """A chain of layers with sizes and times of their own."""
    count = draw(st.integers(least, most))
    sizes = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 5).map(float), min_size=count, max_size=count))
    return chain(sizes, times, draw(st.integers(1, 3)), draw(st.booleans()))


LOSS_PROBLEM = Problem(
    name="loss",
    values=tuple(
        Value(name, size)
        for name, size in [
            ("x", 10), ("w", 50), ("logits", 1000), ("loss", 4), ("g", 4), ("dlogits", 1000),
            ("dx", 10), ("loss2", 4), ("dx2", 10),
        ]
    ),
    ops=(
        Op("mm", ("x", "w"), ("logits",), 10.0, phase="forward"),
        Op("nll", ("logits",), ("loss",), 2.0, phase="forward"),
        Op("tangents", (), ("g",), 0.0, phase="backward", repeatable=False),
        Op("softmax", ("logits", "g"), ("dlogits",), 2.0, phase="backward"),
        Op("mm2", ("dlogits", "w"), ("dx",), 10.0, phase="backward"),
    ),
    inputs=("x",),
    resident=("w",),
    outputs=("loss", "g", "dx"),
    variants=(
        Variant(
            "chunks",
            ops=(
                Op("loss_in_chunks", ("x", "w"), ("loss2",), 12.0, 100, "forward"),
                Op("dx_in_chunks", ("x", "w", "g"), ("dx2",), 23.0, 200, "backward"),
            ),
            outputs=(("loss", "loss2"), ("dx", "dx2")),
        ),
        Variant("again", outputs=(("loss", "loss2"),)),
    ),
)  # fmt: skip
