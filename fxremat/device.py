"""Devices that are not here: planning for a card on a machine without it.

    with fxremat.device.absent("H100"):
        model, tokens = make()
        print(fxremat.explain(model, tokens, memory_budget="60GiB"))

Inside, tensors have no memory, and models are traced, planned and rehearsed as on that card,
under ``torch.autocast("cuda")`` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fxremat import compat
from fxremat.cost.cards import Card, card_named
from fxremat.errors import NeedsTriton

_CARD: ContextVar[Card | None] = ContextVar("fxremat_card", default=None)


@contextmanager
def absent(name: str) -> Iterator[Card]:
    """Plan for the card of that name: "H100", "A100-40GB", "4090" and others.

    Models and inputs may be made inside, on any device; those made before are taken by their
    sizes. Raises `UnknownDevice`, with the names there are, and `NeedsTriton` where the package
    that writes code for GPUs is missing.
    """
    card = card_named(name)
    if not compat.has_triton():
        raise NeedsTriton
    token = _CARD.set(card)
    try:
        autocast = compat.cuda_autocast(supports_bfloat16=card.capability >= (8, 0))
        with compat.fake_cuda(), autocast, compat.fake_tensors():
            yield card
    finally:
        _CARD.reset(token)


def absent_card() -> Card | None:
    """The card that is planned for although it is not here; None: what is here."""
    return _CARD.get()
