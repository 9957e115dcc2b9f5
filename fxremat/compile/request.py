"""What is asked of a graph: bytes at most, and how to go about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fxremat.compat.absent.pretending import CUDA
from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import places_in_joint, storage_key
from fxremat.compile.constants import BUDGET_PARTS
from fxremat.core.constants import CALL_US
from fxremat.core.events import RunEvents
from fxremat.core.problem import Copies
from fxremat.cost.cuda_scratch import allocate_cublas, cublas_workspace
from fxremat.cost.device import Card, absent_card, device_spec
from fxremat.memory.allocator_settings import (
    SEGMENT_STEP_BYTES,
    AllocatorSettings,
    round_up,
    settings_of_environment,
)
from fxremat.memory.optimizers import OptimizerMemory, optimizer_memory
from fxremat.memory.reserved_bytes import CommonPool
from fxremat.option_values import machine_memory_bytes
from fxremat.options import Options
from fxremat.passes.memory_estimation import nbytes
from fxremat.runtime import accumulation
from fxremat.runtime.copies import measure_copy_speed
from fxremat.runtime.host_memory import is_on

log = logging.getLogger(__name__)
NOT_RESERVED = "fxremat: reserved memory is not known, the budget counts allocated bytes: %s"


@dataclass(frozen=True)
class Budget:
    """Bytes on the device, and which of them are not the graph's.

    Of ``limit`` bytes, ``held`` belong to other graphs of the model and to what no graph sees,
    ``between`` to what runs between this graph's forward and its backward, and ``autotune`` to the
    first step, in which kernels are tuned. The graph should make do with ``soft_limit`` if it can,
    as the part of a step that was chosen so. ``metric`` says which bytes of the allocator count.
    ``allocator`` holds its settings; None where the device has no such allocator, or one whose
    settings are not modelled. Of ``held``, ``coming`` are to come that nobody sees yet. When no
    graph runs and the optimizer steps, ``optimizer_step`` bytes are there: no budget is less. A
    ``part`` of a step is planned in allocated bytes: reserved ones are known of the whole step.
    """

    limit: int | None = None
    held: int = 0
    between: int = 0
    autotune: int = 0
    soft_limit: int | None = None
    metric: Literal["allocated", "reserved"] = "allocated"
    allocator: AllocatorSettings | None = None
    coming: int = 0
    optimizer_step: int = 0
    part: bool = False

    @property
    def own(self) -> int | None:
        """Bytes left for this graph; None without a limit."""
        return None if self.limit is None else self.limit - self.beside

    @property
    def beside(self) -> int:
        """Bytes that are not the graph's, in the step that needs most of them."""
        return self.held + self.autotune

    @property
    def for_step(self) -> int:
        """Bytes for all graphs of a step together, and all that is outside of them.

        None are left where the step of the optimizer takes more than the budget.
        """
        assert self.limit is not None
        return 0 if self.optimizer_step > self.limit else self.limit - self.autotune

    def least_for(self, nbytes: int) -> int:
        """The least budget that leaves so many bytes for a step."""
        return max(nbytes + self.autotune, self.optimizer_step)

    @property
    def counted_allocator(self) -> AllocatorSettings | None:
        """The allocator's settings where reserved bytes count; None where allocated ones do."""
        return self.allocator if self.metric == "reserved" and not self.part else None

    @property
    def target(self) -> int | None:
        """Bytes that plans are made for: the soft limit, else what is left."""
        return self.own if self.soft_limit is None else self.soft_limit


@dataclass(frozen=True)
class DeviceCosts:
    """What the device takes for its work, as far as it is not looked up there.

    ``card`` is the name of a card that is planned for although it is not here. ``copies`` says how
    fast values move to host memory and back; None where nothing is to move. ``link_bytes_per_s`` is
    what a rank sends to others; None: as the device's name says.
    """

    card: str | None = None
    copies: Copies | None = None
    link_bytes_per_s: int | None = None
    op_times: Literal["roofline", "measured"] = "roofline"


@dataclass(frozen=True)
class Policy:
    """How to plan and what may be done to the graph.

    ``variants`` are names of rules (None: all), ``disabled`` names of passes that are left out
    (`fxremat.option_values.PASSES`). Variants that are ``taken`` are tried before others are looked
    for; None: none are known. Calls of the custom ops ``repeatable`` may run again. With an
    ``arena``, buffers have planned addresses.
    """

    executor: str = "inductor"
    solver: str = "auto"
    solver_time_limit: float | None = None
    variants: tuple[str, ...] | None = None
    taken: tuple[str, ...] | None = None
    allow_lossy: bool = False
    disabled: tuple[str, ...] = ()
    verify: bool = True
    arena: bool = True
    repeatable: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphInputs:
    """What is known of the joint graph's arguments, by their places.

    The gradients of ``accumulated`` ones are added to their ``grad`` in the backward;
    ``parameters`` are parameters. Where arguments and results are ``passed_on``, others drop them
    as soon as this graph, or the next one, has them. If ``gradients_stay``, those of parameters
    live on under the next forward: then they lie outside of the arena, and are held.
    """

    accumulated: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    passed_on: bool = False
    gradients_stay: bool = False


@dataclass(frozen=True)
class Request:
    """All that the plan of one graph depends on, and nothing else."""

    budget: Budget = Budget()
    device: DeviceCosts = DeviceCosts()
    policy: Policy = Policy()
    inputs: GraphInputs = GraphInputs()

    @property
    def compiled(self) -> bool:
        """Whether Inductor generates code for the graph."""
        return self.policy.executor == "inductor"

    def with_budget(self, **changes: Any) -> Request:
        """The same request with these fields of the budget."""
        return replace(self, budget=replace(self.budget, **changes))

    def with_policy(self, **changes: Any) -> Request:
        """The same request with these fields of the policy."""
        return replace(self, policy=replace(self.policy, **changes))

    def with_inputs(self, **changes: Any) -> Request:
        """The same request with these fields of the inputs."""
        return replace(self, inputs=replace(self.inputs, **changes))


def as_asked(run: RunEvents, request: Request) -> RunEvents:
    """What a dry run says of a graph, with what the request says of its gradients and the arena.

    Where gradients are added in the backward, nothing has a planned address: the layout does not
    know which of them are there before.
    """
    run = replace(run, gradients_stay=request.inputs.gradients_stay)
    placed = request.policy.arena and not request.inputs.accumulated
    return run if placed else replace(run, forward_buffers=(), backward_buffers=())


def device_of_inputs(inputs: Sequence[Any]) -> torch.device:
    """The accelerator that an input lies on, else the CPU."""
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def request_for(
    inputs: Sequence[Any],
    options: Options,
    around: int = 0,
    neighbours: int = 0,
    weights: Sequence[torch.Tensor] = (),
) -> Request:
    """What to ask for this graph, where other graphs hold ``neighbours`` bytes now.

    ``around`` bytes are held around it: they count where nothing else says what is there. Of the
    model around it, the ``weights``, in its order, may be trained by an optimizer. Without any, the
    graph's are.

    The reserve and the states of optimizers are held beside the graph like they are, so that peaks
    and the least budget that an error names count them: they are compared with the whole budget,
    and with what is measured.
    """
    card = absent_card()
    device = device_of_inputs(inputs) if card is None else CUDA
    allocator = _allocator(options, device)
    budget = _budget(options, device, card)
    if device.type == "cuda" and card is None:
        allocate_cublas(device)  # whoever counts or times from now on finds its workspaces
    trained = optimizers_of(options, device_of_inputs(inputs), inputs, weights)
    coming = still_to_come(options, trained, device)
    held = _held_bytes(device, inputs, card, neighbours) + coming
    if device.type != "cuda":
        held += around
    tuning, metric = _size_of_tuning(options, device, card), _metric(options, allocator)
    if metric == "reserved" and allocator is not None:
        pool = _common_pool(device, [*weights, *inputs], inputs, card, tuning, trained)
        others = pool.others + neighbours * (card is not None) + (options.reserve or 0)
        pool = replace(pool, others=others)
        held, tuning = pool.reserved(allocator), 0
        held -= size_of_inputs(inputs, device_of_inputs(inputs))
    request = Request(
        Budget(
            limit=budget,
            held=held,
            autotune=tuning,
            metric=metric,
            allocator=allocator,
            coming=coming,
            optimizer_step=_optimizer_step(options, trained, inputs),
        ),
        DeviceCosts(
            card=None if card is None else card.name,
            copies=copies_of(options, device, card),
            link_bytes_per_s=options.link_bandwidth,
            op_times=_op_times(options) if card is None else "roofline",
        ),
        _policy(options, device),
    )
    return for_inputs(request, inputs)


def _policy(options: Options, device: torch.device) -> Policy:
    return Policy(
        executor=options.executor,
        solver=options.solver,
        solver_time_limit=options.solver_time_limit,
        variants=options.variants,
        repeatable=options.repeatable,
        allow_lossy=options.allow_lossy,
        disabled=options.disable_passes,
        verify=options.verify,
        arena=device.type == "cuda" if options.arena is None else options.arena,
    )


def for_inputs(request: Request, inputs: Sequence[Any]) -> Request:
    """The same request for a graph with these inputs."""
    return request.with_inputs(
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
        log.warning(NOT_RESERVED, error)
        return None


def _metric(
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
    return Copies(out, back, CALL_US, cap, only_host=not options.offload)


def _budget(options: Options, device: torch.device, card: Card | None) -> int | None:
    """The bytes that were asked for; on CUDA else nearly all that torch can have."""
    if options.memory_budget is not None or device.type != "cuda":
        return options.memory_budget
    return _free_memory(device) if card is None else card.usable


def _free_memory(device: torch.device) -> int:
    """What this process has of the device, and may have, less a margin.

    Rounded coarsely: what other programs take now makes no other plan, which no cache would know.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    there = min(torch.cuda.memory_reserved(device) + free, allowed)
    part = total // BUDGET_PARTS
    return there * (BUDGET_PARTS - 2) // BUDGET_PARTS // part * part or there


def optimizers_of(
    options: Options,
    device: torch.device,
    inputs: Iterable[Any],
    weights: Iterable[torch.Tensor] = (),
) -> OptimizerMemory:
    """What the optimizers take that step for the model's ``weights``, or for the graph's inputs."""
    known = list(weights)
    if options.optimizer is None or not known:  # graphs may be given copies of a model's weights
        known += [x for x in inputs if isinstance(x, torch.Tensor) and x.is_leaf]
    return optimizer_memory(options.optimizer, known, device)


def still_to_come(options: Options, trained: OptimizerMemory, device: torch.device) -> int:
    """What will be held that nobody sees yet: what the user says, and states of optimizers.

    On CUDA, the states that are there are seen.
    """
    states = trained.missing if device.type == "cuda" else trained.states
    return (options.reserve or 0) + states


def _optimizer_step(options: Options, trained: OptimizerMemory, inputs: Iterable[Any]) -> int:
    """Bytes on the device while the optimizer steps, as far as they are known; 0 without one."""
    if not trained.trained:
        return 0
    kept = (x for x in inputs if isinstance(x, torch.Tensor) and not x.requires_grad)
    others = {storage_key(x): nbytes(x) for x in kept}
    return trained.when_stepping + sum(others.values()) + (options.reserve or 0)


def _held_bytes(
    device: torch.device,
    inputs: Sequence[Any],
    card: Card | None,
    neighbours: int,
) -> int:
    """How many bytes are held by other graphs, and by what no graph sees.

    Each ``grad`` that gradients are to be added to is held; those that are there are allocated.
    What no graph sees is rounded up: a few bytes more make no other plan, unknown to caches.
    """
    grads = accumulation.expected_bytes(device)
    if device.type != "cuda":
        return neighbours + grads
    if card is not None:
        return neighbours + 2 * cublas_workspace(card.capability) + grads
    missing = accumulation.expected_bytes(device, missing_only=True)
    return round_up(unseen_bytes(inputs, device), SEGMENT_STEP_BYTES) + missing


def _common_pool(
    device: torch.device,
    ordered: Sequence[Any],
    inputs: Sequence[Any],
    card: Card | None,
    tuning: int,
    trained: OptimizerMemory,
) -> CommonPool:
    """What the pool that all share is asked for in a loop; of what is ``ordered``, the inputs.

    What others of this process have, and parts of segments that they leave, is known on a card.
    """
    given = {storage_key(x) for x in inputs if isinstance(x, torch.Tensor)}
    tensors = {storage_key(x): x for x in ordered if isinstance(x, torch.Tensor)}
    there = [x for key, x in tensors.items() if key in given]
    own = [x for x in there if is_on(x, device_of_inputs(inputs))]
    sizes = [size_bound(x.untyped_storage().nbytes()) for x in own]
    weights = [size for x, size in zip(own, sizes, strict=True) if x.is_leaf and x.requires_grad]
    others = accumulation.expected_bytes(device, missing_only=card is None)
    workspaces = [0, 0] if card is None else [cublas_workspace(card.capability)] * 2
    if card is None:  # what is there, is known
        unused = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
        others += round_up(torch.cuda.memory_allocated(device) + unused, SEGMENT_STEP_BYTES)
        sizes = []
    return CommonPool(sizes, others, workspaces, tuning, weights, trained.missing, trained.step)


def _size_of_tuning(options: Options, device: torch.device, card: Card | None) -> int:
    """What Triton writes over before each run while it tunes kernels: the whole cache."""
    if device.type != "cuda" or options.executor != "inductor":
        return 0
    if card is not None:
        return card.l2_cache
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def unseen_bytes(inputs: Sequence[Any], device: torch.device) -> int:
    """Bytes that are allocated now on CUDA, and are no inputs; with those of cuBLAS."""
    return max(0, torch.cuda.memory_allocated(device) - size_of_inputs(inputs, device))


def size_of_inputs(inputs: Iterable[Any], device: torch.device) -> int:
    """Of the storages of inputs, what the graph counts: from first to last elements."""
    storages: dict[int, int] = {}
    whole: dict[int, int] = {}
    for x in inputs:
        if isinstance(x, torch.Tensor) and is_on(x, device):
            key = storage_key(x)
            storages[key] = storages.get(key, 0) + nbytes(x)
            whole[key] = size_bound(x.untyped_storage().nbytes())
    return sum(min(counted, whole[key]) for key, counted in storages.items())
