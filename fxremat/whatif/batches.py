"""`check_batches`: which batches of an epoch train within a number of bytes, before any has run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fxremat.errors import InvalidOption
from fxremat.sizes import format_bytes
from fxremat.whatif.fit import Places, fit


@dataclass(frozen=True)
class BatchCheck:
    """The length of each batch of an epoch, in order, and the ``largest`` that fits the budget."""

    lengths: tuple[int, ...]
    largest: int
    budget_bytes: int

    @property
    def longest(self) -> int:
        """The length of the longest batch; 0 without any."""
        return max(self.lengths, default=0)

    @property
    def too_long(self) -> tuple[int, ...]:
        """The numbers of the batches that do not fit, from 0."""
        return tuple(k for k, length in enumerate(self.lengths) if length > self.largest)

    def __str__(self) -> str:
        budget, over = format_bytes(self.budget_bytes), self.too_long
        most = f"batches of a length up to {self.largest} train within {budget}"
        if not over:
            return f"all {len(self.lengths)} batches fit: {most}, the longest has {self.longest}"
        named = ", ".join(f"{k} ({self.lengths[k]})" for k in over[:10])
        more = "" if len(over) <= 10 else f" and {len(over) - 10} others"
        return f"{len(over)} of {len(self.lengths)} batches do not fit: {named}{more}; {most}"


def check_batches(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    batches: Iterable[Sequence[int]],
    lengths: Sequence[int] | Callable[[int], int],
    *,
    length: Places,
    memory_budget: int | str | None = None,
    device: str | None = None,
    optimizer: str = "none",
    options: Mapping[str, Any] | None = None,
) -> BatchCheck:
    """Which of the next epoch's batches ``model`` trains within ``memory_budget``.

    ``batches`` is a batch sampler, or a loader that has one: it gives the indices of the samples of
    each batch. ``lengths`` are the lengths of samples, by their index; a batch has that of its
    longest. ``inputs`` are those of one batch of full size, and ``length`` are the dimensions of
    them that are its length, as in `fit`, which says what the other arguments are, and raises.

    Nothing is loaded. Random numbers that a sampler draws are drawn again when training begins: so
    these are the batches of the first epoch. Raises `InvalidOption` for an iterator, which could
    not be read again.
    """
    sampler = getattr(batches, "batch_sampler", None) or batches
    if iter(sampler) is sampler:
        raise InvalidOption("batches", batches, "a batch sampler or a loader, not an iterator")
    of_sample = lengths if callable(lengths) else lengths.__getitem__
    with _unchanged(sampler):
        found = tuple(max(map(of_sample, batch)) for batch in sampler)
    fitted = fit(
        model,
        inputs,
        vary={"length": length},
        memory_budget=memory_budget,
        device=device,
        optimizer=optimizer,
        options=options,
    )
    return BatchCheck(found, fitted.largest("length").size, fitted.budget_bytes)


@contextmanager
def _unchanged(sampler: object) -> Iterator[None]:
    """Afterwards, what the sampler draws from is as it was before."""
    generators = list(_generators(sampler, set()))
    states = [one.get_state() for one in generators]
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(sampler: object, seen: set[int]) -> Iterator[torch.Generator]:
    """The generators of a sampler, and of those inside of it."""
    seen.add(id(sampler))
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif "sampler" in type(value).__name__.lower() and id(value) not in seen:
            yield from _generators(value, seen)
