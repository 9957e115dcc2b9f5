"""A planner problem like the training step of a GPT of any depth."""

from __future__ import annotations

from fxremat.core.problem import Op, Phase, Problem, Value

KIB, W = 1024, 512
Row = tuple[str, str, dict[str, int], float]
"""An op: its name, what it reads, what it writes in KiB, and its microseconds."""

FORWARD: list[Row] = [
    ("ln1", "x", {"mean": 4, "rstd": 4}, 70.0),
    ("norm1", "x mean rstd", {"n1": W}, 133.0),
    *((name, "n1", {name: W}, 560.0) for name in "qkv"),
    ("attention", "q k v", {"att": W, "lse": 16}, 265.0),
    ("proj", "att", {"proj": W}, 561.0),
    ("add1", "x proj", {"mean2": 4, "rstd2": 4, "mid": W}, 200.0),
    ("norm2", "mid mean2 rstd2", {"n2": W}, 133.0),
    ("up", "n2", {"up": 4 * W}, 2239.0),
    ("gelu", "up", {"act": 4 * W, "tanh": 4 * W}, 788.0),
    ("down", "act", {"down": W}, 2239.0),
    ("add2", "mid down", {"out": W}, 198.0),
]
BACKWARD: list[Row] = [
    ("down", "g", {"gact": 4 * W}, 2239.0),
    ("down.w", "g act", {"down.w": W // 2}, 2239.0),
    ("down.wb", "g", {"down.wb": 1}, 68.0),
    ("gelu", "gact up tanh", {"gup": 4 * W}, 1050.0),
    ("up", "gup", {"gn2": W}, 2239.0),
    ("up.w", "gup n2", {"up.w": W // 2}, 2239.0),
    ("up.wb", "gup", {"up.wb": 2}, 264.0),
    ("add1", "g gn2 mid mean2 rstd2", {"gmean2": 4, "grstd2": 4, "gmid": W}, 265.0),
    ("norm2.w", "gn2 mid", {"norm2.w": 1}, 133.0),
    ("norm2.wb", "gn2", {"norm2.wb": 1}, 70.0),
    ("proj", "gmid", {"gatt": W}, 561.0),
    ("proj.w", "gmid att", {"proj.w": W // 8}, 561.0),
    ("proj.wb", "gmid", {"proj.wb": 1}, 68.0),
    ("delta", "gatt att", {"delta": 16}, 90.0),
    ("attention", "gatt delta lse q k v", {"gq": W, "gk": W, "gv": W}, 725.0),
    *(
        row
        for name in "qkv"
        for row in (
            (name, f"g{name}", {f"part_{name}": W}, 560.0),
            (f"{name}.w", f"g{name} n1", {f"{name}.w": W // 8}, 560.0),
            (f"{name}.wb", f"g{name}", {f"{name}.wb": 1}, 66.0),
        )
    ),
    ("sum", "part_q part_k part_v", {"gn1": W}, 264.0),
    ("norm1.w", "gn1 x", {"norm1.w": 1}, 133.0),
    ("norm1.wb", "gn1", {"norm1.wb": 1}, 70.0),
    ("ln1", "gmid gn1 x mean rstd", {"gx": W}, 265.0),
]


def gpt(layers: int) -> Problem:
    """A training step of a GPT: 13 forward and 26 backward ops and 55 values a layer."""
    values: list[Value] = []
    ops: list[Op] = []

    def run(place: str, rows: list[Row], there: dict[str, str], forward: bool = True) -> None:
        for name, reads, writes, us in rows:
            there |= {short: f"{place}.{short}" for short in writes}
            values.extend(Value(there[short], size * KIB) for short, size in writes.items())
            read, written = (tuple(there[s] for s in its) for its in (reads.split(), writes))
            phase: Phase = "forward" if forward else "backward"
            ops.append(Op(f"{place}.{name}", read, written, us, 0, phase, forward))

    outside: dict[str, str] = {}
    run("embed", [("embed", "", {"out": W}, 70.0)], outside)
    saved: list[dict[str, str]] = []
    for k in range(layers):
        saved.append({"x": (saved[-1] if saved else outside)["out"]})
        run(f"f{k}", FORWARD, saved[-1])
    outside["x"] = saved[-1]["out"]
    run("loss", [("loss", "x", {"loss": 8 * W}, 4000.0)], outside)
    run("grad", [("loss", "loss x", {"gx": W}, 4000.0)], outside, forward=False)
    for k in reversed(range(layers)):
        saved[k]["g"] = (saved[k + 1] if k + 1 < layers else outside)["gx"]
        run(f"b{k}", BACKWARD, saved[k], forward=False)
    outputs = tuple(value.name for value in values if ".w" in value.name)
    return Problem(f"gpt{layers}", tuple(values), tuple(ops), outputs=outputs)
