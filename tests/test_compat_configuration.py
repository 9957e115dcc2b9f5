"""torch's configuration as fxremat reads and sets it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxremat.compat.configuration import (
    POST_GRAD_PASS,
    CustomGraphPass,
    CustomPartitionerFn,
    cache_directory,
    caches_disabled,
    chain_passes,
    functorch_config,
    inductor_config,
    inductor_patches,
)


def test_classes_that_inductor_asks_for() -> None:
    @dataclass(frozen=True)
    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "one"

    @dataclass(frozen=True)
    class Cut(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any: ...

        def uuid(self) -> str:
            return "two"

    assert Pass().uuid() == "one"
    assert Cut().uuid() == "two"
    assert hasattr(inductor_config, POST_GRAD_PASS)
    assert hasattr(inductor_config, "custom_partitioner_fn")
    assert hasattr(functorch_config, "cse")


def test_caches_disabled() -> None:
    assert not caches_disabled()
    with inductor_config.patch(force_disable_caches=True):
        assert caches_disabled()


def test_cache_directory() -> None:

    directory = Path(cache_directory())
    assert directory == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


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
