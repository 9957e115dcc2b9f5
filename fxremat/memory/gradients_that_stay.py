"""Gradients that live on under the next forward: those of the next backward come beside them.

Where a loop accumulates gradients, or drops them late, autograd adds new ones to those that are
there. Until it has, both are alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fxremat.core.events import Allocate, Event, Free, RunEvents


def without(events: Sequence[Event], names: Collection[str]) -> tuple[Event, ...]:
    """The events but those of the blocks of these names."""
    return tuple(e for e in events if not (isinstance(e, (Allocate, Free)) and e.name in names))


def staying(run: RunEvents) -> frozenset[str]:
    """The gradients of a run that live on under the next forward."""
    names = (one.gradient for one in run.inputs if run.gradients_stay and not one.own)
    return frozenset(name for name in names if name is not None)


def seconds(run: RunEvents) -> dict[str, str]:
    """Names, which no block of the run has, for second ones of the gradients that stay."""
    return {name: f"{10**9 + k}" for k, name in enumerate(sorted(staying(run)))}


def with_second_gradients(events: Iterable[Event], run: RunEvents) -> Iterator[Event]:
    """The events of a backward in which the gradients of an earlier one are there still.

    Those have their places, so that each new one lies outside, too, until autograd has added it.
    """
    second = seconds(run)
    for event in events:
        yield event
        if isinstance(event, Allocate) and event.name in second:
            yield Allocate(second[event.name], event.nbytes)


def loop_of(step: Sequence[Event], second: Mapping[str, str]) -> list[Event]:
    """What a pool is asked for in a loop of these steps, at whose ends all is freed.

    Where gradients stay (``second`` has the names of those that are added to them), they come from
    an earlier plan, so that the first step begins with them. Then a step begins without any, and
    the next one adds to those that it leaves.
    """
    there = [event for event in step if isinstance(event, Allocate) and event.name in second]
    ends, adds = [Free(one.name) for one in there], _step_without(step, second)
    begins = _step_without(step, set(second.values()), stays=second)
    return [*there, *adds, *ends, *begins, *adds, *ends] if there else [*adds, *adds]


def _step_without(
    step: Sequence[Event], missing: Collection[str], stays: Collection[str] = ()
) -> list[Event]:
    """The events but those of what is ``missing``; in the end all is freed that does not stay."""
    left, found = dict[str, None](), list(without(step, missing))
    for event in found:
        if isinstance(event, Allocate):
            left[event.name] = None
        elif isinstance(event, Free):
            del left[event.name]
    return [*found, *(Free(name) for name in left if name not in stays)]
