"""Options: what is accepted, what is refused and with which words, and who comes first."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.guide import options_table
from fxremat.errors import InvalidOption, UnknownOption
from fxremat.option_values import machine_memory_bytes
from fxremat.options import (
    Options,
    disabled,
    list_options,
    parse_options,
)
from tests.conftest import Golden

DEVICE = 80 * 2**30


def only(environment: dict[str, str]) -> Any:
    """Inside, no other variables of ours are there."""
    unset = {name: "" for name in os.environ if name.startswith("FXREMAT_")}
    return mock.patch.dict(os.environ, unset | environment)


def parse(environment: dict[str, str] | None = None, /, **given: Any) -> Options:
    """The options of a call, on a device of 80 GiB."""
    with only(environment or {}):
        return parse_options(given, device_total_bytes=DEVICE)


def is_disabled(environment: dict[str, str]) -> bool:
    with only(environment):
        return disabled()


def on_cpu(**given: Any) -> Options:
    with only({}):
        return parse_options(given, device_total_bytes=None)


def test_defaults() -> None:
    assert parse() == on_cpu() == Options()


ACCEPTED = [
    ("memory_budget", "8GiB", 8 * 2**30),
    ("memory_budget", 2**30, 2**30),
    ("memory_budget", "80%", 64 * 2**30),
    ("memory_budget", "100 %", DEVICE),
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
    ("solver", "Gredy", "did you mean 'greedy'"),
    ("solver", ["greedy"], "one of 'auto', 'moments', 'greedy'"),
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


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        (parse, {"memory_budget": "8GiB", "reserve": "8GiB"}, "less than memory_budget"),
        (parse, {"count": "reserved", "executor": "aot_eager"}, "no dry run counts its reserved"),
        (on_cpu, {"count": "reserved"}, "'allocated' on the CPU: no allocator there keeps"),
        (on_cpu, {"enforce": True}, "False on the CPU: no allocator there can be held"),
    ],
)
def test_refused_together_or_on_the_cpu(
    read: Callable[..., Options], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        read(**given)


def test_without_a_device() -> None:
    """Percentages are of this machine, and no budget is too large."""
    assert on_cpu(memory_budget="50%").memory_budget == machine_memory_bytes() // 2
    assert on_cpu(memory_budget="900TiB").memory_budget == 900 * 2**40
    assert on_cpu(count="allocated", enforce=False).count == "allocated"
    assert parse(enforce=True).enforce


AS_TEXT = {
    "memory_budget": ("4GiB", 2**32),
    "reserve": ("1GiB", 2**30),
    "optimizer": ("adamw", "adamw"),
    "count": ("allocated", "allocated"),
    "enforce": ("1", True),
    "inference": ("1", True),
    "arena": ("0", False),
    "instances": ("4", 4),
    "rank_timeout": ("60", 60.0),
    "executor": ("aot_eager", "aot_eager"),
    "solver": ("greedy", "greedy"),
    "solver_time_limit": ("1.5", 1.5),
    "offload": ("1", True),
    "host_memory_budget": ("3GiB", 3 * 2**30),
    "host_bandwidth": ("25GB/s", 25 * 10**9),
    "link_bandwidth": ("50GB/s", 50 * 10**9),
    "variants": ("none", ()),
    "allow_lossy": ("1", True),
    "repeatable": ("kernels::norm", ("kernels::norm",)),
    "disable_passes": ("sums, inplace", ("sums", "inplace")),
    "op_times": ("measured", "measured"),
    "verify": ("0", False),
    "report": ("there", "there"),
}
ENVIRONMENT = {f"FXREMAT_{name.upper()}": text for name, (text, _) in AS_TEXT.items()}


def test_every_variable_is_read() -> None:
    read: dict[str, Any] = {name: value for name, (_, value) in AS_TEXT.items()}
    assert parse(ENVIRONMENT) == Options(**read)
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


@pytest.mark.parametrize("asked", [False, True])
def test_disabled(asked: bool) -> None:
    texts = ["1", "true", "YES", "on"] if asked else ["", "0", "false", "No", "off"]
    assert [is_disabled({"FXREMAT_DISABLE": text}) for text in texts] == [asked] * len(texts)
    assert not is_disabled({})


def test_disable_with_nonsense() -> None:
    with pytest.raises(InvalidOption, match="FXREMAT_DISABLE"):
        is_disabled({"FXREMAT_DISABLE": "perhaps"})


def test_options_are_plain_data() -> None:
    options = parse(memory_budget="8GiB", inductor={"max_autotune": [True]})
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options
    assert hash(options) == hash(parse(memory_budget="8GiB"))
    assert options != parse(memory_budget="8GiB")
    assert options.inductor == (("max_autotune", [True]),)


def test_every_option_is_described(golden: Golden) -> None:
    assert all(row.type and row.default and row.doc for row in list_options())
    golden(options_table())
