"""Options: what is accepted, what is refused and with which words, and who comes first."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fxremat.errors import InvalidOption, UnknownOption
from fxremat.option_values import machine_memory_bytes
from fxremat.options import (
    Options,
    disabled,
    list_options,
    options_table,
    parse_options,
)
from tests.conftest import Golden

DEVICE = 80 * 2**30
SOLVERS = ("greedy", "checkmate")


def parse(environment: dict[str, str] | None = None, /, **given: Any) -> Options:
    """The options of a call, on a device of 80 GiB."""
    return parse_options(
        given, device_total_bytes=DEVICE, solvers=SOLVERS, environment=environment or {}
    )


def test_defaults() -> None:
    assert parse() == Options()
    assert parse_options(None, device_total_bytes=None, environment={}) == Options()


ACCEPTED = [
    ("memory_budget", "8GiB", 8 * 2**30),
    ("memory_budget", "8GB", 8 * 10**9),
    ("memory_budget", "1.5 GiB", 3 * 2**29),
    ("memory_budget", 2**30, 2**30),
    ("memory_budget", "1073741824", 2**30),
    ("memory_budget", "80%", 64 * 2**30),
    ("memory_budget", "100 %", DEVICE),
    ("memory_budget", "300KiB", 300 * 1024),
    ("memory_budget", None, None),
    ("reserve", 0, 0),
    ("reserve", "2GiB", 2**31),
    ("optimizer", "AdamW", "adamw"),
    ("optimizer", "none", "none"),
    ("optimizer", None, None),
    ("optimizer", torch.optim.AdamW, torch.optim.AdamW),
    ("count", "reserved", "reserved"),
    ("count", "allocated", "allocated"),
    ("count", None, None),
    ("executor", "aot_eager", "aot_eager"),
    ("disable_passes", ["recompute"], ("recompute",)),
    ("disable_passes", "none", ()),
    ("solver", "auto", "auto"),
    ("solver", "checkmate", "checkmate"),
    ("solver_time_limit", 30, 30.0),
    ("op_times", "measured", "measured"),
    ("verify", False, False),
    ("report", "out/report", "out/report"),
    ("report", Path("out"), "out"),
    ("inductor", {"b": [1], "a": 2}, (("a", 2), ("b", [1]))),
]


@pytest.mark.parametrize(("name", "value", "read"), ACCEPTED)
def test_accepted(name: str, value: object, read: object) -> None:
    assert getattr(parse(**{name: value}), name) == read


REFUSED = [
    ("memory_budget", 8, "did you mean '8GiB'"),
    ("memory_budget", "8", "did you mean '8GiB'"),
    ("memory_budget", 8192, "did you mean '8192MiB'"),
    ("memory_budget", 0, "more than zero"),
    ("memory_budget", "0GiB", "more than zero"),
    ("memory_budget", -5, "more than zero"),
    ("memory_budget", True, "number of bytes"),
    ("memory_budget", 0.5, "number of bytes"),
    ("memory_budget", float("nan"), "number of bytes"),
    ("memory_budget", [2**30], "number of bytes"),
    ("memory_budget", "plenty", "a size such as"),
    ("memory_budget", "-8GiB", "a size such as"),
    ("memory_budget", "8G", "a size such as"),
    ("memory_budget", "0%", "a percentage"),
    ("memory_budget", "101%", "a percentage"),
    ("memory_budget", "nan%", "a percentage"),
    ("memory_budget", "%", "a percentage"),
    ("memory_budget", "81GiB", "at most what the device has, 80.00 GiB"),
    ("reserve", -1, "zero bytes or more"),
    ("reserve", False, "number of bytes"),
    ("optimizer", "adamm", "did you mean 'adam'"),
    ("optimizer", 3, "an optimizer, its class, or one of 'none'"),
    ("count", "freed", "one of 'reserved', 'allocated'"),
    ("link_bandwidth", 0, "more than zero bytes per second"),
    ("link_bandwidth", "10%", "bytes per second"),
    ("executor", "inductr", "did you mean 'inductor'"),
    ("executor", None, "one of 'inductor', 'aot_eager'"),
    ("disable_passes", "recomputation", "did you mean 'recompute'"),
    ("disable_passes", 3, "names of passes"),
    ("solver", "gredy", "did you mean 'greedy'"),
    ("solver", ["greedy"], "one of 'auto', 'greedy', 'checkmate'"),
    ("solver_time_limit", 0, "above 0"),
    ("solver_time_limit", -1.0, "above 0"),
    ("solver_time_limit", float("nan"), "above 0"),
    ("solver_time_limit", float("inf"), "above 0"),
    ("solver_time_limit", True, "number of seconds"),
    ("solver_time_limit", "30", "number of seconds"),
    ("op_times", "guessed", "one of 'auto', 'roofline', 'measured'"),
    ("verify", 1, "True or False"),
    ("verify", "yes", "True or False"),
    ("report", 3, "a path"),
    ("report", "", "a path"),
    ("inductor", ["a"], "a mapping"),
    ("inductor", {1: 2}, "a mapping"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(InvalidOption, match=words) as caught:
        parse(**{name: value})
    assert (caught.value.option, caught.value.variable) == (name, None)


def test_an_optimizer_is_not_kept_alive() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    given: Any = parse(optimizer=optimizer).optimizer
    assert given() is optimizer
    del optimizer
    assert given() is None


def test_unknown_option() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'memory_budget'"):
        parse(memory_budgt="8GiB")


def test_reserve_must_leave_something_of_the_budget() -> None:
    with pytest.raises(InvalidOption, match="less than memory_budget"):
        parse(memory_budget="8GiB", reserve="8GiB")


def test_the_cpu_reserves_nothing() -> None:
    """Nor is reserved what eager operators take: nothing shows it before they run."""
    with pytest.raises(InvalidOption, match="'allocated' on the CPU: no allocator there keeps"):
        parse_options({"count": "reserved"}, device_total_bytes=None, environment={})
    allocated = parse_options({"count": "allocated"}, device_total_bytes=None, environment={})
    assert allocated.count == "allocated"
    with pytest.raises(InvalidOption, match="no dry run counts what these reserve"):
        parse(count="reserved", executor="aot_eager")


def test_the_cpu_enforces_nothing() -> None:
    with pytest.raises(InvalidOption, match="False on the CPU: no allocator there can be held"):
        parse_options({"enforce": True}, device_total_bytes=None, environment={})
    assert not parse_options({"enforce": False}, device_total_bytes=None, environment={}).enforce
    assert parse(enforce=True).enforce


def test_without_a_device_percentages_are_of_this_machine() -> None:
    options = parse_options({"memory_budget": "50%"}, device_total_bytes=None, environment={})
    assert options.memory_budget == machine_memory_bytes() // 2


def test_without_a_device_no_budget_is_too_large() -> None:
    options = parse_options({"memory_budget": "900TiB"}, device_total_bytes=None, environment={})
    assert options.memory_budget == 900 * 2**40


ENVIRONMENT = {
    "FXREMAT_MEMORY_BUDGET": "4GiB",
    "FXREMAT_RESERVE": "1GiB",
    "FXREMAT_OPTIMIZER": "adamw",
    "FXREMAT_COUNT": "allocated",
    "FXREMAT_ENFORCE": "1",
    "FXREMAT_INSTANCES": "4",
    "FXREMAT_RANK_TIMEOUT": "60",
    "FXREMAT_EXECUTOR": "aot_eager",
    "FXREMAT_SOLVER": "greedy",
    "FXREMAT_SOLVER_TIME_LIMIT": "1.5",
    "FXREMAT_OFFLOAD": "1",
    "FXREMAT_HOST_MEMORY_BUDGET": "3GiB",
    "FXREMAT_HOST_BANDWIDTH": "25GB/s",
    "FXREMAT_LINK_BANDWIDTH": "50GB/s",
    "FXREMAT_VARIANTS": "none",
    "FXREMAT_ALLOW_LOSSY": "1",
    "FXREMAT_REPEATABLE": "kernels::norm",
    "FXREMAT_DISABLE_PASSES": "sums, inplace",
    "FXREMAT_OP_TIMES": "measured",
    "FXREMAT_VERIFY": "0",
    "FXREMAT_ARENA": "0",
    "FXREMAT_REPORT": "there",
}


def test_every_variable_is_read() -> None:
    given = (
        2**32, 2**30, "adamw", "allocated", True, False, 4, 60.0, "aot_eager", "greedy", 1.5, True,
        3 * 2**30, 25 * 10**9, 50 * 10**9, (), True,
    )  # fmt: skip
    read = Options(*given, ("kernels::norm",), ("sums", "inplace"), "measured", False, "there")
    assert parse(ENVIRONMENT) == read
    assert set(ENVIRONMENT) == {row.variable for row in list_options() if row.variable}


def test_an_option_comes_before_its_variable() -> None:
    assert parse(ENVIRONMENT, memory_budget="2GiB").memory_budget == 2**31
    assert parse(ENVIRONMENT, memory_budget=None).memory_budget is None
    assert parse(ENVIRONMENT, verify=True).verify


def test_an_empty_variable_is_not_set() -> None:
    assert parse({"FXREMAT_MEMORY_BUDGET": " ", "FXREMAT_VERIFY": ""}) == Options()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FXREMAT_MEMORY_BUDGET", "8"),
        ("FXREMAT_SOLVER_TIME_LIMIT", "soon"),
        ("FXREMAT_VERIFY", "maybe"),
        ("FXREMAT_EXECUTOR", "eager"),
    ],
)
def test_a_refused_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=f"from {variable}"):
        parse({variable: text})


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_MEMORY_BUDGET", "3GiB")
    assert parse_options({}, device_total_bytes=None).memory_budget == 3 * 2**30


@pytest.mark.parametrize("text", ["", "0", "false", "No", "off"])
def test_not_disabled(text: str) -> None:
    assert not disabled({"FXREMAT_DISABLE": text})
    assert not disabled({})


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_disabled(text: str) -> None:
    assert disabled({"FXREMAT_DISABLE": text})


def test_disable_with_nonsense() -> None:
    with pytest.raises(InvalidOption, match="FXREMAT_DISABLE"):
        disabled({"FXREMAT_DISABLE": "perhaps"})


def test_options_are_plain_data() -> None:
    options = parse(memory_budget="8GiB", inductor={"max_autotune": [True]})
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options
    assert hash(options) == hash(parse(memory_budget="8GiB"))
    assert options != parse(memory_budget="8GiB")
    assert options.inductor_options() == {"max_autotune": [True]}


def test_every_option_is_described(golden: Golden) -> None:
    assert all(row.type and row.default and row.doc for row in list_options())
    golden(options_table())
