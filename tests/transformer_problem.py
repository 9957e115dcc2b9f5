"""A planner problem like the training step of a GPT of any depth."""

from __future__ import annotations

from fxremat.core.problem import Op, Phase, Problem, Value

KIB = 1024


class _Builder:
    """Collects values and ops of a problem."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def op(
        self, name: str, reads: tuple[str, ...], kib: tuple[int, ...], us: float, forward: bool
    ) -> tuple[str, ...]:
        """An op that writes one value of so many KiB each."""
        writes = tuple(f"{name}.{k}" for k in range(len(kib)))
        self.values.extend(Value(w, size * KIB) for w, size in zip(writes, kib, strict=True))
        phase: Phase = "forward" if forward else "backward"
        self.ops.append(Op(name, reads, writes, us, 0, phase, forward))
        return writes


def gpt(layers: int, width: int = 512) -> Problem:
    """A training step of a GPT: 13 forward and 26 backward ops and 55 values a layer."""
    b = _Builder()
    saved: list[dict[str, str]] = []
    (x,) = b.op("embed", (), (width,), 70.0, True)
    for k in range(layers):
        saved.append(_forward(b, f"f{k}", x, width))
        x = saved[-1]["out"]
    (loss,) = b.op("loss", (x,), (8 * width,), 4000.0, True)
    (g,) = b.op("loss.grad", (loss, x), (width,), 4000.0, False)
    for k in reversed(range(layers)):
        g = _backward(b, f"b{k}", g, saved[k], width)
    outputs = tuple(v.name for v in b.values if ".w" in v.name)
    return Problem(f"gpt{layers}", tuple(b.values), tuple(b.ops), outputs=outputs)


def _forward(b: _Builder, p: str, x: str, w: int) -> dict[str, str]:
    def run(name: str, reads: tuple[str, ...], kib: tuple[int, ...], us: float) -> tuple[str, ...]:
        return b.op(f"{p}.{name}", reads, kib, us, True)

    mean, rstd = run("ln1", (x,), (4, 4), 70.0)
    (n1,) = run("norm1", (x, mean, rstd), (w,), 133.0)
    (q,) = run("q", (n1,), (w,), 560.0)
    (k,) = run("k", (n1,), (w,), 560.0)
    (v,) = run("v", (n1,), (w,), 560.0)
    att, lse = run("attention", (q, k, v), (w, 16), 265.0)
    (proj,) = run("proj", (att,), (w,), 561.0)
    mean2, rstd2, mid = run("add1", (x, proj), (4, 4, w), 200.0)
    (n2,) = run("norm2", (mid, mean2, rstd2), (w,), 133.0)
    (up,) = run("up", (n2,), (4 * w,), 2239.0)
    act, tanh = run("gelu", (up,), (4 * w, 4 * w), 788.0)
    (down,) = run("down", (act,), (w,), 2239.0)
    (out,) = run("add2", (mid, down), (w,), 198.0)
    names = ("x", "mean", "rstd", "n1", "q", "k", "v", "att", "lse", "mean2", "rstd2", "mid")
    here = locals()
    return {name: here[name] for name in (*names, "n2", "up", "act", "tanh", "out")}


def _backward(b: _Builder, p: str, g: str, s: dict[str, str], w: int) -> str:
    def run(name: str, reads: tuple[str, ...], kib: tuple[int, ...], us: float) -> tuple[str, ...]:
        return b.op(f"{p}.{name}", reads, kib, us, False)

    (ga,) = run("down", (g,), (4 * w,), 2239.0)
    run("down.w", (g, s["act"]), (w // 2,), 2239.0)
    run("down.wb", (g,), (1,), 68.0)
    (gu,) = run("gelu", (ga, s["up"], s["tanh"]), (4 * w,), 1050.0)
    (gn2,) = run("up", (gu,), (w,), 2239.0)
    run("up.w", (gu, s["n2"]), (w // 2,), 2239.0)
    run("up.wb", (gu,), (2,), 264.0)
    _, _, gm = run("add1", (g, gn2, s["mid"], s["mean2"], s["rstd2"]), (4, 4, w), 265.0)
    run("norm2.w", (gn2, s["mid"]), (1,), 133.0)
    run("norm2.wb", (gn2,), (1,), 70.0)
    (gatt,) = run("proj", (gm,), (w,), 561.0)
    run("proj.w", (gm, s["att"]), (w // 8,), 561.0)
    run("proj.wb", (gm,), (1,), 68.0)
    (delta,) = run("delta", (gatt, s["att"]), (16,), 90.0)
    gq, gk, gv = run("attention", (gatt, delta, s["lse"], s["q"], s["k"], s["v"]), (w, w, w), 725.0)
    parts: list[str] = []
    for name, grad in (("q", gq), ("k", gk), ("v", gv)):
        parts.extend(run(name, (grad,), (w,), 560.0))
        run(f"{name}.w", (grad, s["n1"]), (w // 8,), 560.0)
        run(f"{name}.wb", (grad,), (1,), 66.0)
    (gn1,) = run("sum", tuple(parts), (w,), 264.0)
    run("norm1.w", (gn1, s["x"]), (1,), 133.0)
    run("norm1.wb", (gn1,), (1,), 70.0)
    (out,) = run("ln1", (gm, gn1, s["x"], s["mean"], s["rstd"]), (w,), 265.0)
    return out
