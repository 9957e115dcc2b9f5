"""One graph, as Dynamo gives it: compiled by Inductor with our partitioner, or only planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from fxremat.compat.absent.tracing import generating as torch_generating
from fxremat.compat.absent.tracing import trace_for_absent
from fxremat.compat.compilers import (
    compile_with_aot_eager,
    compile_with_inductor,
    trace_as_inductor,
)
from fxremat.compat.configuration import (
    CUDAGRAPHS,
    PARTITIONER,
    POST_GRAD_PASS,
    SCHEDULER_PASS,
    inductor_config,
    inductor_patches,
    passes_of,
)
from fxremat.compat.inductor.kernels import look_for_vectors
from fxremat.compile import session
from fxremat.compile.partitioner import Partitioner
from fxremat.compile.request import Request, device_of_inputs
from fxremat.cost.device import absent_card
from fxremat.options import Options
from fxremat.passes.fixed_order import Fence, WriteResults
from fxremat.report.files import prepare_folder, tell_report, write_report
from fxremat.runtime.host_memory import is_host
from fxremat.version import build

log = logging.getLogger(__name__)


def total_bytes(device: torch.device) -> int | None:
    """Of the device, or of the card that is planned for; None for the CPU."""
    card = absent_card()
    if card is not None:
        return card.usable
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def report_key(gm: fx.GraphModule, inputs: Sequence[Any], request: Request) -> str:
    """Names the graph, its inputs and all that a plan depends on."""
    gradients = torch.is_grad_enabled()  # without them nothing is planned
    sizes = session.sizes_of(inputs)
    plan = Partitioner(request).uuid()
    return session.digest(gm.code, sizes, gradients, plan, torch.__version__)


NO_POOLS = "they keep memory of their own, which no plan counts; set no memory_budget to use them"


def patches_for(
    options: Options, request: Request, mode: str | None = None, inputs: Sequence[Any] = ()
) -> dict[str, Any]:
    """Inductor's configuration: the user's, with our ordering passes."""
    user = inductor_patches(mode, dict(options.inductor))

    def theirs(name: str) -> Any:
        return user.get(name, getattr(inductor_config, name))

    # Reusing a buffer holds it from its last use to its next: the peak would exceed the plan's.
    exact = {} if request.budget.limit is None else {"allow_buffer_reuse": False}
    moves = options.offload or any(isinstance(x, torch.Tensor) and is_host(x) for x in inputs)
    # They allocate in pools of their own, beside the segment that the plan is cut from.
    counted = options.memory_budget is not None and request.budget.allocator is not None
    if (moves or counted) and theirs(CUDAGRAPHS):
        why = "a graph that moves values to host memory has none" if moves else NO_POOLS
        log.warning("fxremat: cudagraphs are off: %s", why)
        user = {**user, CUDAGRAPHS: False}
    elif absent_card() is None and device_of_inputs(inputs).type == "cpu":
        user = {**user, CUDAGRAPHS: False}  # loops would be put in another order for them
    return {
        **exact,
        **user,
        POST_GRAD_PASS: WriteResults(build(), passes_of(theirs(POST_GRAD_PASS))),
        SCHEDULER_PASS: Fence(build(), passes_of(theirs(SCHEDULER_PASS))),
    }


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request, patches: dict[str, Any]
) -> Callable[..., Any]:
    if not request.compiled:
        return compile_with_aot_eager(gm, inputs, Partitioner(request))
    if device_of_inputs(inputs).type == "cpu":
        look_for_vectors()  # while the graph is traced
    return compile_with_inductor(gm, inputs, {**patches, PARTITIONER: Partitioner(request)})


@contextmanager
def reporting(options: Options, current: session.Session) -> Iterator[None]:
    """The report in logs and files, where that is asked for; a refused budget has one too."""
    if options.report is not None:
        prepare_folder(options.report)
    try:
        yield
    finally:
        if current.report is not None:
            tell_report(current.report)
            if options.report is not None:
                write_report(options.report, current.report)


def traced(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The joint graph for ``partition``, as Inductor would have it here, or on an absent card."""
    card = absent_card()
    if card is None:
        return trace_as_inductor(gm, inputs, patches, partition)
    return trace_for_absent(gm, inputs, patches, partition, card.properties())


def generating(module: fx.GraphModule, patches: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside, code can be generated for a joint graph that was traced by `traced`."""
    card = absent_card()
    return torch_generating(module, patches, None if card is None else card.properties())
