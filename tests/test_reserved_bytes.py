"""What a plan is expected to reserve, before its dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.compile.request import Budget, Policy, Request
from fxremat.compile.search.planning import Planning
from fxremat.compile.stage_times import StageTimes
from fxremat.core.events import Allocate, Free
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.schedule import store_all
from fxremat.core.timeline import replay as timeline_of
from fxremat.memory.allocator.caching import replay
from fxremat.memory.allocator.settings import AllocatorSettings
from fxremat.memory.reserved_bytes import events_of_plan, least_reserved, reserved
from fxremat.memory.segments import WALL_BYTES
from tests.chains import blocks
from tests.strategies import scheduled_problems

MIB = 2**20


@given(scheduled_problems())
def test_the_peak_is_that_of_the_timeline(case: tuple[Problem, tuple[str, ...]]) -> None:
    """Where nothing is written over; else a smaller value may keep the block of a larger one."""
    problem, steps = case
    problem = replace(problem, ops=tuple(replace(op, inplace=()) for op in problem.ops))
    usage = replay(events_of_plan(problem, steps))
    assert usage.peak_requested_bytes == timeline_of(problem, steps).peak_bytes


@given(scheduled_problems())
def test_events_free_what_they_allocate(case: tuple[Problem, tuple[str, ...]]) -> None:
    """Each name once; what is resident or an output is there at the end."""
    problem, steps = case
    live: set[str] = set()
    names: list[str] = []
    for event in events_of_plan(problem, steps):
        if isinstance(event, Allocate):
            names.append(event.name)
            live.add(event.name)
        elif isinstance(event, Free):
            live.remove(event.name)
    assert len(set(names)) == len(names)
    ends = [one for one in timeline_of(problem, steps).intervals if one.stop == len(steps)]
    kept = [one for one in ends if one.value in problem.outputs]
    assert len(live) == len(problem.resident) + len(kept)
    usage = replay(events_of_plan(problem, steps))
    assert usage.peak_requested_bytes >= timeline_of(problem, steps).peak_bytes


def test_a_value_written_over_another_takes_its_block() -> None:
    problem = Problem(
        "one after the other",
        (Value("a", 4 * MIB), Value("b", 3 * MIB), Value("c", 5 * MIB)),
        (
            Op("make_a", (), ("a",), 1.0),
            Op("make_b", ("a",), ("b",), 1.0, inplace=(("a", "b"),)),
            Op("make_c", ("b",), ("c",), 1.0, inplace=(("b", "c"),)),
        ),
        outputs=("c",),
    )
    events = events_of_plan(problem, store_all(problem))
    assert events == (Allocate("0", 4 * MIB), Allocate("1", 5 * MIB), Free("0"))


def asked(count: Literal["allocated", "reserved"] = "reserved") -> Planning:
    """The planner, for budgets of the allocator with its usual settings."""
    budget = Budget(metric=count, allocator=AllocatorSettings())
    request = Request(budget, policy=Policy(solver="greedy"))
    return Planning(request, StageTimes())


def large_blocks() -> Problem:
    """Values of some MiB, which do not divide the segments of 20 MiB."""
    problem = blocks(6)
    values = tuple(replace(v, bytes=v.bytes * MIB // 8) for v in problem.values)
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes * MIB // 8) for op in problem.ops)
    return replace(problem, values=values, ops=ops)


@given(st.integers(50, 100))
def test_plans_are_expected_under_the_aim(percent: int) -> None:
    """With what they leave unused, or no other plan that was looked at comes nearer."""
    problem, planning = large_blocks(), asked()
    whole = planning.solve(problem, None)
    aim = planning.expected_bytes(problem, whole) * percent // 100
    plan = planning.expected_under(problem, aim, aim)
    plain = planning.solve(problem, aim)

    def over(one: Plan) -> int:
        return planning.expected_bytes(problem, one) - aim

    assert plan.peak_bytes <= plain.peak_bytes
    assert over(plan) <= max(0, over(plain))


def test_what_is_expected_is_what_the_allocator_says() -> None:
    problem, planning = large_blocks(), asked()
    plan = planning.solve(problem, None)
    events = events_of_plan(problem, plan.steps)
    taken = least_reserved(events, AllocatorSettings(), 0)
    assert planning.expected_bytes(problem, plan) == taken.usage.peak_reserved_bytes
    assert taken.usage.peak_reserved_bytes > plan.peak_bytes
    without = reserved(events, AllocatorSettings(), 0)
    assert taken.usage.peak_reserved_bytes <= without.peak_reserved_bytes


def test_one_segment_leaves_less_unused() -> None:
    """By hand: 30 and 40 MiB come one after the other, and fit none of each other's segments."""
    events = (Allocate("0", 30 * MIB), Free("0"), Allocate("2", 40 * MIB), Free("2"))
    settings = AllocatorSettings()
    assert reserved(events, settings, 0).peak_reserved_bytes == 70 * MIB
    taken = least_reserved(events, settings, 0)
    assert taken.segment_bytes == 40 * MIB
    assert taken.usage.peak_reserved_bytes == 40 * MIB + WALL_BYTES


@pytest.mark.gpu
def test_steps_with_an_optimizer_stay_within_the_budget() -> None:
    """Its states are made after the first backward, and cut from the segment, too."""
    torch._dynamo.reset()
    sizes = (1024, 1536, 640, 2048) * 3
    pairs = zip(sizes, (*sizes[1:], 1024), strict=True)
    layers = [m for a, b in pairs for m in (torch.nn.Linear(a, b), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    inputs = torch.randn(10_000, 1024, device="cuda")
    states = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    budget = 1000 * MIB
    options: dict[str, Any] = {"memory_budget": budget, "reserve": states + 64 * MIB}
    step = torch.compile(lambda x: model(x).square().mean(), backend="fxremat", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for index in range(5):
        step(inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if index == 2:
            torch.cuda.empty_cache()
    assert fxremat.reports()[-1].segment_bytes > 0
    assert torch.cuda.max_memory_reserved() <= budget
