"""The graphs of a model for a card that is not here: as plain compile runs them, and as planned.

A model is traced once; whatever is asked of it later is asked of the joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxremat.compat.absent.pretending import CUDA
from fxremat.compat.absent.without_device import READ
from fxremat.compat.dynamo import fresh_dynamo_caches, inline_regions
from fxremat.compat.inductor.generated_code import Generated, generate
from fxremat.compat.joint_graph import copy_module, donatable, donate, is_tangent, torch_partition
from fxremat.compat.tensors import on_host_without_memory, without_memory
from fxremat.compile import session
from fxremat.compile.driver import generating, patches_for, total_bytes, traced
from fxremat.compile.dry_run.dry_run import generate_step
from fxremat.compile.dry_run.meter import CodeMeter
from fxremat.compile.partitioner import draft_of, plan_graph
from fxremat.compile.request import request_for
from fxremat.core.events import Given, RunEvents
from fxremat.cost.cuda_scratch import CudaScratch
from fxremat.cost.device import absent_card
from fxremat.memory.measured_peak import uncollected
from fxremat.options import parse_options
from fxremat.report.report import Report
from fxremat.step.planned import plan_in_order

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def scratch_of_card() -> CudaScratch:
    """What library calls take while they run on the card that is planned for."""
    card = absent_card()
    assert card is not None, "loops are judged for a card that is not here"
    return CudaScratch(True, card.properties())


@dataclass(frozen=True)
class TracedModel:
    """The joint graph of a model on the device, and where its inputs come from.

    ``inputs`` has the name of a parameter or buffer, or the place of an argument, for each; "" for
    what another graph of the model gives. So many graphs that need no gradient come ``before`` it.
    The ``weights`` are those of the model that it is given, in the model's order.
    """

    dynamo_graph: fx.GraphModule
    examples: Sequence[Any]
    joint: fx.GraphModule
    joint_inputs: Any
    asked: Mapping[str, Any]
    inputs: tuple[str | int, ...]
    before: int = 0
    weights: tuple[torch.Tensor, ...] = ()

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """What the forward gives, without memory."""
        output: Any = self.joint.graph.output_node().args[0]
        nodes = output[: self.asked["num_fwd_outputs"]]
        return tuple(node.meta["val"] for node in nodes if isinstance(node, fx.Node))

    @uncollected()
    def plain(self) -> RunEvents:
        """As torch.compile cuts and runs it; the backward writes over what was saved."""
        with generating(self.joint, {}):
            forward, backward = torch_partition(self.joint, self.joint_inputs, **self.asked)
            outputs = self.asked["num_fwd_outputs"]
            donate(backward, donatable(forward, backward, outputs))
            step = generate_step(forward, backward, num_fwd_outputs=outputs)
            found = step.dry_run(CUDA.type, scratch_of_card().blocks_of_call)
        assert found.allocator.as_run is not None
        return found.allocator.as_run

    @uncollected()
    def evaluated(self) -> RunEvents:
        """The forward alone, as torch.compile runs it where no gradients are wanted."""
        outputs = self.asked["num_fwd_outputs"]
        forward = copy_module(self.joint)
        output = forward.graph.output_node()
        results: Any = output.args[0]
        output.args = (list(results[:outputs]),)
        ends = {"placeholder", "output"}  # attention's backward counts as impure
        forward.graph.eliminate_dead_code(lambda node: node.op in ends)
        for node in forward.graph.find_nodes(op="placeholder"):
            if is_tangent(node) and not node.users:
                forward.graph.erase_node(node)
        forward.recompile()
        with generating(self.joint, {}):
            code = generate(forward, is_backward=False, seen_outputs=outputs)
            return _forward_events(forward, code)

    def planned(
        self,
        options: Mapping[str, Any],
        *,
        beside: int = 0,
        gradients_stay: bool = False,
    ) -> Report:
        """As it is planned with these options. Raises `InfeasibleBudget` where that is refused.

        When it is compiled, ``beside`` bytes are allocated.
        """
        parsed = parse_options(options, device_total_bytes=total_bytes(CUDA))
        request = request_for(self.examples, parsed, neighbours=beside, weights=self.weights)
        request = request.with_inputs(gradients_stay=gradients_stay)
        patches = patches_for(parsed, request, None, self.examples)
        with session.separate(), generating(self.joint, patches):
            current = session.begin()
            joint = copy_module(self.joint)
            draft = draft_of(joint, self.joint_inputs, True, dict(self.asked))
            plan_graph(draft, request, current)
        assert current.report is not None
        return current.report


def planned_together(
    graphs: Sequence[TracedModel],
    options: Mapping[str, Any],
    *,
    beside: int,
    gradients_stay: bool,
) -> list[Report]:
    """The graphs of a model under one budget. Raises `InfeasibleBudget` where that is refused."""
    if len(graphs) == 1:
        only, stay = graphs[0], gradients_stay
        return [only.planned(options, beside=beside, gradients_stay=stay)]
    parsed = parse_options(options, device_total_bytes=total_bytes(CUDA))
    given = [(copy_module(one.dynamo_graph), one.examples) for one in graphs]
    with session.separate():
        reports = plan_in_order(given, parsed, neighbours=beside, gradients_stay=gradients_stay)
    if len(reports) < len(graphs):
        raise ValueError("a graph of several has no backward; such models are not judged yet")
    return list(reports)


def traced_graphs(model: nn.Module, inputs: Sequence[Any]) -> list[TracedModel]:
    """Trace the graphs of a model, in their order; inside of `fxremat.device.absent`.

    Raises `ValueError` where there is none, or where one runs several times in a step.
    """
    found: list[TracedModel] = []
    names: dict[int, str | int] = {}
    calls = count()

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        gm, call = inline_regions(gm), next(calls)
        parsed = parse_options({}, device_total_bytes=total_bytes(CUDA))
        request = request_for(examples, parsed)

        def keep(joint: fx.GraphModule, joint_inputs: Any, **asked: Any) -> Any:
            places = tuple(names.get(id(x), "") for x in examples if isinstance(x, torch.Tensor))
            whole = copy_module(joint)
            before = call - len(found) - sum(one.before for one in found)
            there = {id(one) for one in examples}
            own = tuple(one for one in model.parameters() if id(one) in there)
            made = TracedModel(gm, examples, whole, joint_inputs, asked, places, before, own)
            found.append(made)
            return torch_partition(joint, joint_inputs, **asked)

        run, ran = traced(gm, examples, patches_for(parsed, request, None, examples), keep), count()

        def once(*args: Any) -> Any:
            if next(ran):
                raise ValueError("a graph runs several times in a step; that is not judged yet")
            return run(*args)

        return once

    with (
        on_host_without_memory(model, (tuple(inputs), {})) as (given, _),
        session.separate(),
        fresh_dynamo_caches(),
        uncollected(),
    ):
        names |= {id(one): place for place, one in enumerate(given)}
        names |= {id(one): name for name, one in model.named_parameters()}
        names |= {id(one): name for name, one in model.named_buffers()}
        with suppress(*READ):
            model(*given)  # some put hooks on themselves then, and are cut elsewhere by Dynamo
        torch.compile(model, backend=backend)(*given)
    if not found:
        raise ValueError("Dynamo makes no graph of the model: it runs eagerly under torch.compile")
    return found


def _forward_events(forward: fx.GraphModule, code: Generated) -> RunEvents:
    """What the code of a forward allocates, whose results are all the caller's."""
    meter = CodeMeter(device=CUDA.type, workspace=scratch_of_card().blocks_of_call)
    placeholders = [n.meta["val"] for n in forward.graph.find_nodes(op="placeholder")]
    with without_memory() as fake:
        given = {f"{place}": _like(value) for place, value in enumerate(placeholders)}
        meter.watch(given)
        returned = list(meter.run(code, "<evaluation>", list(given.values()), fake, forward.graph))
        results = meter.names(returned)
        inputs = tuple(Given(one.nbytes) for one in given.values() if one.device == CUDA)
    names = tuple(name for name in results if name is not None)
    return RunEvents(tuple(meter.events), (), inputs, names)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@contextmanager
def checkpointed(model: nn.Module, contexts: Contexts | None = None) -> Iterator[bool]:
    """Inside, each block of the model is checkpointed; yields whether blocks were found.

    Blocks are modules of one class in a list of two or more, as transformers have them. The
    ``contexts`` say what each saves, as in `torch.utils.checkpoint.checkpoint`.
    """
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1)
    blocks = [block for one in lists if len({*map(type, one)}) == 1 for block in one]
    blocks = [one for one in blocks if any(True for _ in one.children())]
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    outer = [block for block in blocks if id(block) not in inner]
    again = partial(checkpoint, use_reentrant=False)
    if contexts is not None:  # Dynamo does not know the default when it is given
        again = partial(again, context_fn=contexts)
    for block in outer:
        block.forward = partial(again, block.forward)
    try:
        yield bool(outer)
    finally:
        for block in outer:
            del block.forward
