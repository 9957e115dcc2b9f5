"""Errors: their texts, and that they survive copying and pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from fxremat.errors import (
    FxrematError,
    HostMemoryExceeded,
    InfeasibleBudget,
    InvalidOption,
    NotTraceable,
    SolverRefused,
    UnknownOption,
    VerificationFailed,
    nearest,
)
from tests.conftest import Golden

ERRORS: dict[str, FxrematError] = {
    "infeasible": InfeasibleBudget(
        2 * 2**30,
        2_684_366_905,
        (
            ("gradient of embedding.weight (model.py:12)", 2**29),
            ("gelu in layers.3.mlp (model.py:41)", 1_000_000),
        ),
    ),
    "infeasible, reserved": InfeasibleBudget(2**30, 3 * 2**29, fragmentation_bytes=2**27),
    "infeasible, minimum unknown": InfeasibleBudget(2**20, None),
    "value": InvalidOption("verify", "maybe", "1 or 0", variable="FXREMAT_VERIFY"),
    "choice": InvalidOption("solver", "gredy", "'auto' or 'greedy'", ("auto", "greedy")),
    "unknown": UnknownOption("memory_budgt", 8, ("memory_budget", "reserve")),
    "unknown, nothing near": UnknownOption("colour", 8, ("memory_budget", "reserve")),
    "refused": SolverRefused("rotor", "it is no chain. Use the solver 'auto'."),
    "not traceable": NotTraceable("step", "it breaks the graph"),
    "host memory": HostMemoryExceeded(400, 800, 1000),
    "verification": VerificationFailed("peak of the plan", "step 3 needs 12 bytes, budget 10"),
}


def test_error_texts(golden: Golden) -> None:
    golden("\n\n".join(f"[{name}]\n{error}" for name, error in ERRORS.items()))


@pytest.mark.parametrize("name", ERRORS)
def test_copies_say_the_same(name: str) -> None:
    error = ERRORS[name]
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_an_invalid_option_is_a_value_error() -> None:
    assert issubclass(InvalidOption, ValueError)


def test_nearest() -> None:
    assert nearest("Gredy", ("auto", "greedy")) == "greedy"
    assert nearest("zzz", ("auto", "greedy")) is None
