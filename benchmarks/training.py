"""A training step of one variant, in this process: compile it, time it, measure it."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .models import with_checkpoint
from .nets.layers import Network
from .ways import Variant

IMPOSSIBLE_BYTES = 2**20
WARM_STEPS = 2


class Infeasible(Exception):
    """fxremat refused the budget; `minimum_bytes` is the least it names."""

    def __init__(self, message: str, minimum_bytes: int | None) -> None:
        super().__init__(message)
        self.message, self.minimum_bytes = message, minimum_bytes


@dataclass(frozen=True)
class Peak:
    """Measured bytes of a step: before it, and at most during it; more of CUDA's allocator.

    ``reserved_bytes`` is the most that it held, with nothing cached before. ``first_bytes`` is the
    most that was allocated until the first step was done, compiling included. ``retries`` is how
    often it gave back what it had cached because the device was full, in the whole process.
    """

    start_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    first_bytes: int | None = None
    retries: int | None = None


@dataclass
class Training:
    """A model, its arguments and the function that maps them to the loss."""

    model: nn.Module
    arguments: tuple[Any, ...]
    function: Callable[..., Any]
    compile_seconds: float = 0.0
    report: dict[str, Any] | None = None
    explanation: str = ""
    first_bytes: int | None = None
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device

    def run(self) -> Tensor:
        """Forward and backward; the gradients are left behind."""
        loss: Tensor = self.function(*self.arguments)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> Tensor:
        """Drop the gradients, then forward and backward."""
        self.model.zero_grad(set_to_none=True)
        return self.run()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_steps(self, count: int) -> list[float]:
        """Seconds of `count` steps, after one that is not counted."""
        self.step()
        return [self._time_step() for _ in range(count)]

    def _time_step(self) -> float:
        self.synchronize()
        start = time.perf_counter()
        self.step()
        self.synchronize()
        return time.perf_counter() - start

    def measure(self) -> Peak:
        """Peak of one step; call it after the warm-up steps."""
        from fxremat.memory.measured_peak import measure_peak

        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.step()  # a second step reserves more, where the first has left pieces
            self.model.zero_grad(set_to_none=True)
        result = measure_peak(self.run, held=(self.model, self.arguments))
        return Peak(
            result.start_bytes,
            result.peak_bytes,
            result.reserved_bytes,
            self.first_bytes,
            self._retries(),
        )

    def _retries(self) -> int | None:
        if self.device.type != "cuda":
            return None
        retries: int = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        return retries

    def gradients(self, seed: int) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of a step under `seed`, on the CPU, by position."""
        torch.manual_seed(seed)
        loss = self.step()
        return loss.item(), collect_gradients(self.model)

    def train(self, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[float]:
        """The losses of `steps` training steps, one by one."""
        for _ in range(steps):
            loss = self.step()
            optimizer.step()
            yield loss.item()


def collect_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients on the CPU; the number of the parameter is the key."""
    parameters = enumerate(model.parameters())
    return {str(i): p.grad.detach().cpu().clone() for i, p in parameters if p.grad is not None}


def gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference in any gradient, relative to the largest entry of that gradient.

    A gradient that is zero but for rounding is compared with a thousandth of the largest entry
    of all gradients instead.
    """
    if actual.keys() != expected.keys():
        return float("inf")
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
    errors = (
        (actual[key].float() - expected[key].float()).abs().max().item()
        / max(expected[key].abs().max().item(), floor)
        for key in expected
    )
    return max(errors)


def prepare(
    variant: Variant,
    model: nn.Module,
    arguments: tuple[Any, ...],
    budget: int | None = None,
    reserve: int | None = None,
) -> Training:
    """Compile `model` the variant's way and run the warm-up steps.

    For fxremat, `budget` is the number of bytes, None the least it can do, and `reserve` its
    option of that name; raises `Infeasible`.
    """
    if variant.kind == "fxremat" and variant.blocks:
        return _prepare_blocks(model, arguments, budget, reserve, dict(variant.options))
    if variant.kind == "fxremat":
        return _prepare_fxremat(model, arguments, budget, reserve, dict(variant.options))
    return _warm(Training(model, arguments, _compiled(variant, model)))


def _compiled(variant: Variant, model: nn.Module) -> Callable[..., Any]:
    if variant.kind == "eager":
        return model
    if variant.kind == "blocks":
        _compile_blocks(model)
        return model
    if variant.kind == "knob":
        from fxremat.compat.configuration import functorch_config

        functorch_config.activation_memory_budget = variant.value or 0.0
    if variant.kind in ("checkpoint", "selective"):
        assert isinstance(model, Network)
        model = with_checkpoint(model, selective=variant.kind == "selective")
    return torch.compile(model)


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Inside, a refused budget is raised as `Infeasible`."""
    try:
        yield
    except Exception as error:
        infeasible = infeasible_budget(error)
        if infeasible is None:
            raise
        raise infeasible from error


def _compile_blocks(model: nn.Module) -> None:
    """Each block, and what comes after them, by itself."""
    assert isinstance(model, Network)
    for parent, name in model.units():
        getattr(parent, name).compile()


def _prepare_blocks(
    model: nn.Module,
    arguments: tuple[Any, ...],
    budget: int | None,
    reserve: int | None,
    more: dict[str, Any],
) -> Training:
    """The same with fxremat, after a look at the step, which counts as compiling."""
    import fxremat

    _compile_blocks(model)
    start = time.perf_counter()
    with _refusals_told():
        options = {"reserve": reserve, **more}
        fxremat.prepare(model, *arguments, memory_budget=budget, options=options)
        looked = time.perf_counter() - start
        training = _warm(Training(model, arguments, model))
    training.compile_seconds += looked
    return training


def _warm(training: Training) -> Training:
    """The first step compiles; what it takes beyond a later step is the compile time."""
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(training.device)
    start = time.perf_counter()
    training.step()
    training.synchronize()
    first = time.perf_counter() - start
    if training.device.type == "cuda":
        training.first_bytes = torch.cuda.max_memory_allocated(training.device)
    training.compile_seconds = max(0.0, first - min(training.time_steps(WARM_STEPS - 1)))
    return training


def _prepare_fxremat(
    model: nn.Module,
    arguments: tuple[Any, ...],
    budget: int | None,
    reserve: int | None,
    more: dict[str, Any],
) -> Training:
    if budget is None:
        budget = find_minimum(model, arguments, reserve, more)
    with _refusals_told():
        return compile_fxremat(model, arguments, budget, reserve, more)


def compile_fxremat(
    model: nn.Module,
    arguments: tuple[Any, ...],
    budget: int,
    reserve: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> Training:
    """Compile `model` with fxremat under `budget` bytes and `more` options, and warm up."""
    from fxremat import reports
    from fxremat.backend import fxremat  # itself, not its name: works without installation

    torch.compiler.reset()
    options: dict[str, Any] = {"memory_budget": budget, "reserve": reserve, **(more or {})}
    function = torch.compile(model, backend=fxremat, options=options)
    training = _warm(Training(model, arguments, function))
    report = reports()[-1]
    training.report = report_fields(report)
    training.explanation = str(report)
    return training


def find_minimum(
    model: nn.Module,
    arguments: tuple[Any, ...],
    reserve: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """The least bytes fxremat names when it is asked for the impossible."""
    impossible = IMPOSSIBLE_BYTES + (reserve or 0)
    try:
        compile_fxremat(model, arguments, impossible, reserve, more)
    except Exception as error:
        infeasible = infeasible_budget(error)
        if infeasible is None or infeasible.minimum_bytes is None:
            raise
        return infeasible.minimum_bytes
    return impossible


def infeasible_budget(error: BaseException | None) -> Infeasible | None:
    """The InfeasibleBudget inside an error of torch.compile, if there is one."""
    from fxremat.errors import InfeasibleBudget

    while error is not None:
        if isinstance(error, InfeasibleBudget):
            return Infeasible(str(error), error.minimum_bytes)
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


NUMBERS = (
    "predicted_peak_bytes",
    "predicted_reserved_bytes",
    "count",
    "held_bytes",
    "resident_bytes",
    "planned_peak_bytes",
    "minimum_peak_bytes",
    "store_all_peak_bytes",
    "budget_bytes",
    "time_overhead",
    "dry_runs",
    "seconds",
)


def report_fields(report: Any) -> dict[str, Any]:
    """The plain facts of a report, for JSON.

    ``time_overhead`` is what the plan adds to store-all's time, as a part of it; ``seconds`` those
    of each stage; ``variants`` how many sites of each rule are taken, and ``variant_names`` which.
    """
    taken = [row.what for row in report.variants]
    numbers = {name: getattr(report, name) for name in NUMBERS}
    return {**numbers, "variants": dict(Counter(map(rule_of, taken))), "variant_names": taken}


def rule_of(variant: str) -> str:
    """The rule of a variant, by the variant's name: the first word of it."""
    found = re.match(r"\w+", variant)
    assert found is not None, variant
    return found.group()
