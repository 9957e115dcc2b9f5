"""Every failure a user can meet: one class each, the message inside, what to do next in it.

Each class keeps what it was made of as attributes, and as ``args``, so that instances can be
copied and pickled. A malformed problem or plan file is `fxremat.core.problem.InvalidProblem`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

from fxremat.sizes import format_bytes, round_up_bytes


class FxrematError(Exception):
    """Base of all errors that fxremat raises on purpose."""


def forget_frames(error: BaseException) -> None:
    """Of an error that was dealt with: its frames would keep those that call us, and their locals.

    They may do so for long, since a frame that raised an error often has it among its locals.
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
        f"Much of it is an output: {what} and the gradient that comes for it take "
        f"{format_bytes(nbytes)}. If only the loss is used in training, call "
        "fxremat.loss_only(model) before the model first runs; if the loss is computed from that "
        "output, put the loss into what you compile."
    )


class InfeasibleBudget(FxrematError):
    """No schedule was found that stays within the budget.

    ``minimum_bytes`` is the smallest peak of any schedule that was found, None if there is none.
    ``contributors`` are the largest things live at that peak: what and where (module and source
    line), and bytes; largest first. ``fragmentation_bytes`` of the smallest peak are reserved by
    torch's allocator and not allocated. ``returned`` is an output that takes much of it with the
    gradient that comes for it: what, and bytes of both.
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int | None,
        contributors: tuple[tuple[str, int], ...] = (),
        fragmentation_bytes: int = 0,
        returned: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(budget_bytes, minimum_bytes, contributors, fragmentation_bytes, returned)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.contributors = contributors
        self.fragmentation_bytes = fragmentation_bytes
        self.returned = returned

    def __str__(self) -> str:
        return "\n".join([self._what(), *self._largest(), self._advice(), *self._of_outputs()])

    def _what(self) -> str:
        budget = f"this graph cannot be trained within {_exact(self.budget_bytes)}"
        if self.minimum_bytes is None:
            return f"{budget}; how few bytes would do is not known"
        least = f"{budget}; the least that fxremat can plan is {_exact(self.minimum_bytes)}"
        if not self.fragmentation_bytes:
            return least
        unused = format_bytes(self.fragmentation_bytes)
        return f"{least}, of which torch's allocator reserves {unused} without using them"

    def _largest(self) -> list[str]:
        if not self.contributors:
            return []
        rows = [f"  {format_bytes(size):>10}  {what}" for what, size in self.contributors]
        return ["largest at that peak:", *rows]

    def _advice(self) -> str:
        if self.minimum_bytes is None:
            budget = "set a larger memory_budget"
        else:
            budget = f'set memory_budget="{round_up_bytes(self.minimum_bytes)}" or more'
        return f"What to do: {budget}, or use a smaller batch or shorter sequences."

    def _of_outputs(self) -> list[str]:
        return [] if self.returned is None else [output_advice(*self.returned)]


class InvalidOption(FxrematError, ValueError):
    """An option has a value that it cannot have.

    ``expected`` completes the sentence "expected ..."; ``choices`` are the values there are, where
    there are few; ``variable`` is the environment variable that the value came from.
    """

    def __init__(
        self,
        option: str,
        value: object,
        expected: str,
        choices: tuple[str, ...] = (),
        variable: str | None = None,
    ) -> None:
        super().__init__(option, value, expected, choices, variable)
        self.option = option
        self.value = value
        self.expected = expected
        self.choices = choices
        self.variable = variable

    def __str__(self) -> str:
        origin = f" (from {self.variable})" if self.variable else ""
        text = f"option {self.option!r}{origin} is {self.value!r}; expected {self.expected}"
        close = nearest(str(self.value), self.choices)
        return f"{text}; did you mean {close!r}?" if close else text


class UnknownOption(InvalidOption):
    """There is no option of this name; ``choices`` are those there are."""

    def __init__(self, option: str, value: object, choices: tuple[str, ...]) -> None:
        super().__init__(option, value, "the name of an option", choices)
        self.args = (option, value, choices)

    def __str__(self) -> str:
        close = nearest(self.option, self.choices)
        hint = f"; did you mean {close!r}?" if close else ""
        return f"there is no option {self.option!r}{hint} (options: {', '.join(self.choices)})"


class SolverRefused(FxrematError):
    """The solver that was asked for cannot plan this graph; ``reason`` says why and which can."""

    def __init__(self, solver: str, reason: str) -> None:
        super().__init__(solver, reason)
        self.solver = solver
        self.reason = reason

    def __str__(self) -> str:
        return f"solver {self.solver!r} cannot plan this graph: {self.reason}"


class HostMemoryExceeded(FxrematError):
    """A copy to host memory would exceed the cap on what such copies hold."""

    def __init__(self, wanted_bytes: int, held_bytes: int, cap_bytes: int) -> None:
        super().__init__(wanted_bytes, held_bytes, cap_bytes)
        self.wanted_bytes = wanted_bytes
        self.held_bytes = held_bytes
        self.cap_bytes = cap_bytes

    def __str__(self) -> str:
        least = round_up_bytes(self.held_bytes + self.wanted_bytes)
        return (
            f"a copy to host memory needs {_exact(self.wanted_bytes)} while copies hold "
            f"{_exact(self.held_bytes)} there, and the cap is {_exact(self.cap_bytes)}\n"
            f"What to do: allow {least} or more of host memory, or free what was saved for "
            "backwards that will not run (the losses of earlier steps hold it)."
        )


class PromiseBroken(UserWarning):
    """More forwards wait for their backward than were planned for: a budget will be exceeded.

    ``in_flight`` forwards wait, the last of them that of ``graph``; the others hold
    ``held_bytes`` by what they have saved. The peak of the last, on top of what others hold, is
    ``expected_bytes``, which is more than ``budget_bytes``. It has been planned again for
    ``planned_for`` runs that wait at once, None: it has not. From the next step on the others leave
    ``left_bytes`` more to it, None: they do not.
    """

    def __init__(
        self,
        graph: str,
        in_flight: int,
        held_bytes: int,
        expected_bytes: int,
        budget_bytes: int,
        planned_for: int | None = None,
        left_bytes: int | None = None,
    ) -> None:
        super().__init__(
            graph, in_flight, held_bytes, expected_bytes, budget_bytes, planned_for, left_bytes
        )
        self.graph = graph
        self.in_flight = in_flight
        self.held_bytes = held_bytes
        self.expected_bytes = expected_bytes
        self.budget_bytes = budget_bytes
        self.planned_for = planned_for
        self.left_bytes = left_bytes

    def __str__(self) -> str:
        more = f"more than {self.graph} was planned for"
        if self.left_bytes is not None:
            more = f"which was not known of {self.graph} when the others were planned"
        return (
            f"the memory budget of {_exact(self.budget_bytes)} will be exceeded: about "
            f"{_exact(self.expected_bytes)} are needed. {self.in_flight} forwards wait for their "
            f"backward at once, {more}; what the "
            f"others have saved holds {_exact(self.held_bytes)}.\n"
            f"What to do: {self._advice()}"
        )

    def _advice(self) -> str:
        if self.left_bytes is not None:
            return (
                "nothing, if the next step fits: from then on the others leave "
                f"{format_bytes(self.left_bytes)} more to {self.graph}. fxremat.prepare, called "
                "before the first step, sees all of them together."
            )
        if self.planned_for is not None:
            return (
                f"nothing, if the next step fits: {self.graph} has been planned again for "
                f"{self.planned_for} runs at once. instances={self.planned_for} among the options "
                "plans for as many from the start."
            )
        return (
            "compile the whole model by one torch.compile, so that one plan counts "
            "everything; or say by the option instances how many runs wait at once; or run the "
            "backward of each forward before the next forward; or set a smaller memory_budget."
        )


class BudgetExceeded(UserWarning):
    """A step took more than the budget: something takes memory that no plan has seen.

    ``taken_bytes`` were there at most, beside a budget of ``budget_bytes``. About ``outside_bytes``
    of them belong to what ``graph`` does not see, for which ``counted_bytes`` had been set aside.
    """

    def __init__(
        self,
        graph: str,
        taken_bytes: int,
        budget_bytes: int,
        outside_bytes: int,
        counted_bytes: int,
    ) -> None:
        super().__init__(graph, taken_bytes, budget_bytes, outside_bytes, counted_bytes)
        self.graph = graph
        self.taken_bytes = taken_bytes
        self.budget_bytes = budget_bytes
        self.outside_bytes = outside_bytes
        self.counted_bytes = counted_bytes

    def __str__(self) -> str:
        over = self.taken_bytes - self.budget_bytes
        return (
            f"a step took {_exact(self.taken_bytes)}, {format_bytes(over)} more than the memory "
            f"budget of {_exact(self.budget_bytes)}: what runs outside of {self.graph}, or is kept "
            f"by hooks, takes about {format_bytes(self.outside_bytes)}, and "
            f"{format_bytes(self.counted_bytes)} had been counted for it.\n"
            "What to do: have fxremat.prepare look at the step; or put the loss into what is "
            f"compiled; or set reserve={round_up_bytes(self.outside_bytes)!r}."
        )


class VerificationFailed(FxrematError):
    """What fxremat made is not what it promised: a bug of fxremat, caught before it could harm."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(check, detail)
        self.check = check
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"verification failed: {self.check}: {self.detail}\n"
            "This is a bug in fxremat; please report it with this message. "
            "What to do: FXREMAT_DISABLE=1 compiles without fxremat; another solver "
            "or a larger memory_budget may avoid it."
        )


class GraphsDiffer(FxrematError):
    """Ranks that have to run a graph together compile different ones, or have other plans of it.

    ``others`` are those whose graph, or ``plan``, is not that of rank ``first``; ``about`` says
    something of each of them, by rank.
    """

    def __init__(
        self,
        first: int,
        others: tuple[int, ...],
        about: dict[int, str],
        what: Literal["graph", "plan"] = "graph",
    ) -> None:
        super().__init__(first, others, about, what)
        self.first = first
        self.others = others
        self.about = about
        self.what = what

    def __str__(self) -> str:
        names, several = ", ".join(map(str, self.others)), len(self.others) > 1
        about = "; ".join(f"rank {one}: {said}" for one, said in self.about.items())
        rank, compiles = ("ranks", "compile") if several else ("rank", "compiles")
        return (
            f"{rank} {names} {compiles} another {self.what} than rank {self.first}, and "
            f"collectives inside have them run it together ({about})\nWhat to do: {self._advice()}"
        )

    def _advice(self) -> str:
        if self.what == "plan":
            return (
                "a cache on disk knows a plan of another job: empty it (TORCHINDUCTOR_CACHE_DIR) "
                "on each machine, or have all of them use one."
            )
        return (
            "see that model, options and the sizes of inputs are the same on these ranks; "
            "TORCH_LOGS=graph_code prints the graphs."
        )


class RankMissing(FxrematError):
    """Something that another rank of the job was to give did not come within ``seconds``.

    ``what`` it is, as a noun; ``rank`` which rank, None where that is not known; ``why``, None
    where nothing was heard of it.
    """

    def __init__(
        self, what: str, seconds: float, rank: int | None = None, why: str | None = None
    ) -> None:
        super().__init__(what, seconds, rank, why)
        self.what = what
        self.seconds = seconds
        self.rank = rank
        self.why = why

    def __str__(self) -> str:
        whose = "another rank" if self.rank is None else f"rank {self.rank}"
        if self.why is not None:
            return f"no {self.what} came from {whose}: {self.why}\nWhat to do: {self._look()}"
        return (
            f"no {self.what} came from {whose} within {self.seconds:g} s\n"
            f"What to do: {self._look()} Where planning takes longer than that, set the option "
            "rank_timeout."
        )

    def _look(self) -> str:
        return "look at what the other ranks say; one of them may have failed, or wait elsewhere."


class NotTraceable(FxrematError):
    """A training step could not be made into one graph of forward and backward."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class UnknownDevice(FxrematError, ValueError):
    """There is no card of this name; ``known`` are those there are, ``near`` the most similar."""

    def __init__(self, name: str, known: tuple[str, ...], near: str | None = None) -> None:
        super().__init__(name, known, near)
        self.name = name
        self.known = known
        self.near = near

    def __str__(self) -> str:
        hint = f"; did you mean {self.near!r}?" if self.near else ""
        return f"there is no device {self.name!r}{hint} (devices: {', '.join(self.known)})"


class NeedsTriton(FxrematError, ImportError):
    """Code for a GPU that is not here is written by Triton, which is not installed."""

    def __str__(self) -> str:
        return (
            "planning for a GPU that is not here needs the triton package, which writes its code\n"
            "What to do: pip install 'fxremat[absent]'"
        )


class CannotVary(FxrematError, ValueError):
    """A size of the inputs was to vary that cannot; ``why`` says what stands against it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.what!r} cannot vary: {self.why}\n"
            "What to do: name dimensions of the model's inputs, as batch=0:0,1:0 for the first "
            "dimension of inputs 0 and 1, all those that have this size."
        )
