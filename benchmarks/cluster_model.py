"""A Llama as one rank of a cluster has it: blocks and head under tensor parallel, traced.

The ranks are those of torch's fake process group: there is one process, and nobody to talk to.
Parameters are DTensors, and graphs hold the collectives that the rank takes part in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxremat.compat.dynamo import fresh_dynamo_caches
from fxremat.compat.joint_graph import copy_module, torch_partition
from fxremat.compat.tensors import plain_tensors
from fxremat.compile import session
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.driver import total_bytes, traced
from fxremat.compile.pipeline import AS_TORCH, PLAN, PREPARE, Runner
from fxremat.compile.request import Request, request_for
from fxremat.compile.run_figures import version_of
from fxremat.compile.search.proposals import plan_of_torch, steps_again
from fxremat.compile.stage_times import StageTimes
from fxremat.compile.tracing import Ended
from fxremat.core.plan import Plan
from fxremat.core.step import Version
from fxremat.core.timeline import replay
from fxremat.options import parse_options
from fxremat.step.versions import Part, offers_of

HALF = torch.bfloat16
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A model, a micro-batch of so many sequences, and the ranks; the defaults are Llama-3-70B.

    There are ``shards`` x ``tensor`` x ``stages`` ranks: FSDP2, tensor parallel, pipeline.
    """

    layers: int = 80
    width: int = 8192
    heads: int = 64
    kv_heads: int = 8
    hidden: int = 28672
    words: int = 128256
    tokens: int = 8192
    sequences: int = 2
    micro_batches: int = 8
    shards: int = 8
    tensor: int = 8
    stages: int = 4
    card: str = "H100"

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.shards * self.tensor * self.stages

    @property
    def layers_of_stage(self) -> int:
        """All stages have as many."""
        return self.layers // self.stages

    @property
    def activation_bytes(self) -> int:
        """Of what goes from block to block on one rank: its part of the sequence."""
        return self.sequences * self.tokens // self.tensor * self.width * HALF.itemsize


class Attention(nn.Module):
    """Causal, with grouped queries; this rank has its part of the heads."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.size = job.width // job.heads
        keys = job.kv_heads * self.size
        self.query, self.out = _linear(job.width, job.width), _linear(job.width, job.width)
        self.key, self.value = _linear(job.width, keys), _linear(job.width, keys)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            project(x).view(batch, tokens, -1, self.size).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = self.out(found.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.gate, self.up = _linear(job.width, job.hidden), _linear(job.width, job.hidden)
        self.down = _linear(job.hidden, job.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """What a stage repeats; ``x`` is this rank's part of the sequence."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(job.width, dtype=HALF)
        self.before_feed = nn.RMSNorm(job.width, dtype=HALF)
        self.attention, self.feed = Attention(job), FeedForward(job)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        result: Tensor = x + self.feed(self.before_feed(x))
        return result


class Head(nn.Module):
    """The last norm, this rank's part of the words, and the loss over these alone."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(job.width, dtype=HALF)
        self.words = _linear(job.width, job.words)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.words(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten())


def _linear(width: int, results: int) -> nn.Linear:
    return nn.Linear(width, results, bias=False, dtype=HALF)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _gathered(*others: None) -> ParallelStyle:
    """An input that lies in parts of the sequence is whole inside; ``others`` are as they are."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


BLOCK_PLAN: Mapping[str, ParallelStyle] = {
    "before_attention": SequenceParallel(),
    "before_feed": SequenceParallel(),
    "attention": _gathered(None, None),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "feed": _gathered(),
    "feed.gate": ColwiseParallel(),
    "feed.up": ColwiseParallel(),
    "feed.down": RowwiseParallel(output_layouts=Shard(1)),
}
HEAD_PLAN: Mapping[str, ParallelStyle] = {
    "norm": SequenceParallel(),
    "words": ColwiseParallel(input_layouts=Shard(1)),
}


@contextmanager
def fake_ranks(job: Job) -> Iterator[DeviceMesh]:
    """Inside, this process is a rank among all of the job's; yields its tensor parallel mesh."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.ranks)
    try:
        sizes = (job.stages, job.shards, job.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("stage", "shard", "tensor"))
        yield mesh["tensor"]
    finally:
        distributed.destroy_process_group()


@dataclass(frozen=True)
class Traced:
    """A part as one rank runs it: what fxremat offers, and two versions by other rules.

    ``plain`` is as torch cuts the graph. ``checkpointed`` keeps what it is given, and runs all of
    its forward again, collectives too. ``parameters`` are this rank's, gathered.
    """

    part: Part
    plain: Version
    checkpointed: Version
    parameters: int
    request: Request

    def within(self, kind: str) -> tuple[Version, ...]:
        """The versions that there are by one way to train."""
        if kind == "fxremat":
            return (self.plain, *(offer.version for offer in self.part.offers))
        return (self.checkpointed if kind == "checkpointed" else self.plain,)


def traced_block(job: Job, mesh: DeviceMesh, count: int) -> Traced:
    """One block, of which ``count`` runs wait at once; inside of `fxremat.device.absent`."""
    block = _parallel(Block(job), mesh, BLOCK_PLAN)
    shape = job.sequences, job.tokens // job.tensor, job.width
    x = torch.empty(shape, dtype=HALF, requires_grad=True)
    angles = torch.empty(job.tokens, job.width // job.heads, dtype=HALF)
    return _traced(block, (x, angles, angles.clone()), count)


def traced_head(job: Job, mesh: DeviceMesh) -> Traced:
    """The head with the loss."""
    head = _parallel(Head(job), mesh, HEAD_PLAN)
    shape = job.sequences, job.tokens // job.tensor, job.width
    x = torch.empty(shape, dtype=HALF, requires_grad=True)
    return _traced(head, (x, torch.zeros(shape[0], job.tokens, dtype=torch.int64)), 1)


def _parallel(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    return parallelize_module(module, mesh, dict(plan), src_data_rank=None)


def _traced(module: nn.Module, given: Sequence[Tensor], count: int) -> Traced:
    """The joint graph of the module on the absent card, and what it may take."""
    parameters = sum(part.numel() for x in module.parameters() for part in plain_tensors(x))
    options = parse_options({"reserve": 0}, device_total_bytes=total_bytes(HOST))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        request = request_for(inputs, options)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            static = tuple(kwargs.pop("static_lifetime_input_indices", None) or ())

            def as_torch_does(one: fx.GraphModule) -> Any:
                return torch_partition(one, joint_inputs, **kwargs)

            draft = Draft(joint, kwargs["num_fwd_outputs"], static, as_torch_does)
            raise Ended(_studied(draft, request, count, parameters))

        return traced(gm, inputs, {}, partition)

    try:
        with session.separate(), fresh_dynamo_caches():
            torch.compile(module, backend=backend, fullgraph=True)(*given)
    except Exception as error:
        ended = getattr(error, "inner_exception", error)
        if not isinstance(ended, Ended):
            raise
        found: Traced = ended.result
        return found
    raise AssertionError("the graph was not given to a partition")


def _studied(draft: Draft, request: Request, count: int, parameters: int) -> Traced:
    copy = replace(draft, module=copy_module(draft.module))
    part = offers_of(draft, request, count)
    runner = Runner(cost_model(request, copy.module.graph, "unit"), StageTimes())
    seen = runner.run("estimate", PLAN, runner.run("prepare", PREPARE, copy))
    as_torch = plan_of_torch(runner.run("apply", AS_TORCH, seen))
    return Traced(
        part,
        version_of(seen, as_torch, None, request),
        _checkpointed(seen, request),
        parameters,
        request,
    )


def _checkpointed(draft: Draft, request: Request) -> Version:
    """All that the forward computes is computed again when the backward first reads of it."""
    problem = draft.estimate.problem
    again = {op for op in problem.ops if op.phase == "forward"}
    ops = tuple(replace(op, repeatable=op.repeatable or op in again) for op in problem.ops)
    problem = replace(problem, ops=ops)
    line = replay(problem, steps_again(problem, {name for op in again for name in op.writes}))
    plan = Plan(line.steps, "checkpoint", None, line.peak_bytes, line.time_us)
    estimate = replace(draft.estimate, problem=problem)
    return version_of(replace(draft, estimate=estimate), plan, None, request)
