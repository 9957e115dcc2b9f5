"""Every failure a user can meet: a class each, whose message says what happened and what to do.

A class is a record of its arguments, which are its ``args``, too: so instances can be copied and
pickled. A malformed problem or plan file is `fxremat.core.problem.InvalidProblem`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, dataclass_transform

from fxremat.sizes import format_bytes, round_up_bytes


@dataclass_transform(eq_default=False)
class _Record:
    """Base of errors and warnings: each is a dataclass, whose ``args`` are its fields."""

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]


class FxrematError(_Record, Exception):
    """Base of all errors that fxremat raises on purpose."""


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an error that was handled, since they keep our callers' locals alive.

    That may last long, because a frame that raised an error often has it among its locals.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like ``name``, if one does."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def output_advice(what: str, nbytes: int) -> str:
    """What to do about an output that takes much of the peak, with its gradient."""
    return (
        f"Much of the peak is an output: {what} takes {format_bytes(nbytes)}, with its gradient if "
        "there is one. If only the loss is used in training, call fxremat.loss_only(model) before "
        "the model first runs; if the loss is computed from that output, compile the loss with the "
        "model."
    )


class InfeasibleBudget(FxrematError):
    """No plan was found that stays within the budget.

    ``minimum_bytes`` is the smallest peak of all plans that were found, None if there is none.
    ``contributors`` are the largest values at that peak, largest first: what each is and where
    (module and source line), and its bytes. ``fragmentation_bytes`` of that peak are reserved by
    torch's allocator without being used. ``returned`` is an output that takes much of the peak with
    its gradient: what it is, and the bytes of both. ``only_runs``: the graph takes no gradients.
    Where nobody holds in the backward what earlier graphs returned, ``let_go_bytes`` are enough.
    """

    budget_bytes: int
    minimum_bytes: int | None
    contributors: tuple[tuple[str, int], ...] = ()
    fragmentation_bytes: int = 0
    returned: tuple[str, int] | None = None
    only_runs: bool = False
    let_go_bytes: int | None = None

    def __str__(self) -> str:
        lines = [self._what()]
        if self.contributors:
            rows = (f"  {format_bytes(size):>10}  {what}" for what, size in self.contributors)
            lines += ["largest at that peak:", *rows]
        budget = "set a larger memory_budget"
        if self.minimum_bytes is not None:
            budget = f'set memory_budget="{round_up_bytes(self.minimum_bytes)}" or more'
        lines.append(f"What to do: {budget}, or use a smaller batch or shorter sequences.")
        if self.returned is not None:
            lines.append(output_advice(*self.returned))
        if self.let_go_bytes and self.minimum_bytes and self.let_go_bytes < self.minimum_bytes:
            lines.append(
                f"{_exact(self.let_go_bytes)} are enough where the step lets go of what earlier "
                "graphs have returned, as logits, before it calls backward()."
            )
        return "\n".join(lines)

    def _what(self) -> str:
        if self.only_runs and self.minimum_bytes is not None:
            budget, takes = _exact(self.budget_bytes), _exact(self.minimum_bytes)
            graph = "this graph, which takes no gradients,"
            return f"{graph} cannot run within {budget}; it takes {takes}"
        budget = f"this graph cannot be trained within {_exact(self.budget_bytes)}"
        if self.minimum_bytes is None:
            return f"{budget}; the least number of bytes is not known"
        least = f"{budget}; the least that fxremat can plan is {_exact(self.minimum_bytes)}"
        if not self.fragmentation_bytes:
            return least
        unused = format_bytes(self.fragmentation_bytes)
        return f"{least}, of which torch's allocator reserves {unused} without using them"


class InvalidOption(FxrematError, ValueError):
    """An option has a value that it cannot have.

    ``expected`` completes the sentence "expected ..."; ``choices`` are the allowed values, where
    there are few; ``variable`` is the environment variable that the value came from.
    """

    option: str
    value: object
    expected: str
    choices: tuple[str, ...] = ()
    variable: str | None = None

    def __str__(self) -> str:
        origin = f" (from {self.variable})" if self.variable else ""
        text = f"option {self.option!r}{origin} is {self.value!r}; expected {self.expected}"
        close = nearest(str(self.value), self.choices)
        return f"{text}; did you mean {close!r}?" if close else text


class UnknownOption(InvalidOption):
    """There is no option of this name; ``choices`` are the names that exist."""

    def __init__(self, option: str, value: object, choices: tuple[str, ...]) -> None:
        super().__init__(option, value, "the name of an option", choices)
        self.args = (option, value, choices)

    def __str__(self) -> str:
        close = nearest(self.option, self.choices)
        hint = f"; did you mean {close!r}?" if close else ""
        return f"there is no option {self.option!r}{hint} (options: {', '.join(self.choices)})"


class SolverRefused(FxrematError):
    """The requested solver cannot plan this graph; ``reason`` says why, and which one can."""

    solver: str
    reason: str

    def __str__(self) -> str:
        return f"solver {self.solver!r} cannot plan this graph: {self.reason}"


class HostMemoryExceeded(FxrematError):
    """A copy to host memory would exceed the limit for such copies."""

    wanted_bytes: int
    held_bytes: int
    cap_bytes: int

    def __str__(self) -> str:
        least = round_up_bytes(self.held_bytes + self.wanted_bytes)
        return (
            f"a copy to host memory needs {_exact(self.wanted_bytes)}, but other copies hold "
            f"{_exact(self.held_bytes)} there and the limit is {_exact(self.cap_bytes)}\n"
            f"What to do: allow {least} or more (option host_memory_budget), or delete the losses "
            "of earlier steps: they keep what was saved for backwards that will not run."
        )


class PromiseBroken(_Record, UserWarning):
    """More forwards are in flight than were planned for, so the budget will be exceeded.

    A forward is in flight until its backward has run. There are ``in_flight`` of them. The last is
    that of ``graph``; the others have saved ``held_bytes``. Together they need ``expected_bytes``,
    more than ``budget_bytes``. If ``planned_for`` is not None, ``graph`` has been planned again for
    that many forwards in flight. If ``left_bytes`` is not None, the others leave so much more to
    ``graph`` from the next step on; or all graphs of the step are planned ``together`` then.
    """

    graph: str
    in_flight: int
    held_bytes: int
    expected_bytes: int
    budget_bytes: int
    planned_for: int | None = None
    left_bytes: int | None = None
    together: bool = False

    def __str__(self) -> str:
        why = f"more than {self.graph} was planned for"
        if self.left_bytes is not None:
            why = f"and {self.graph} was not known yet when the others were planned"
        return (
            f"the memory budget of {_exact(self.budget_bytes)} will be exceeded: about "
            f"{_exact(self.expected_bytes)} are needed. {self.in_flight} forwards are in flight, "
            f"waiting for their backward, {why}; the others have saved "
            f"{_exact(self.held_bytes)}.\n"
            f"What to do: {self._advice()}"
        )

    def _advice(self) -> str:
        if self.left_bytes is not None:
            return (
                "nothing, if the next step fits: from then on the others leave "
                f"{format_bytes(self.left_bytes)} more to {self.graph}. To plan all of them "
                "together, call fxremat.prepare before the first step."
            )
        if self.planned_for is not None:
            return (
                f"nothing, if the next step fits: {self.graph} has been planned again for "
                f"{self.planned_for} forwards in flight. To plan for that many from the start, set "
                f"the option instances={self.planned_for}."
            )
        if self.together:
            return (
                "nothing, if the next step fits: from then on all graphs of the step are planned "
                "together. To do that before the first step, call fxremat.prepare."
            )
        return (
            "compile the whole model with one torch.compile, so that one plan counts "
            "everything; or set the option instances to the number of forwards in flight; or run "
            "the backward of each forward before the next forward; or set a smaller memory_budget."
        )


class BudgetExceeded(_Record, UserWarning):
    """A step took more memory than the budget, because of memory that no plan knows of.

    The step took ``taken_bytes`` at its peak, and the budget is ``budget_bytes``. About
    ``outside_bytes`` were taken outside of ``graph``, for which ``counted_bytes`` had been set
    aside. If ``again`` is True, the next step is planned again, with the excess set aside.
    """

    graph: str
    taken_bytes: int
    budget_bytes: int
    outside_bytes: int
    counted_bytes: int
    again: bool = False

    def __str__(self) -> str:
        advice = "The next step is planned for this, and so is the next run of this program."
        if not self.again:
            reserve = round_up_bytes(self.outside_bytes - self.counted_bytes)
            advice = (
                "What to do: call fxremat.prepare before the first step, so that it sees the whole "
                "step; or compile the loss with the model; or raise the option, by "
                f"reserve={reserve!r}."
            )
        over = self.taken_bytes - self.budget_bytes
        return (
            f"a step took {_exact(self.taken_bytes)}, {format_bytes(over)} more than the memory "
            f"budget of {_exact(self.budget_bytes)}: code outside of {self.graph}, or tensors kept "
            f"by hooks, take about {format_bytes(self.outside_bytes)}, but "
            f"only {format_bytes(self.counted_bytes)} had been set aside for them.\n{advice}"
        )


class LeftOut(_Record, UserWarning):
    """A part of fxremat failed. The run goes on without it.

    ``what`` is the part, and ``reason`` the failure. ``file`` has what a bug report needs.
    """

    what: str
    reason: str
    file: str

    def __str__(self) -> str:
        return (
            f"{self.what} is left out from now on, because it failed: {self.reason}\n"
            "The run goes on without it, and the budget holds. This is a bug in fxremat; please "
            f"report it with the file {self.file}"
        )


class VerificationFailed(FxrematError):
    """A check found a mistake in what fxremat made: a bug, caught before it does harm."""

    check: str
    detail: str

    def __str__(self) -> str:
        return (
            f"verification failed: {self.check}: {self.detail}\n"
            "This is a bug in fxremat; please report it with this message. "
            "What to do: set FXREMAT_DISABLE=1 to compile without fxremat; another solver "
            "or a larger memory_budget may avoid the failure."
        )


class GraphsDiffer(FxrematError):
    """Ranks that run a graph together compile different graphs, or have different plans.

    ``what`` says which of the two it is. ``others`` are the ranks whose graph or plan is not that
    of rank ``first``; ``about`` describes that of each rank.
    """

    first: int
    others: tuple[int, ...]
    about: dict[int, str]
    what: Literal["graph", "plan"] = "graph"

    def __str__(self) -> str:
        names, several = ", ".join(map(str, self.others)), len(self.others) > 1
        about = "; ".join(f"rank {one}: {said}" for one, said in self.about.items())
        rank, compiles = ("ranks", "compile") if several else ("rank", "compiles")
        return (
            f"{rank} {names} {compiles} a different {self.what} than rank {self.first}, although "
            f"its collectives need the same on all ranks ({about})\nWhat to do: {self._advice()}"
        )

    def _advice(self) -> str:
        if self.what == "plan":
            return (
                "a cache on disk holds a plan of another job: empty it (TORCHINDUCTOR_CACHE_DIR) "
                "on each machine, or let all machines share one."
            )
        return (
            "make sure that model, options and input sizes are the same on these ranks; "
            "TORCH_LOGS=graph_code prints the graphs."
        )


class RankMissing(FxrematError):
    """Something that another rank of the job had to send did not arrive within ``seconds``.

    ``what`` says what it is. ``rank`` is the other rank, None if that is not known. ``why`` is what
    that rank reported, None if it reported nothing.
    """

    what: str
    seconds: float
    rank: int | None = None
    why: str | None = None

    def __str__(self) -> str:
        whose = "another rank" if self.rank is None else f"rank {self.rank}"
        within, more = f": {self.why}", ""
        if self.why is None:
            within = f" within {self.seconds:g} s"
            more = " If planning takes longer than that, raise the option rank_timeout."
        return (
            f"no {self.what} came from {whose}{within}\nWhat to do: see the logs of the other "
            f"ranks; one of them may have failed, or may wait elsewhere.{more}"
        )


class NotTraceable(FxrematError):
    """A training step could not be made into one graph of forward and backward."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class UnknownDevice(FxrematError, ValueError):
    """fxremat knows no GPU of this name; ``known`` are those it knows, ``near`` is the nearest."""

    name: str
    known: tuple[str, ...]
    near: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {self.near!r}?" if self.near else ""
        return f"there is no device {self.name!r}{hint} (devices: {', '.join(self.known)})"


class UnsupportedDevice(FxrematError, NotImplementedError):
    """A budget was asked for on a ``device`` whose memory fxremat does not count."""

    device: str

    def __str__(self) -> str:
        return (
            f"a memory budget was asked for, but the model is on {self.device!r}: fxremat counts "
            "memory on CUDA devices and on the CPU only\n"
            "What to do: compile it there without backend='fxremat'; FXREMAT_DISABLE=1 does so "
            "without a change of the code"
        )


class NeedsTriton(FxrematError, ImportError):
    """Triton, which generates code for a GPU that is not here, is not installed."""

    def __str__(self) -> str:
        return (
            "planning for a GPU that is not here needs the triton package, to generate its code\n"
            "What to do: pip install 'fxremat[absent]'"
        )


class CannotVary(FxrematError, ValueError):
    """A size of the inputs was asked to vary, but cannot; ``why`` is the reason."""

    what: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.what!r} cannot vary: {self.why}\n"
            "What to do: name all dimensions of the model's inputs that have this size, such as "
            "batch=0:0,1:0 for the first dimension of inputs 0 and 1."
        )
