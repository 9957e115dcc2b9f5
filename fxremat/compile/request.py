"""What is asked of a graph: bytes at most, and how to go about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from fxremat.compat.absent.pretending import CUDA
from fxremat.compat.dynamo import more_follow
from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import places_in_joint, storage_key
from fxremat.compile.session import Ledger
from fxremat.core.problem import COPY_LATENCY_US, Copies
from fxremat.cost.cards import Card, absent_card
from fxremat.cost.cuda_scratch import cublas_bytes
from fxremat.cost.device import device_spec
from fxremat.memory.allocator import AllocatorSettings, settings_of_environment
from fxremat.memory.allocator.rules import SEGMENT_STEP_BYTES, round_up
from fxremat.memory.segments import allocate_cublas
from fxremat.options import Options, machine_memory_bytes
from fxremat.passes.memory_estimation import nbytes
from fxremat.runtime import accumulation, measure_copy_speed
from fxremat.runtime.host_memory import is_on

log = logging.getLogger(__name__)

BUDGET_MARGIN, BUDGET_STEPS = 0.03, 64
"""Of a budget that nobody asked for: what is left to others, and to how many parts of the device's
memory it is rounded."""


@dataclass(frozen=True)
class Request:
    """What is asked of one graph. All that a plan depends on, and nothing else.

    ``held_bytes`` of the budget belong to other graphs of the model, and to what no graph sees;
    ``between_bytes`` to what runs between its forward and its backward, ``tuning_bytes`` to the
    first step, in which kernels are tuned.
    ``wanted_bytes`` is what this graph should make do with if it can, because more graphs follow.
    ``copies`` is what moving values takes; None where nothing is to move. ``link_bytes_per_s`` is
    what a rank sends to others; None: as the device's name says. With the objective
    "energy" a plan may take ``most_time`` times what running every op once takes. ``variants``
    are names of rules (None: all), ``disabled`` names of passes that are left out
    (`fxremat.option_values.PASSES`). By their places in the joint graph, ``accumulated`` are the
    arguments whose gradients are added to their ``grad`` in the backward, and ``parameters`` those
    that are parameters. Where what it is given and gives ``is_passed_on``, others drop that as soon
    as the graph, or the next one, has it. ``card`` is the name of one that is planned for although
    it is not here; None: what is here.
    ``allocator`` is how torch's allocator is set; None where the device has none, or one that is
    not modelled. ``count`` is what the budget counts.
    """

    budget_bytes: int | None = None
    held_bytes: int = 0
    between_bytes: int = 0
    tuning_bytes: int = 0
    wanted_bytes: int | None = None
    executor: str = "inductor"
    solver: str = "auto"
    solver_time_limit: float | None = None
    op_times: Literal["roofline", "measured"] = "roofline"
    verify: bool = True
    copies: Copies | None = None
    link_bytes_per_s: int | None = None
    objective: Literal["time", "energy"] = "time"
    most_time: float | None = None
    variants: tuple[str, ...] | None = None
    allow_lossy: bool = False
    disabled: tuple[str, ...] = ()
    accumulated: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    is_passed_on: bool = False
    card: str | None = None
    allocator: AllocatorSettings | None = None
    count: Literal["allocated", "reserved"] = "allocated"

    @property
    def own_budget(self) -> int | None:
        """Bytes left for this graph; None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.beside_bytes

    @property
    def beside_bytes(self) -> int:
        """Bytes of the budget that are not the graph's, in the step that needs most of them."""
        return self.held_bytes + self.tuning_bytes

    @property
    def aim(self) -> int | None:
        """Bytes that plans are made for: what is wanted, else what is left."""
        return self.own_budget if self.wanted_bytes is None else self.wanted_bytes

    @property
    def compiled(self) -> bool:
        """Whether Inductor generates code for the graph."""
        return self.executor == "inductor"


def device_of_inputs(inputs: Sequence[Any]) -> torch.device:
    """The accelerator that an input lies on, else the CPU."""
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def request_for(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    ledger: Ledger,
    place: tuple[int, int | None],
    around_bytes: int = 0,
) -> Request:
    """What to ask for this graph, given what other graphs of the model hold.

    ``place`` is its frame and the compilation of that (`compat.current_compilation`).
    ``around_bytes`` are held around it: they count where nothing else says what is there.

    The reserve is held beside the graph like they are, so that peaks and the least budget that
    an error names count it: they are compared with the whole budget, and with what is measured.
    A graph that ends in a graph break, or in a split for DDP, should leave half of what is left to
    those that follow.
    """
    card = absent_card()
    device = device_of_inputs(inputs) if card is None else CUDA
    allocator = _allocator(options, device)
    budget = _budget(options, device, card)
    if device.type == "cuda" and card is None:
        allocate_cublas(device)  # whoever counts or times from now on finds its workspaces
    held = _held_bytes(options, device, inputs, card, ledger, place)
    if options.reserve is None and device.type != "cuda":
        held += around_bytes
    tuning = _tuning_bytes(options, device, card)
    more = more_follow(gm) and ledger.is_last(place[0])
    request = Request(
        budget_bytes=budget,
        held_bytes=held,
        tuning_bytes=tuning,
        wanted_bytes=(budget - held - tuning) // 2 if more and budget is not None else None,
        executor=options.executor,
        solver=options.solver,
        solver_time_limit=options.solver_time_limit,
        op_times=_op_times(options) if card is None else "roofline",
        verify=options.verify,
        copies=copies_of(options, device, card),
        link_bytes_per_s=options.link_bandwidth,
        objective="energy" if options.objective == "energy" else "time",
        most_time=options.most_time,
        variants=options.variants,
        allow_lossy=options.allow_lossy,
        disabled=options.disable_passes,
        card=None if card is None else card.name,
        allocator=allocator,
        count=_count(options, allocator),
    )
    return for_inputs(request, inputs)


def for_inputs(request: Request, inputs: Sequence[Any]) -> Request:
    """The same request for a graph with these inputs."""
    return replace(
        request,
        accumulated=_places(inputs, accumulation.will_be_added),
        parameters=_places(inputs, lambda x: isinstance(x, nn.Parameter)),
    )


def _places(inputs: Sequence[Any], which: Callable[[Any], bool]) -> tuple[int, ...]:
    """Which inputs of the joint graph stand for ``which`` inputs of the graph."""
    pairs = zip(inputs, places_in_joint(inputs), strict=True)
    return tuple(place for one, places in pairs if which(one) for place in places)


def _allocator(options: Options, device: torch.device) -> AllocatorSettings | None:
    """The settings of the environment; None for an allocator that is not modelled.

    Raises `InvalidOption` where its reserved bytes are asked for.
    """
    if device.type != "cuda":
        return None
    try:
        return settings_of_environment()
    except ValueError as error:
        if options.count == "reserved":
            raise
        log.warning("reserved memory is not known, the budget counts allocated bytes: %s", error)
        return None


def _count(
    options: Options, allocator: AllocatorSettings | None
) -> Literal["allocated", "reserved"]:
    """Reserved bytes where they are known, unless it is asked otherwise."""
    known = allocator is not None and options.executor == "inductor"
    return "reserved" if known and options.count != "allocated" else "allocated"


def _op_times(options: Options) -> Literal["roofline", "measured"]:
    """Where times come from. Ranks measure differently, and their plans have to be equal."""
    if options.op_times != "auto":
        return "measured" if options.op_times == "measured" else "roofline"
    group = torch.distributed
    several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
    return "roofline" if several else "measured"


def copies_of(options: Options, device: torch.device, card: Card | None = None) -> Copies:
    """What moving weights and activations takes; the latter move where that is asked for."""
    spec = device_spec(device) if card is None else card.spec
    rates = (spec.host_bytes_per_s,) * 2
    if options.host_bandwidth is not None:
        rates = (float(options.host_bandwidth),) * 2
    elif options.op_times == "measured" and card is None:
        rates = measure_copy_speed(device)
    cap = options.host_memory_budget
    out, back = (rate / 1e6 for rate in rates)
    cap = machine_memory_bytes() // 2 if cap is None else cap
    return Copies(out, back, COPY_LATENCY_US, cap, only_host=not options.offload)


def _budget(options: Options, device: torch.device, card: Card | None) -> int | None:
    """The bytes that were asked for; on CUDA else nearly all that torch can have."""
    if options.memory_budget is not None or device.type != "cuda":
        return options.memory_budget
    return _free_bytes(device) if card is None else card.usable_bytes


def _free_bytes(device: torch.device) -> int:
    """What this process has of the device, and may have, less a margin.

    Rounded coarsely: what other programs take now makes no other plan, which no cache would know.
    """
    free, total = torch.cuda.mem_get_info(device)
    of_all = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    there = min(torch.cuda.memory_reserved(device) + free, int(of_all * total))
    step = total // BUDGET_STEPS
    return int((1 - BUDGET_MARGIN) * there) // step * step or there


def _held_bytes(
    options: Options,
    device: torch.device,
    inputs: Sequence[Any],
    card: Card | None,
    ledger: Ledger,
    place: tuple[int, int | None],
) -> int:
    """How many bytes are held by other graphs, and by what no graph sees.

    Each ``grad`` that gradients are to be added to is held; those that are there are allocated.
    What no graph sees is rounded up: a few bytes more make no other plan, unknown to caches.
    """
    grads = accumulation.expected_bytes(device)
    if options.reserve is not None or device.type != "cuda":
        return ledger.held_by_others(*place) + (options.reserve or 0) + grads
    if card is not None:
        return ledger.held_by_others(*place) + 2 * cublas_bytes(card.capability) + grads
    missing = accumulation.expected_bytes(device, missing_only=True)
    unseen = round_up(unseen_bytes(inputs, device), SEGMENT_STEP_BYTES)
    return ledger.held_beside(*place, unseen) + missing


def _tuning_bytes(options: Options, device: torch.device, card: Card | None) -> int:
    """What Triton writes over before each run while it tunes kernels: the whole cache."""
    if options.reserve is not None or device.type != "cuda" or options.executor != "inductor":
        return 0
    if card is not None:
        return card.cache_bytes
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def unseen_bytes(inputs: Sequence[Any], device: torch.device) -> int:
    """Bytes that are allocated now on CUDA, and are no inputs; with those of cuBLAS."""
    return max(0, torch.cuda.memory_allocated(device) - _input_bytes(inputs, device))


def _input_bytes(inputs: Sequence[Any], device: torch.device) -> int:
    """Of the storages of inputs, what the graph counts: from first to last elements."""
    storages: dict[int, int] = {}
    whole: dict[int, int] = {}
    for x in inputs:
        if isinstance(x, torch.Tensor) and is_on(x, device):
            key = storage_key(x)
            storages[key] = storages.get(key, 0) + nbytes(x)
            whole[key] = size_bound(x.untyped_storage().nbytes())
    return sum(min(counted, whole[key]) for key, counted in storages.items())
