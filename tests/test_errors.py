"""Errors: their texts, and that they survive copying and pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from fxremat.errors import (
    BudgetExceeded,
    CannotVary,
    GraphsDiffer,
    HostMemoryExceeded,
    InfeasibleBudget,
    InvalidOption,
    NeedsTriton,
    NotTraceable,
    PromiseBroken,
    RankMissing,
    SolverRefused,
    UnknownDevice,
    UnknownOption,
    UnsupportedDevice,
    VerificationFailed,
    nearest,
)
from tests.conftest import Golden

MIB = 2**20
ERRORS: dict[str, Exception] = {
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
    "in flight": PromiseBroken("graph 1", 4, 3 * MIB, 9 * MIB, 8 * MIB),
    "in flight, planned again": PromiseBroken(
        "graph 1", 4, 3 * MIB, 9 * MIB, 8 * MIB, planned_for=4
    ),
    "in flight, others leave more": PromiseBroken(
        "graph 1", 4, 3 * MIB, 9 * MIB, 8 * MIB, left_bytes=MIB
    ),
    "exceeded": BudgetExceeded("graph 0", 9 * MIB, 8 * MIB, 2 * MIB, MIB // 2),
    "another graph": GraphsDiffer(0, (1, 2), {0: "9 nodes", 1: "7 nodes", 2: "7 nodes"}),
    "another plan": GraphsDiffer(0, (1,), {0: "a", 1: "b"}, "plan"),
    "rank": RankMissing("plan", 300.0, 2),
    "rank that failed": RankMissing("plan", 300.0, None, "ValueError: no"),
    "device": UnknownDevice("H10", ("A100", "H100"), "H100"),
    "other device": UnsupportedDevice("mps"),
    "triton": NeedsTriton(),
    "vary": CannotVary("batch", "the model fixes it"),
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
