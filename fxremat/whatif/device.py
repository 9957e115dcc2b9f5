"""Devices that are not here: planning for a card on a machine without it.

    with fxremat.device.absent("H100"):
        model, tokens = make()
        print(fxremat.explain(model, tokens, memory_budget="60GiB"))

Inside, tensors have no memory, and models are traced, planned and counted in dry runs as on that
card, under ``torch.autocast("cuda")`` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxremat.compat.absent.autocast import cuda_autocast
from fxremat.compat.absent.pretending import fake_cuda, has_triton
from fxremat.compat.tensors import fake_tensors
from fxremat.cost.device import PLANNED_FOR, Card, card_named
from fxremat.errors import NeedsTriton


@contextmanager
def absent(name: str) -> Iterator[Card]:
    """Plan for the card of that name: "H100", "A100-40GB", "4090" and others.

    Models and inputs may be made inside, on any device; those made before are taken by their
    sizes. Raises `UnknownDevice`, with the names there are, and `NeedsTriton` where the package
    that writes code for GPUs is missing.
    """
    card = card_named(name)
    if not has_triton():
        raise NeedsTriton
    token = PLANNED_FOR.set(card)
    try:
        autocast = cuda_autocast(supports_bfloat16=card.capability >= (8, 0))
        with fake_cuda(), autocast, fake_tensors():
            yield card
    finally:
        PLANNED_FOR.reset(token)
