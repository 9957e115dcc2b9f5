"""Every option: type, default, environment variable and meaning, each in one place.

An option given to ``torch.compile(..., options={...})`` comes before its environment variable,
and that before the default. None, where an option allows it, means "as if not set" and also
hides the environment variable. An empty environment variable counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from fxremat import option_values as values
from fxremat.errors import InvalidOption, UnknownOption
from fxremat.option_values import Given
from fxremat.sizes import format_bytes

if TYPE_CHECKING:
    from fxremat.memory.optimizers import OptimizerLike

EXECUTORS = ("inductor", "aot_eager")
OP_TIMES = ("auto", "roofline", "measured")
DISABLE_VARIABLE = "FXREMAT_DISABLE"
BUDGET_VARIABLE = "FXREMAT_MEMORY_BUDGET"


def _option(
    default: object,
    read: Callable[[Given], object],
    kind: str,
    doc: str,
    unset: str | None = None,
    plain: bool = True,
) -> Any:
    """A field of `Options`; ``unset`` describes the default where ``repr`` would not.

    Values that are ``plain`` can be hashed, and given as text by a variable of the environment.
    """
    metadata = {"read": read, "type": kind, "doc": doc, "unset": unset, "plain": plain}
    return field(default=default, hash=None if plain else False, metadata=metadata)


def _variable(option: Field[Any]) -> str:
    """The environment variable of an option, "" where it has none."""
    return f"FXREMAT_{option.name.upper()}" if option.metadata["plain"] else ""


@dataclass(frozen=True)
class Options:
    """All options of one compilation, checked. Comparable and hashable.

    They can be pickled, unless one is an optimizer, which is held by a weak reference.
    """

    memory_budget: int | None = _option(
        None,
        values.read_budget,
        "bytes: int, '8GiB', '8GB', '80%' (of the device), or None",
        "Most bytes on the device at any moment of a training step.",
        unset="CUDA: nearly all that is free when compiling; elsewhere: no limit",
    )
    reserve: int | None = _option(
        None,
        values.read_reserve,
        "bytes, as memory_budget; may be 0",
        "Bytes of the budget to set aside for what fxremat does not count by itself. It counts the "
        "graph, what optimizers hold, and on CUDA also what is allocated already and what cuBLAS "
        "and kernel tuning take.",
        unset="0",
    )
    optimizer: OptimizerLike | None = _option(  # noqa: RUF009 (a reference is never changed)
        None,
        values.read_optimizer,
        "an optimizer, its class, a name such as 'adamw', or 'none'",
        "The optimizer of the parameters: its states and the temporary tensors of its step count.",
        unset="the optimizers that have parameters of the model when it is compiled",
    )
    count: str | None = _option(
        None,
        values.read_count,
        "'reserved' or 'allocated'",
        "Which bytes the budget limits: 'reserved' is all that torch's allocator takes from the "
        "device, including freed memory that it keeps; 'allocated' is what tensors take. On the "
        "CPU only 'allocated' is possible.",
        unset="CUDA: 'reserved'; elsewhere: 'allocated'",
    )
    enforce: bool = _option(
        False,
        values.read_enforce,
        "bool",
        "On CUDA: limit torch's allocator to the budget, for all code of the process, as long as a "
        "graph compiled for it lives. An out-of-memory error then says what the plan holds.",
    )
    inference: bool = _option(
        False,
        values.read_bool,
        "bool",
        "Apply the budget also to graphs that take no gradients, as in evaluation and generation: "
        "one that would take more raises InfeasibleBudget before it runs.",
    )
    arena: bool | None = _option(
        None,
        values.optional(values.read_bool),
        "bool",
        "Place the buffers of compiled graphs in one block of memory, at addresses that are "
        "decided with the plan.",
        unset="CUDA: True; elsewhere: False",
    )
    instances: int | None = _option(
        None,
        values.read_number_of_runs,
        "int or None",
        "How many forwards of one compiled part wait for their backward at the same time at most, "
        "as with equal blocks that are compiled one by one, or with micro-batches.",
        unset="the number of modules of this kind that are compiled in the model",
    )
    rank_timeout: float = _option(
        300.0,
        values.read_seconds,
        "seconds",
        "How long a rank waits for the plan of another rank that compiles the same graph.",
    )
    executor: str = _option(
        "inductor",
        lambda given: values.read_choice(given, EXECUTORS),
        "'inductor' or 'aot_eager'",
        "What runs the planned graphs: Inductor's kernels, or eager operators (to debug).",
    )
    solver: str = _option(
        "auto",
        values.read_solver,
        "'auto' or the name of a solver",
        "What decides which ops to recompute; 'auto' takes the best plan of all solvers that suit "
        "the graph.",
    )
    solver_time_limit: float | None = _option(
        None,
        values.optional(values.read_seconds),
        "seconds or None",
        "Stop solving after this time. A plan cut short by time may differ from run to run; it is "
        "cached on disk, so that the same graph gets it again.",
        unset="'auto': 0.33 s times the square root of the op count; other solvers: own limits",
    )
    offload: bool = _option(
        False,
        values.read_bool,
        "bool",
        "Move saved activations to host memory and back where that is faster than recomputing.",
    )
    host_memory_budget: int | None = _option(
        None,
        values.read_reserve,
        "bytes: int, '8GiB', '8GB', '50%' (of this machine), or None",
        "Most bytes of moved activations in host memory at any moment, for each process.",
        unset="half of this machine's memory",
    )
    host_bandwidth: int | None = _option(
        None,
        values.read_bandwidth,
        "bytes per second: int, '25GB', or None",
        "Bandwidth of copies to and from host memory, of each while the other direction is busy.",
        unset="from the name of the device; with op_times='measured', measured here",
    )
    link_bandwidth: int | None = _option(
        None,
        values.read_link,
        "bytes per second: int, '25GB', or None",
        "Bandwidth at which a rank sends to others in a collective, such as between nodes.",
        unset="from the name of the device, for ranks of one machine",
    )
    variants: tuple[str, ...] | None = _option(
        None,
        values.read_variants,
        "'all', 'none', or names",
        "Operator variants to choose from; `python -m fxremat variants` lists them.",
        unset="those without a star in docs/variants.md",
    )
    allow_lossy: bool = _option(
        False,
        values.read_bool,
        "bool",
        "Allow variants that store values inexactly. Gradients are then approximate.",
    )
    repeatable: tuple[str, ...] = _option(
        (),
        values.read_ops,
        "names of ops, as 'library::op'",
        "Custom ops that may run again in the backward. Others are tried: one that declares no "
        "writes and no random numbers runs twice on made-up data, and may run again if both agree.",
    )
    disable_passes: tuple[str, ...] = _option(
        (),
        values.read_passes,
        "names, of 'recompute', 'sums', 'inplace'",
        "Passes to leave out, to see what each gains: recomputing, adding gradients up where they "
        "are computed, overwriting inputs that are not read again.",
    )
    op_times: str = _option(
        "auto",
        lambda given: values.read_choice(given, OP_TIMES),
        "'auto', 'roofline' or 'measured'",
        "Where the times of ops come from: 'measured' once on this device, or computed from their "
        "shapes ('roofline'). 'auto' measures, unless torch.distributed has several ranks.",
    )
    verify: bool = _option(
        True,
        values.read_bool,
        "bool",
        "Verify every plan, and that every rewritten graph computes what the original does.",
    )
    report: str | None = _option(
        None,
        values.read_path,
        "path or None",
        "Folder for files about each graph, even if the budget is refused: problem, plan, report, "
        "a page that shows the step, and files for viewers.",
        unset="no report",
    )
    inductor: tuple[tuple[str, Any], ...] = _option(
        (),
        values.read_inductor,
        "mapping",
        "Options of Inductor, passed on as they are.",
        unset="{}",
        plain=False,
    )


def parse_options(
    mapping: Mapping[str, Any] | None,
    *,
    device_total_bytes: int | None,
) -> Options:
    """Check the options of a ``torch.compile`` call; raises `InvalidOption`.

    ``device_total_bytes`` is the memory of the accelerator, None on CPU: then a percentage is of
    this machine's memory, and no budget is too large.
    """
    mapping = {} if mapping is None else mapping
    options = {row.name: row for row in fields(Options)}
    for name in mapping:
        if name not in options:
            raise UnknownOption(str(name), mapping[name], tuple(options))
    read: dict[str, Any] = {}
    for name, row in options.items():
        variable = None if name in mapping else _variable(row)
        text = os.environ.get(variable, "") if variable else ""
        if name in mapping or text.strip():
            value = mapping.get(name, text)
            given = Given(name, value, variable, device_total_bytes)
            read[name] = row.metadata["read"](given)
    return _checked_together(Options(**read))


def _checked_together(options: Options) -> Options:
    budget, reserve = options.memory_budget, options.reserve
    lossy = values.lossy_among(options.variants or ())
    if lossy and not options.allow_lossy:
        expected = f"allow_lossy=True with it, because {lossy[0]} stores values inexactly"
        raise InvalidOption("variants", list(options.variants or ()), expected)
    if budget is not None and reserve is not None and reserve >= budget:
        expected = f"less than memory_budget, {format_bytes(budget)}"
        raise InvalidOption("reserve", reserve, expected)
    if options.count == "reserved" and options.executor == "aot_eager":
        expected = "'allocated' with executor='aot_eager': no dry run counts its reserved bytes"
        raise InvalidOption("count", options.count, expected)
    return options


def disabled() -> bool:
    """Whether ``FXREMAT_DISABLE=1`` asks to compile as if fxremat were not there."""
    text = os.environ.get(DISABLE_VARIABLE, "").strip()
    return bool(text) and values.read_bool(Given("disable", text, DISABLE_VARIABLE, None))


class OptionRow(NamedTuple):
    """One option, described; ``variable`` is empty where there is no environment variable."""

    name: str
    type: str
    default: str
    variable: str
    doc: str


def list_options() -> list[OptionRow]:
    """Every option, in the order of `Options`."""
    return [
        OptionRow(
            row.name,
            row.metadata["type"],
            row.metadata["unset"] or repr(row.default),
            _variable(row),
            row.metadata["doc"],
        )
        for row in fields(Options)
    ]
