"""``torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})``.

The backend is Inductor's own compiler with our partitioner and our ordering pass in its
configuration; all of Inductor stays. With ``executor="aot_eager"`` the transformed graphs run
as they are, node by node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxremat import compat
from fxremat.compiling import session
from fxremat.compiling.partitioner import Partitioner
from fxremat.compiling.request import Request
from fxremat.core.problem import COPY_LATENCY_US, Copies
from fxremat.cost.device import device_spec
from fxremat.options import Options, disabled, machine_memory_bytes, parse_options
from fxremat.passes.held_order import Fence, WriteResults
from fxremat.report.files import prepare_folder, write_report
from fxremat.report.report import Report
from fxremat.runtime import in_flight, measure_copy_speed
from fxremat.runtime.gradients import accumulation
from fxremat.runtime.in_flight import Promise, watch_in_flight
from fxremat.version import build

log = logging.getLogger(__name__)


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _input_bytes(inputs: Sequence[Any], device: torch.device) -> int:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.device.type == device.type]
    storages = {compat.storage_key(x): x for x in tensors}
    return sum(compat.size_bound(x.untyped_storage().nbytes()) for x in storages.values())


def _limits(
    options: Options, device: torch.device, inputs: Sequence[Any]
) -> tuple[int | None, int]:
    """The budget, and how many bytes of it are held by what the graph cannot see.

    Each ``grad`` that gradients are to be added to is held; those that are there are allocated.
    """
    grads = accumulation.expected_bytes(device)
    if device.type != "cuda":
        return options.memory_budget, (options.reserve or 0) + grads
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0]
    idle = torch.cuda.memory_reserved(device) - allocated
    unseen = max(0, allocated - _input_bytes(inputs, device))
    missing = accumulation.expected_bytes(device, missing_only=True)
    reserve = unseen + missing if options.reserve is None else options.reserve + grads
    return options.memory_budget or allocated + idle + free, reserve


def copies_of(options: Options, device: torch.device) -> Copies:
    """What moving weights and activations takes; the latter move where that is asked for."""
    rates = (device_spec(device).host_bytes_per_s,) * 2
    if options.host_bandwidth is not None:
        rates = (float(options.host_bandwidth),) * 2
    elif options.op_times == "measured":
        rates = measure_copy_speed(device)
    cap = options.host_memory_budget
    out, back = (rate / 1e6 for rate in rates)
    cap = machine_memory_bytes() // 2 if cap is None else cap
    return Copies(out, back, COPY_LATENCY_US, cap, only_host=not options.offload)


def _request(
    gm: fx.GraphModule, options: Options, inputs: Sequence[Any], ledger: session.Ledger, frame: int
) -> Request:
    """What to ask for this graph, given what other graphs of the model hold.

    The reserve is held beside the graph like they are, so that peaks and the least budget that
    an error names count it: they are compared with the whole budget, and with what is measured.
    A graph that ends in a graph break should leave half of what is left to those that follow.
    """
    budget, reserve = _limits(options, _device(inputs), inputs)
    held = ledger.held_by_others(frame) + reserve
    more = compat.ends_in_graph_break(gm) and ledger.is_last(frame)
    return Request(
        budget_bytes=budget,
        held_bytes=held,
        wanted_bytes=(budget - held) // 2 if more and budget is not None else None,
        executor=options.executor,
        solver=options.solver,
        solver_time_limit=options.solver_time_limit,
        op_times=options.op_times,
        verify=options.verify,
        copies=copies_of(options, _device(inputs)),
        objective="energy" if options.objective == "energy" else "time",
        most_time=options.most_time,
        variants=options.variants,
        allow_lossy=options.allow_lossy,
        disabled=options.disable_passes,
        accumulated=tuple(i for i, x in enumerate(inputs) if accumulation.will_be_added(x)),
    )


def _total_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _key(gm: fx.GraphModule, inputs: Sequence[Any], partitioner: Partitioner) -> str:
    """Names the graph, its inputs and all that a plan depends on."""
    shapes = [
        (tuple(map(str, x.shape)), tuple(map(str, x.stride())), str(x.dtype), str(x.device),
         x.requires_grad)
        if isinstance(x, torch.Tensor) else str(x)
        for x in inputs
    ]  # fmt: skip
    gradients = torch.is_grad_enabled()  # without them nothing is planned
    return session.digest(gm.code, shapes, gradients, partitioner.uuid(), torch.__version__)


def _patches(options: Options, partitioner: Partitioner, mode: str | None) -> dict[str, Any]:
    """Inductor's configuration: the user's, with our partitioner and our ordering passes."""
    user = compat.inductor_patches(mode, options.inductor_options())

    def theirs(name: str) -> Any:
        return user.get(name, getattr(compat.inductor_config, name))

    # Reusing a buffer holds it from its last use to its next: the peak would exceed the plan's.
    exact = {} if partitioner.request.budget_bytes is None else {"allow_buffer_reuse": False}
    if options.offload and user.get(compat.CUDAGRAPHS):
        log.warning("cudagraphs are off: a graph that moves values to host memory has none")
        user = {**user, compat.CUDAGRAPHS: False}
    return {
        **exact,
        **user,
        "custom_partitioner_fn": partitioner,
        compat.POST_GRAD_PASS: WriteResults(
            build(), compat.chain_passes(theirs(compat.POST_GRAD_PASS))
        ),
        compat.SCHEDULER_PASS: Fence(build(), theirs(compat.SCHEDULER_PASS)),
    }


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, partitioner: Partitioner,
    mode: str | None,
) -> Callable[..., Any]:  # fmt: skip
    if options.executor == "aot_eager":
        return compat.compile_with_aot_eager(gm, inputs, partitioner)
    return compat.compile_with_inductor(gm, inputs, _patches(options, partitioner, mode))


@contextmanager
def _written(options: Options, current: session.Session) -> Iterator[None]:
    """The report in files, where that is asked for; a refused budget has one too."""
    if options.report is None:
        yield
        return
    prepare_folder(options.report)
    try:
        yield
    finally:
        if current.report is not None:
            write_report(options.report, current.report)


def fxremat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one graph for a byte budget; the entry point that torch.compile finds by name.

    Raises `InvalidOption`, `InfeasibleBudget` or `VerificationFailed`; through torch.compile
    they arrive as ``BackendCompilerFailed.inner_exception``.
    """
    device = _device(example_inputs)
    parsed = parse_options(options, device_total_bytes=_total_bytes(device))
    if disabled():
        patches = compat.inductor_patches(mode, parsed.inductor_options())
        return compat.compile_with_inductor(gm, example_inputs, patches)
    ledger, frame = session.ledger(options), compat.current_frame()
    request = _request(gm, parsed, example_inputs, ledger, frame)
    partitioner = Partitioner(request, build())
    key = _key(gm, example_inputs, partitioner)
    current = session.begin()
    with _written(parsed, current):
        compiled = _compile(gm, example_inputs, parsed, partitioner, mode)
        if current.report is not None:
            session.store(key, current.report)
        else:
            current.report = session.load(key, current.graph)
    report = current.report
    if report is None:
        return compiled
    ledger.record(frame, report)
    session.STATE.reports.append(report)
    log.info("%s", report.summary())
    promise = _promise(report, device, request, ledger.held_by_others(frame))
    return compiled if promise is None else watch_in_flight(compiled, promise)


def _promise(report: Report, device: torch.device, request: Request, others: int) -> Promise | None:
    """What the plan promises of the graph; None without a budget."""
    if request.budget_bytes is None:
        return None
    return Promise(
        graph=f"graph {report.graph}",
        device=device,
        budget_bytes=request.budget_bytes,
        peak_bytes=report.predicted_peak_bytes - report.held_bytes,
        held_bytes=report.held_bytes,
        reserve_bytes=request.held_bytes - others,
        saved_bytes=report.saved_bytes,
    )


def plan_only(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Report | None]:
    """Plan one graph as `fxremat` would, but run it node by node instead of compiling it."""
    device = _device(example_inputs)
    parsed = parse_options(options, device_total_bytes=_total_bytes(device))
    ledger, frame = session.ledger(None), compat.current_frame()
    request = _request(gm, parsed, example_inputs, ledger, frame)
    partitioner = Partitioner(request, build())
    current = session.begin()
    with _written(parsed, current):
        if parsed.executor == "aot_eager":
            compiled = compat.compile_with_aot_eager(gm, example_inputs, partitioner)
        else:
            patches = _patches(parsed, partitioner, None)
            compiled = compat.trace_as_inductor(gm, example_inputs, patches, partitioner)
    if current.report is not None:
        ledger.record(frame, current.report)
    return compiled, current.report


def _reset() -> None:
    """Forget what was compiled; called by ``torch._dynamo.reset()``."""
    session.reset()
    in_flight.forget()


fxremat.reset = _reset  # type: ignore[attr-defined]
