"""What was promised of a compiled graph, which version each of its runs takes, and what steps were
observed to take beside it, kept on disk for the next run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from fxremat.compat.backward import backward_drops_gradients
from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compile.request import Request
from fxremat.disk_cache import Answers, Question
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.sizes import format_bytes

log = logging.getLogger(__name__)

LOSS_BYTES = 2 * torch.float32.itemsize
"""A loss and its gradient: whoever calls ``backward`` holds these two numbers until it returns."""
SQUARE = 4
"""How many values torch holds for the gradient of x² beside x: that of x², x¹, 2x and itself."""

T = TypeVar("T")
Compiled = Callable[..., Any]
Tensors = tuple[Callable[[], torch.Tensor | list[torch.Tensor] | None], ...]
"""They give tensors that live as long as others want, and None where these are gone."""


def alive(tensors: Tensors) -> list[torch.Tensor]:
    """All that they give now."""
    return [one for one in pytree.tree_leaves([each() for each in tensors]) if one is not None]


@dataclass(frozen=True)
class Promise:
    """A compiled graph, and what was promised of it; what ends in bytes is on its device.

    ``peak_bytes`` is the peak predicted for the graph by itself, with its inputs, and with
    fragmentation where the budget counts reserved bytes. Besides, ``held_bytes`` of the budget are
    held by what the graph does not see, of which ``reserve_bytes`` are no saved tensors. Each
    forward keeps ``saved_bytes`` for its backward. ``unseen_bytes`` were counted for what no graph
    sees. What lies ``around`` is part of ``reserve_bytes``. From the next step on those that wait
    leave it ``left_bytes`` more, None: they need not.
    """

    call: Compiled
    graph: str
    device: torch.device
    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    reserve_bytes: int
    saved_bytes: int
    unseen_bytes: int = 0
    around: Tensors = ()
    left_bytes: int | None = None
    counts_reserved: bool = False

    def beside(self, held_bytes: int, own_bytes: int) -> int:
        """Bytes on the device beside its ``own_bytes``; other graphs have ``held_bytes`` of them.

        CUDA's allocator knows all of them: those allocated, for what it has reserved for the graph
        itself is there from the first step on.
        """
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - own_bytes
        return held_bytes + self.reserve_bytes


@dataclass(frozen=True)
class RunVersions:
    """The versions of a graph, and which one each of its runs takes that wait at once.

    A run that none was planned for takes the last. ``step_peak_bytes`` are those of the step, with
    all that is there most of the time. ``parts`` say what the planner knows of the run at each
    place, where it knows that.
    """

    versions: tuple[Promise, ...]
    version_of_run: tuple[int, ...]
    step_peak_bytes: int
    parts: tuple[Any, ...] = ()

    def of_run(self, place: int) -> Promise:
        """The version of the run at a place among those that wait."""
        return self.versions[self.version_of_run[min(place, len(self.version_of_run) - 1)]]


@dataclass(frozen=True)
class MadeVersions:
    """Versions of a graph, compiled, the one of each of its runs, and what the step then takes.

    It is what the budget counts: bytes that are reserved, where these are counted and known.
    """

    compiled: dict[int, Promise]
    of_run: list[int]
    nbytes: int
    is_reserved: bool


@dataclass
class Warned:
    """What was looked at because more waited than ever before, and what was warned of.

    ``most`` are the runs that waited, and the bytes that their plans say; ``runs`` is how many
    there were in the last warning. Where it was planned ``anew``, what waits now is known to be too
    much, and what waits next is looked at anew. Steps that took more than the budget had all graphs
    ``planned_again`` so often, and the last of them had ``taken`` so many bytes. What they left of
    the promise was looked for in ``looked`` steps. It was ``told`` that this step takes too much.
    Where no plan leaves what was measured, those of ``lowest`` bytes are taken; if these take too
    much, it has ``ended``.
    """

    most: tuple[int, int] = (1, 0)
    runs: int = 1
    anew: bool = False
    planned_again: int = 0
    looked: int = 0
    taken: int = 0
    lowest: bool = False
    ended: bool = False
    told: bool = False

    def tell_missing(self, nbytes: int) -> None:
        """Say that this step takes so many bytes too much."""
        missing = format_bytes(nbytes)
        self.tell(f"fxremat: this step takes {missing} too much: the next one is planned anew")

    def tell(self, too_much: str) -> None:
        """Say it, once in a step."""
        if not self.told:
            log.warning("%s", too_much)
        self.told = True


@dataclass
class Observed:
    """Bytes that were seen beside a graph, named by its ``signature``; "" for none to remember.

    They are remembered for a budget, the ``limit``, on a device.
    Those ``between`` are there while all runs of the step wait, and those ``held`` at all times.
    Fewer than were ``counted`` are known again only where as many are counted again.

    Until a step was seen, a loss is ``expected`` that is computed from results of so many bytes: it
    holds a target as large as they are, itself, and its gradient; while all runs wait, also four
    times as much, as the gradient of a square takes it. It is 0 where no loss is outside.
    """

    signature: str = ""
    limit: int | None = None
    device: str = ""
    between: int = 0
    held: int = 0
    counted: int = 0
    expected: int = 0

    @property
    def held_by_loss(self) -> int:
        """At all times, in bytes. On CUDA a target is seen, as all that is there.

        A mean of squares has memory for all of them, beside the results and, where the backward
        does not drop it, their gradient.
        """
        target = 0 if self.device.startswith("cuda") else self.expected
        squares = 0 if backward_drops_gradients() else self.expected
        return target + squares + LOSS_BYTES if self.expected else 0

    def recall(self, counted: int) -> None:
        """Know what an earlier run has noted under this budget, where so many are counted."""
        self.counted = counted
        self.between, self.held = SQUARE * self.expected, self.held_by_loss
        known = Answers(cache_directory() / "observed").read(self._question())
        if isinstance(known, list) and [*map(type, known)] == [int] * 3:
            between, held, counted = known
            if held >= 0 or counted == self.counted:
                self.between, self.held, self.expected = between, held, 0

    def beside_loss(self, request: Request, compiled: Callable[[Request], T]) -> T:
        """What is ``compiled`` for the request beside what is held.

        Where that leaves too few bytes, no loss is expected; if that does not help, the least that
        is named is one beside a loss. Raises `InfeasibleBudget`.
        """

        def beside() -> Request:
            return request.with_budget(held=max(0, request.budget.held + self.held))

        try:
            return compiled(beside())
        except InfeasibleBudget as refused:
            spared = self.between + self.held if self.expected else 0
            least = refused.minimum_bytes
            if not spared or least is None or least - spared > refused.budget_bytes:
                raise
            first = refused
        forget_frames(first)
        self.forget_expected()
        try:
            return compiled(beside())
        except InfeasibleBudget:
            raise first from None

    def forget_expected(self) -> int:
        """Expect no loss any more; how many bytes it was taken to hold at all times."""
        held = self.held_by_loss
        self.between, self.held = self.between - SQUARE * self.expected, self.held - held
        self.expected = 0
        return held

    def note(self, between: int, held: int) -> None:
        """So many bytes more were seen, or fewer."""
        self.between += between
        self.held += held
        found = [self.between, self.held, self.counted]
        Answers(cache_directory() / "observed").keep(self._question(), found)

    def _question(self) -> Question | None:
        """What they are remembered by; None for none to remember."""
        if self.limit is None or not self.signature or caches_disabled():
            return None
        return {"graph": self.signature, "budget": self.limit, "device": self.device}
