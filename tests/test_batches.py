"""Which batches of an epoch fit is known before training, and the loader does not notice."""

import random
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

from fxremat.errors import InvalidOption
from fxremat.whatif.batches import BatchCheck, _unchanged, check_batches
from tests.end_to_end import measured
from tests.graphs import Net

LENGTHS = [10 * (k % 9 + 1) for k in range(24)]
LENGTH = [(0, 1)]


def _net() -> Net:
    """Its loss, of tokens (batch, length)."""
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    parts = {"embedding": nn.Embedding(16, 64), "layers": layers}
    return Net(lambda net, tokens: net.layers(net.embedding(tokens)).square().mean(), **parts)


def _check(batches: Iterable[list[int]], budget: str = "1GiB") -> BatchCheck:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return check_batches(_net(), (tokens,), batches, LENGTHS, length=LENGTH, memory_budget=budget)


def test_batches_over_the_budget_are_named_and_those_below_train_within_it() -> None:
    batches = BatchSampler(range(24), 4, drop_last=False)
    longest = [max(LENGTHS[k] for k in batch) for batch in batches]
    loose = _check(batches)
    assert loose.lengths == tuple(longest)
    assert loose.too_long == ()
    assert str(loose).startswith("all 6 batches fit")
    tight = _check(batches, "544KiB")
    assert 0 < tight.largest < max(longest)
    assert tight.too_long == tuple(k for k, n in enumerate(longest) if n > tight.largest)
    assert f"({max(longest)})" in str(tight)
    model, tokens = _net(), torch.zeros(4, tight.largest, dtype=torch.long)
    compiled = torch.compile(model, backend="fxremat", options={"memory_budget": "544KiB"})
    assert measured(model, compiled, (tokens,)) <= 544 * 2**10


@pytest.mark.parametrize("own", [False, True])
def test_the_epoch_that_comes_is_the_one_that_was_looked_at(own: bool) -> None:
    generator = torch.Generator().manual_seed(3) if own else None
    batches = BatchSampler(RandomSampler(LENGTHS, generator=generator), 4, drop_last=False)
    torch.manual_seed(5)
    random.seed(5)
    with _unchanged(batches):
        seen = [list(batch) for batch in batches]
        random.random()
    drawn = random.random()
    assert [list(batch) for batch in batches] == seen
    random.seed(5)
    assert random.random() == drawn


def test_an_iterator_is_refused_before_it_is_read() -> None:
    batches = iter([[0, 1], [2]])
    with pytest.raises(InvalidOption, match="not an iterator"):
        _check(batches)
    assert next(batches) == [0, 1]
