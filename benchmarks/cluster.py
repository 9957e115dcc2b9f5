"""Plans for a cluster that is not here: Llama-3-70B on 256 cards, stage by stage.

    python -m benchmarks.cluster

The ranks are those of torch's fake process group, tensors have no memory, and the card is absent.
One rank of each stage is planned: a block is traced under tensor parallel, and its versions are
chosen for all micro-batches that wait at once under 1F1B (`fxremat.step.pipelines`). What FSDP2
holds is counted from the sizes. docs/design/ranks.md says what is not exact.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import fxremat
from benchmarks.cluster_model import HALF, Job, Traced, fake_ranks, traced_block, traced_head
from benchmarks.rows import format_table
from fxremat.compat.pipelining import ShownStage
from fxremat.core.step import Step, StepPoint, Version
from fxremat.cost.device import card_named
from fxremat.planner import step_versions as planner
from fxremat.planner.step_versions import Chosen
from fxremat.sizes import GIB
from fxremat.step.pipelines import Pipeline, StageOfRank

WAYS = ("plain", "checkpointed", "fxremat")
FLOAT, MOMENTS = 4, 2


@dataclass(frozen=True)
class Planned:
    """A stage by one way."""

    peak_bytes: int
    time_us: float


@dataclass(frozen=True)
class Stage:
    """One rank of a stage, and what its step takes by each way.

    fxremat's is None where no choice of versions is within the budget; ``least_bytes`` are those of
    its lowest choice.
    """

    number: int
    in_flight: int
    resident_bytes: int
    least_bytes: int
    ways: Mapping[str, Planned | None]


def order_of(stage: int, stages: int, micro_batches: int) -> tuple[tuple[bool, int], ...]:
    """What a rank runs under 1F1B, forwards and backwards, as `Pipeline.order` has it."""
    warm = min(micro_batches, stages - stage)
    turns = [False, True] * (micro_batches - warm)
    return tuple((forward, 0) for forward in [True] * warm + turns + [False] * warm)


def resident_bytes(job: Job, stage: int, block: int, head: int) -> int:
    """What a rank holds all the time; ``block`` and ``head`` are parameters, split over tensors.

    Its parts of the parameters and AdamW's two points in float32. In a pipeline FSDP2 gathers
    once a step and reduces once: so all parameters are whole in 16 bits, and their gradients in
    float32.
    """
    words = job.words // job.tensor * job.width
    count = job.layers_of_stage * block
    count += words if stage == 0 else 0
    count += head if stage == job.stages - 1 else 0
    own = -(-count // job.shards)
    return own * FLOAT * (1 + MOMENTS) + count * (HALF.itemsize + FLOAT)


def pipeline_of(job: Job, stage: int) -> Pipeline:
    """The rank's part in a step; the head counts as a part of its own, and gives one number."""
    last, given = stage == job.stages - 1, job.activation_bytes
    shown = ShownStage(given, 0 if last else given)
    return Pipeline(
        (StageOfRank(job.layers_of_stage, stage == 0, last, shown),),
        order_of(stage, job.stages, job.micro_batches),
        job.micro_batches,
        whole=False,
        current=0,
        keeps_sent=False,
        keeps_outputs=False,
        batch=(),
        modules=(),
        buffers=list,
    )


def step_of(
    pipeline: Pipeline, block: Traced, head: Traced | None, resident: int, way: str
) -> Step:
    """The points of a rank's step, with the versions that there are by one way.

    The gradients of parameters are among what is resident, so none stays beside them.
    """
    own = block.part.interface
    part = replace(block.part, interface=replace(own, left=0))
    held = resident + pipeline.buffers_size - block.parameters * HALF.itemsize  # the part's own
    part_of = (0,) * pipeline.runs
    step = Step(pipeline.points([part], held, part_of), part_of, (block.within(way),))
    return step if head is None else with_head(step, head.within(way))


def with_head(step: Step, versions: Sequence[Version]) -> Step:
    """The same with the head, which runs between the forward of a micro-batch and its backward."""
    run, points = len(step.part_of), list[StepPoint]()
    for before, after in zip((None, *step.points), step.points, strict=False):
        if before is not None and (before.running, after.running) == (None, None):
            for phase in ("forward", "backward"):
                points.append(replace(before, running=run, phase=phase))
        points.append(after)
    return Step(tuple(points), (*step.part_of, 1), (*step.versions, tuple(versions)))


def time_us(step: Step, chosen: Chosen) -> float:
    """Of all micro-batches: each runs the versions of the places that it takes."""
    forwards = [m.running for m in step.points if m.phase == "forward" and m.running is not None]
    return sum(step.version(run, chosen).time_us for run in forwards)


def planned(job: Job, stage: int, block: Traced, head: Traced | None, budget: int) -> Stage:
    """A stage by each way."""
    pipeline = pipeline_of(job, stage)
    resident = resident_bytes(job, stage, block.parameters, 0 if head is None else head.parameters)
    steps = {way: step_of(pipeline, block, head, resident, way) for way in WAYS}

    def by(way: str, chosen: Chosen | None) -> Planned | None:
        if chosen is None:
            return None
        return Planned(steps[way].peak_bytes(chosen), time_us(steps[way], chosen))

    own = steps["fxremat"]
    only = (0,) * len(own.part_of)  # other ways have one version
    chosen = {"plain": only, "checkpointed": only, "fxremat": planner.fastest(own, budget)}
    return Stage(
        stage,
        pipeline.runs // job.layers_of_stage,
        resident,
        own.peak_bytes(planner.lowest(own)),
        {way: by(way, chosen[way]) for way in WAYS},
    )


def stages_of(job: Job) -> tuple[int, list[Stage]]:
    """The budget that is planned for, and all stages."""
    with fake_ranks(job) as mesh, fxremat.device.absent(job.card):
        block = traced_block(job, mesh, job.layers_of_stage * job.stages)
        head = traced_head(job, mesh)
    budget = card_named(job.card).usable
    budget = block.request.with_budget(limit=budget).budget.for_step
    last = job.stages - 1
    numbers = range(job.stages)
    return budget, [planned(job, k, block, head if k == last else None, budget) for k in numbers]


def lines(job: Job, budget: int, stages: Sequence[Stage]) -> Iterator[list[str]]:
    """The table: a stage in each line, and the step of the whole job in the last."""
    peaks = [f"peak, {way}" for way in WAYS]
    yield ["stage", "in flight", "resident", *peaks, "least", *(f"s, {way}" for way in WAYS)]
    for stage in stages:
        found = [stage.ways[way] for way in WAYS]
        yield [
            str(stage.number),
            str(stage.in_flight),
            _gib(stage.resident_bytes, budget),
            *("-" if one is None else _gib(one.peak_bytes, budget) for one in found),
            _gib(stage.least_bytes, budget),
            *(_seconds(None if one is None else one.time_us / 1e6) for one in found),
        ]
    whole = [step_seconds(job, [stage.ways[way] for stage in stages]) for way in WAYS]
    yield ["all", *[""] * 6, *map(_seconds, whole)]


def _gib(nbytes: int, budget: int) -> str:
    return f"{nbytes / GIB:.1f}" + ("" if nbytes <= budget else " (too much)")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def step_seconds(job: Job, found: Sequence[Planned | None]) -> float | None:
    """Of the pipeline: as long as the slowest stage takes for each micro-batch, and to fill."""
    times = [one.time_us for one in found if one is not None]
    if len(times) < len(found):
        return None
    slots = job.micro_batches + job.stages - 1
    return max(times) / 1e6 / job.micro_batches * slots


def main() -> None:
    """The command line: sizes of the job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for one in fields(Job):
        name, default = one.name.replace("_", "-"), one.default
        parser.add_argument(f"--{name}", type=type(default), default=default)
    job = Job(**vars(parser.parse_args()))
    begin = time.perf_counter()
    budget, stages = stages_of(job)
    print(job)
    print(f"GiB, of {budget / GIB:.1f} that are planned for; seconds a step")
    print(format_table(list(lines(job, budget, stages))))
    print(f"in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
