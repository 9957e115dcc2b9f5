"""Chains of blocks for the tests of the solvers that need them."""

from __future__ import annotations

from hypothesis import strategies as st

from fxremat.core.problem import Op, Problem, Value, validate


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
    ops = []
    for k in range(count):
        read = f"y{k - 1}" if k else "x"
        phase = "forward" if phases else "any"
        ops.append(Op(f"f{k}", (read,), (f"y{k}",), times[k], 0, phase))  # type: ignore[arg-type]
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


@st.composite
def chains(draw: st.DrawFn, least: int = 2, most: int = 4) -> Problem:
    """A chain of layers with sizes and times of their own."""
    count = draw(st.integers(least, most))
    sizes = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 5).map(float), min_size=count, max_size=count))
    return chain(sizes, times, draw(st.integers(1, 3)), draw(st.booleans()))
