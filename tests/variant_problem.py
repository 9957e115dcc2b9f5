"""A planner problem with variants: a loss whose logits can be computed in chunks."""

from __future__ import annotations

from fxremat.core.problem import Op, Problem, Value, Variant

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
