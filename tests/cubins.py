"""Triton kernels of generated code, compiled for a card that is not here.

Triton brings an assembler along, so that no card and no driver is needed: what is wrong in a kernel
fails here as it would there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fxremat.compat.absent.pretending import Properties, pretending
from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor.generated_code import Generated, load_without_kernels

_AS_TRITON_COMPILES = {
    name: False
    for name in ("use_static_triton_launcher", "use_static_cuda_launcher")
    if hasattr(inductor_config, name)
}
"""Else what comes back can only be launched."""


def cubins(generated: Generated, properties: Properties) -> Mapping[str, tuple[bytes, ...]]:
    """Each Triton kernel's name, and its machine code for each way in which it may be run.

    Raises what Triton raises where a kernel cannot be compiled.
    """
    with pretending(properties), inductor_config.patch(_AS_TRITON_COMPILES):
        sources = dict(_kernels(generated))
        return {name: tuple(_compiled(name, source)) for name, source in sources.items()}


def _kernels(generated: Generated) -> Iterator[tuple[str, str]]:
    """Names and sources, as the generated code asks for them when it is loaded."""
    found: list[tuple[str, str]] = []
    with _asked(found):
        load_without_kernels(generated, generated.constants, "<kernels>")
    yield from found


@contextmanager
def _asked(found: list[tuple[str, str]]) -> Iterator[None]:
    from unittest import mock

    from fxremat.compat.inductor import generated_code

    class Collector(generated_code._NoKernel):
        def triton(self, name: str, source: str, **_: Any) -> Any:
            found.append((name, source))
            return generated_code._NoKernel()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    with mock.patch.object(generated_code, "_NoKernel", Collector):
        yield


def _compiled(name: str, source: str) -> Iterator[bytes]:
    from torch._inductor.codecache import PyCodeCache

    kernel: Any = getattr(PyCodeCache.load(source), name)
    for config in kernel.configs:
        yield bytes(kernel._precompile_config(config).kernel.asm["cubin"])
