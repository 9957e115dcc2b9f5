"""What is compared: the ways to run one training step, by name.

A `Variant` says what is asked for; a `Budget` rule of fxremat becomes a number of bytes only once
the peaks of the variants before it are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["eager", "compile", "blocks", "knob", "checkpoint", "selective", "fxremat"]

KNOB_BUDGETS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
FXREMAT_FRACTIONS = (0.9, 0.8, 0.6, 0.5, 0.4, 0.33, 0.1)
MATCHED = ("compile", "knob", "checkpoint", "selective")
"""Kinds of ways whose bytes fxremat is given."""


@dataclass(frozen=True)
class Variant:
    """One way to run a training step.

    `value` is the knob's ratio, or for fxremat the fraction of compile's measured peak;
    `at` says what fxremat's budget is: that fraction, the minimum, or the least measured peak of
    the ways of another kind; `options` are further ones for fxremat.
    With `blocks` each block is compiled by itself.
    """

    name: str
    kind: Kind
    value: float | None = None
    at: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    blocks: bool = False


def _standard() -> tuple[Variant, ...]:
    plain = (Variant("compile", "compile"), Variant("eager", "eager"))
    knobs = tuple(Variant(f"knob{value:g}", "knob", value) for value in KNOB_BUDGETS)
    fractions = tuple(
        Variant(f"fxremat{value:.0%}", "fxremat", value, "fraction") for value in FXREMAT_FRACTIONS
    )
    others = (
        Variant("fxremat@min", "fxremat", at="minimum"),
        *(Variant(f"fxremat@{kind}", "fxremat", at=kind) for kind in MATCHED),
    )
    as_it_is = (("variants", "none"),)
    bare = (
        Variant("plain@min", "fxremat", at="minimum", options=as_it_is),
        *(Variant(f"plain@{kind}", "fxremat", at=kind, options=as_it_is) for kind in MATCHED),
        *(Variant(f"plain{v:.0%}", "fxremat", v, "fraction", as_it_is) for v in FXREMAT_FRACTIONS),
    )
    by_block = (
        Variant("blocks", "blocks", blocks=True),
        *(
            Variant(f"blocks{v:.0%}", "fxremat", v, "fraction", blocks=True)
            for v in FXREMAT_FRACTIONS
        ),
    )
    checkpoints = (Variant("checkpoint", "checkpoint"), Variant("selective", "selective"))
    return (*plain, *checkpoints, *knobs, *fractions, *others, *bare, *by_block)


VARIANTS = {variant.name: variant for variant in _standard()}
REFERENCE = VARIANTS["compile"]


def choose_variants(words: str) -> list[Variant]:
    """The variants of a comma-separated list of names or kinds; `all` is every one of them."""
    chosen = [word.strip() for word in words.split(",")]
    unknown = (
        set(chosen) - set(VARIANTS) - {variant.kind for variant in VARIANTS.values()} - {"all"}
    )
    if unknown:
        raise SystemExit(f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}")
    return [v for v in VARIANTS.values() if {v.name, v.kind, "all"} & set(chosen)]


def budget_bytes(variant: Variant, peaks: Mapping[str, int]) -> int | None:
    """The budget of a variant, given measured peaks by name.

    None: it takes none, or it is the minimum and still to be found.
    """
    if variant.at in (None, "minimum"):
        return None
    if variant.at == "fraction" and variant.value is not None:
        return int(variant.value * peaks[REFERENCE.name])
    matched = [peak for name, peak in peaks.items() if VARIANTS[name].kind == variant.at]
    if not matched:
        raise ValueError(f"{variant.name} needs a measured peak of {variant.at}")
    return min(matched)
