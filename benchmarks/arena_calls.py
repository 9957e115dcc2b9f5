"""What a buffer at a planned address costs beside one that torch allocates.

    python -m benchmarks.arena_calls [--buffers 1000] [--rounds 50]

Code that asks for buffers and drops each as the next but one comes, as a deep network does, is run
in turn with torch's function, with ours and no places, and in an arena. There each buffer lies
where the one before the last did, and whoever may hold its bytes is asked; the beginning and the
end of the half are counted as well. Times are of the quickest round, in microseconds per buffer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from fxremat.compat.tensors import EMPTY, Empty
from fxremat.core.layout import CodeBuffer, HalfLayout, RunLayout, StepLayout
from fxremat.memory.arena import Arena
from fxremat.runtime.placed import empty_strided_cpu, forward_at_places, places_of_forward

SIZE, STRIDE = (32, 64), (64, 1)
HOST = torch.device("cpu")


def layout(buffers: int) -> StepLayout:
    """So many buffers in two places by turns; every tenth in one of its own, to be kept."""
    one = CodeBuffer("0", SIZE, STRIDE, "torch.float32", 4)
    kept = range(0, buffers, 10)
    at = {number: 2 + place for place, number in enumerate(kept)}
    offsets = tuple(one.nbytes * at.get(number, number % 2) for number in range(buffers))
    half = HalfLayout((one,) * buffers, offsets, frozenset(kept))
    return StepLayout((RunLayout(half),), one.nbytes * (2 + len(kept)))


def code(empty: Empty, buffers: int) -> Callable[[], None]:
    """What asks for the buffers."""

    def run() -> None:
        kept, live = list[torch.Tensor](), list[torch.Tensor | None]([None, None])
        for number in range(buffers):
            if number % 10 == 0:
                kept.append(empty(SIZE, STRIDE, torch.float32))
            else:
                live[number % 2] = None
                live[number % 2] = empty(SIZE, STRIDE, torch.float32)

    return run


def quickest(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of the quickest round of each, in turn."""
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for place, way in enumerate(ways):
            begin = perf_counter()
            way()
            best[place] = min(best[place], perf_counter() - begin)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--buffers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args(arguments)
    arena = Arena(HOST)
    (run,) = arena.placed(layout(asked.buffers))
    ours = forward_at_places(code(empty_strided_cpu, asked.buffers))

    def in_arena() -> None:
        with places_of_forward(run.forward):
            ours()

    ways = {
        "torch": code(EMPTY["cpu"], asked.buffers), "no places": ours, "in an arena": in_arena,
    }  # fmt: skip
    seconds = quickest(list(ways.values()), asked.rounds)
    for name, taken in zip(ways, seconds, strict=True):
        print(f"{name:12} {1e6 * taken / asked.buffers:6.3f} us")
    assert (arena.conflicts, arena.differences, arena.missed) == (0, 0, 0)


if __name__ == "__main__":
    main()
