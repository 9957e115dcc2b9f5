"""The optimizers that live in this process, and a step of one on tensors without memory.

An optimizer is known by a weak reference from when it is made. To look for it among all objects of
the process whenever a graph is compiled would take too long: 0.2 s among 400,000 objects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.optim import Optimizer
from torch.optim import optimizer as base

from fxremat.compat.dynamo import kinds_of
from fxremat.compat.tensors import Watching

_MADE: list[ref[Optimizer]] = []
"""All that live, the oldest first."""


def note_optimizers() -> None:
    """Note every optimizer that is made from now on, or loaded or copied, and those that live.

    The latter are looked for once, and only where a class of optimizers has been used at all.
    """
    made: Any = Optimizer._patch_step_function
    if hasattr(made, "__wrapped__"):
        return

    @wraps(made)
    def patch_step_function(self: Optimizer) -> None:
        made(self)
        _note(self)

    Optimizer._patch_step_function = patch_step_function  # type: ignore[method-assign]
    used = {kind for kind in kinds_of(Optimizer) if getattr(kind.step, "hooked", False)}
    for one in gc.get_objects() if used else ():
        if type(one) in used:  # asking a proxy for its class could run code
            _note(one)


def _note(optimizer: Optimizer) -> None:
    if not any(one() is optimizer for one in _MADE):
        _MADE.append(ref(optimizer, _MADE.remove))


def live_optimizers() -> list[Optimizer]:
    """All that live, the newest first, without wrappers, which pass on to those that they have."""
    note_optimizers()
    alive = [one() for one in reversed(_MADE)]
    return [one for one in alive if one is not None and not wrapped_by(one)]


def wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one has as attributes, or in lists or mappings that it has."""
    found: list[Any] = []
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value
        found += held if isinstance(value, (list, tuple, dict)) else [value]
    return [one for one in found if isinstance(one, Optimizer)]


@contextmanager
def steps_as_with(
    kinds: Iterable[type[Any]], seen: Callable[[Any, Any, Any, Any], None]
) -> Iterator[None]:
    """Inside, and inside `without_memory`, optimizers step as with real weights of these ``kinds``.

    Without this torch's optimizers would not take the implementation for many tensors at once,
    which they take by default on CUDA, and while a graph is compiled they would take what suits a
    graph. A number of which no tensor here has the value is 1. What a step has compiled runs as it
    is. Hooks that are registered for all optimizers are not told of these steps. ``seen`` is told
    of each op, as by `Watching`.
    """
    known: list[Any] = base._foreach_supported_types
    plain = all(kind in known for kind in kinds)
    known += [FakeTensor] if plain else []
    try:
        with (
            mock.patch.object(torch.compiler, "_is_compiling_flag", False),
            mock.patch.dict(base._global_optimizer_pre_hooks, clear=True),
            mock.patch.dict(base._global_optimizer_post_hooks, clear=True),
            torch.compiler.set_stance("force_eager"),
            _AnyNumber(seen),
        ):
            yield
    finally:
        if plain:
            known.remove(FakeTensor)


class _AnyNumber(Watching):  # type: ignore[no-untyped-call]
    """Gives a number where an op asks for the value of a tensor that has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else 1
