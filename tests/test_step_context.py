"""How many runs of a compiled part wait at once, and what lies around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.core.step import Gathered, Interface, Step, Version
from fxremat.options import Options
from fxremat.step import context
from fxremat.step.description import repeated
from fxremat.step.versions import Offer, Part, followed_by
from tests.small import Block

HOST = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("fresh")


class Model(nn.Module):
    """A head, and blocks of which some are compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def bytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def seen_in(model: nn.Module, parts: list[nn.Module], **given: Any) -> context.ModelContext:
    """What the backend sees around the first part that is compiled."""
    found: list[context.ModelContext] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(context.model_context(Options(**given), HOST))
        return gm

    for part in parts:
        part.compile(backend=backend)
    model(torch.ones(2, 8))
    return found[0]


def test_runs_are_modules_of_the_class_that_are_compiled_by_themselves() -> None:
    model = Model()
    found = seen_in(model, list(model.blocks)[:3])
    assert found.runs == 3
    assert found.nbytes == bytes_of(model) - bytes_of(model.blocks[0]) + 8
    assert len(found.everything) == len(list(model.parameters())) + 1


def test_a_model_that_is_compiled_as_a_whole_runs_once_and_has_nothing_around() -> None:
    model = Model()
    found = seen_in(model, [model])
    assert (found.runs, found.nbytes) == (1, 0)


def test_parts_that_a_graph_break_leads_to_are_counted_too() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model, found = Model(), list[context.ModelContext]()
    model.blocks = nn.ModuleList([Broken(8), Broken(8), Broken(4)])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))  # type: ignore[method-assign]

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(context.model_context(Options(), HOST))
        return gm

    torch.compile(model, backend=backend)(torch.ones(2, 8))
    assert max(each.runs for each in found) == 2


def test_what_is_said_comes_first() -> None:
    model = Model()
    assert seen_in(model, list(model.blocks), instances=7).runs == 7


def test_outside_of_any_module_a_function_runs_once() -> None:
    assert context.model_context(Options(), HOST) == context.ModelContext()


def test_what_lies_around_is_not_kept_alive() -> None:
    model = Model()
    found = seen_in(model, list(model.blocks))
    torch._dynamo.reset()
    del model
    import gc

    gc.collect()
    assert all(tensor() is None for tensor in found.others)


def part_of(given: int) -> Part:
    """It saves 1,000 bytes beside what it is given."""
    version = Version(1.0, 1000, 3000, 5000)
    return Part(Interface(200 + given, given, 50, 50, 20), (Offer(version, 0, 0),))


def step_of(parts: list[Part], part_of: list[int], *, either_order: bool = False) -> Step:
    """A step in which the runs wait at once, beside 100 bytes."""
    points = repeated([part.interface for part in parts], part_of, 100, either_order=either_order)
    versions = (tuple(offer.version for offer in part.offers) for part in parts)
    return Step(points, tuple(part_of), tuple(versions))


def test_neighbours_of_a_run_are_gathered_in_the_backward() -> None:
    points = repeated([part_of(0).interface], [0, 0, 0], 100, Gathered(ahead=7, sent=8))
    outside = [point.outside_bytes for point in points]
    assert outside == [107, 107, 107, 207, 157, 185, 198]


def test_what_is_not_given_back_stays_while_a_run_waits() -> None:
    """All of the parameters, which are then not gathered again; or a part, and they are."""
    for kept, again in ((7, 0), (3, 7)):
        gathered = Gathered(ahead=7, sent=8, kept=kept)
        points = repeated([part_of(0).interface], [0, 0, 0], 100, gathered)
        outside = [point.outside_bytes for point in points]
        forward = [107, 107 + kept, 107 + 2 * kept, 207 + 3 * kept]
        backward = [150 + again + 2 * kept, 178 + again + kept, 198]
        assert outside == forward + backward


def test_blocks_that_follow_hold_what_they_are_given() -> None:
    first = part_of(0)
    others = followed_by(first, 50)
    assert others.interface.given == 50
    step = step_of([first, others], [0, 1, 1])
    assert [point.outside_bytes for point in step.points] == [100, 150, 150, 200, 150, 170, 190]
    last = step.points[4]
    assert step.bytes_at(last, [0, 0, 0]) == 150 + 1000 + 1050 + 5050


def test_micro_batches_may_go_backward_in_turn() -> None:
    """Of two versions the one that saves more may wait while the other runs backward."""
    little, much = Version(2.0, 1000, 3000, 5000), Version(1.0, 4000, 4500, 6000)
    part = Part(Interface(200, 0, 50, 50, 20), (Offer(little, 0, 0), Offer(much, 0, 0)))
    last_first = step_of([part], [0, 0])
    assert last_first.peak_bytes([0, 1]) == 150 + 1000 + 6000
    assert last_first.peak_bytes([1, 0]) == 150 + 4000 + 5000
    either = step_of([part], [0, 0], either_order=True)
    assert either.peak_bytes([0, 1]) == either.peak_bytes([1, 0]) == 150 + 4000 + 5000
    assert [point.outside_bytes for point in either.points[3:]] == [150, 170, 150, 170]
