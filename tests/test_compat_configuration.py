"""torch's configuration as fxremat reads and sets it."""

from __future__ import annotations

import pickle

from torch import fx

from fxremat.compat.configuration import chain_passes, inductor_patches


def test_inductor_patches() -> None:
    assert inductor_patches(None, {}) == {}
    assert inductor_patches("default", {"max-autotune": True}) == {"max_autotune": True}
    tuned = inductor_patches("max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    assert tuned["max_autotune"] is True
    assert tuned["epilogue_fusion"] is False


class Recording:
    """A pass that says that it ran."""

    def __init__(self, name: str | None, ran: list[str | None]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str | None:
        return self.name


def test_chain_passes() -> None:
    ran: list[str | None] = []
    a, b, nameless = (Recording(name, ran) for name in ("a", "b", None))
    assert chain_passes(None) is None
    assert chain_passes(a) is a
    chain = chain_passes([a, b])
    chain(fx.Graph())
    assert ran == ["a", "b"]
    assert chain.uuid() == ("a", "b")
    assert chain_passes([a, nameless]).uuid() is None
    assert pickle.loads(pickle.dumps(chain)).uuid() == ("a", "b")
