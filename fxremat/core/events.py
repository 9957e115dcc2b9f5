"""What is asked of a memory allocator, and what one run of a graph asks of it. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fxremat.core.layout import CodeBuffer


@dataclass(frozen=True, slots=True)
class Allocate:
    """``nbytes`` are asked for; ``name`` is free again after a `Free`."""

    name: str
    nbytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """What was allocated as ``name`` is freed."""

    name: str


Event = Allocate | Free


@dataclass(frozen=True)
class Given:
    """An input of a part: its bytes, and what becomes of it.

    With ``own`` each run has one of its own; else it is a parameter, or as one. With ``again`` it
    is read in the backward. ``gradient`` is the block of its gradient, where it has one.
    """

    nbytes: int
    own: bool = False
    again: bool = False
    gradient: str | None = None


@dataclass(frozen=True)
class RunEvents:
    """What one version of a part does; blocks have names of its own.

    ``forward`` and ``backward`` neither allocate inputs nor the gradients that come in. Of the
    ``results`` those ``again`` are read in the backward. ``incoming`` are the gradients of results,
    and their bytes. What is live at the end of a half stays until it is known who holds it. The
    generated code itself asks for the ``forward_buffers`` and ``backward_buffers``, in this order.
    If ``gradients_stay``, those of parameters live on under the next forward.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    inputs: tuple[Given, ...] = ()
    results: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    incoming: tuple[tuple[str, int], ...] = ()
    forward_buffers: tuple[CodeBuffer, ...] = ()
    backward_buffers: tuple[CodeBuffer, ...] = ()
    gradients_stay: bool = False

    def resized(self, sizes: Mapping[str, int]) -> RunEvents:
        """The same with these bytes of each block, by its name."""

        def half(events: Iterable[Event]) -> tuple[Event, ...]:
            return tuple(
                replace(e, nbytes=sizes[e.name]) if isinstance(e, Allocate) else e for e in events
            )

        incoming = tuple((name, sizes[name]) for name, _ in self.incoming)
        return replace(
            self, forward=half(self.forward), backward=half(self.backward), incoming=incoming
        )

    def sizes(self) -> dict[str, int]:
        """Bytes of all blocks, by their names."""
        made = (e for e in (*self.forward, *self.backward) if isinstance(e, Allocate))
        return {one.name: one.nbytes for one in made} | dict(self.incoming)


@dataclass(frozen=True)
class Forward:
    """A run goes forward: names of its inputs outside, and what it gives to the outside."""

    run: int
    inputs: tuple[str, ...] = ()
    results: tuple[Allocate, ...] = ()


@dataclass(frozen=True)
class Backward:
    """A run goes backward: names of the gradients that come in, and what it gives.

    If they are ``passed``, nobody but the run holds what comes in from then on.
    """

    run: int
    incoming: tuple[str, ...] = ()
    gradients: tuple[Allocate, ...] = ()
    passed: bool = False


Outside = Allocate | Free | Forward | Backward
"""What happens outside of the parts. What is there all the time has a name that is no number."""
