"""Parameters that live in host memory and visit the device only where a forward reads them.

`place` moves the data of parameters to host memory, pinned beside a GPU. They stay the same
``nn.Parameter`` objects under the same names, so optimizers, state dicts and tied weights know
nothing of it: an optimizer updates them in host memory, where their gradients arrive. Only while
a forward of the model runs does reading one (``self.weight``) give a copy on the device, made by
``fxremat::fetch``. A compiled graph has one such node for each read, and whatever plans the graph
can place it, or fetch twice instead of keeping the copy. In eager mode autograd keeps what was
fetched until the backward.

How: each module that owns such parameters, and each module above it that has a forward, gets a
subclass of its class, of the same name. There each such parameter is a property, and ``forward``
marks the thread as inside a forward. No module gets a hook, and no parameter another name.

What this cannot see:

* Reads outside of ``forward``, by a loss function say, or in a function under
  ``torch.utils.checkpoint`` that reads parameters of its own when it runs again in the backward,
  get the parameter itself, on the CPU; so do forward hooks of the module that the caller calls.
  Modules below a checkpoint are no trouble: calling one is a forward.
* ``next(model.parameters()).device`` is the CPU. Ask an input or a buffer.
* A forward that writes a parameter writes to the copy. For modules of torch that do so, or that
  keep their weights in lists of their own, see `select`.
* Parametrizations and the like change classes as well: do that first, and offload last. The
  transforms of ``torch.func`` cannot pass a fetch.

A parameter that a forward reads more than once (tied weights, modules called twice) gets a copy
and a gradient for each read. autograd adds these on the host, in memory of torch's allocator.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxremat.errors import InvalidOption
from fxremat.runtime.copies import fetch, host_copy
from fxremat.runtime.host_memory import is_host

__all__ = ["default_device", "place", "restore", "select"]

Model = TypeVar("Model", bound=nn.Module)
DeviceLike = torch.device | str | None


# --- what users call ---------------------------------------------------------------------


def restore(model: Model) -> Model:
    """Undo `place`: the parameters of ``model`` on the device, its modules what they were."""
    for module in model.modules():
        if _is_offloaded(module):
            device, names = module.fxremat_device, module.fxremat_names
            plain: Any = module.fxremat_plain
            module.__class__ = plain
            del module.fxremat_device
            for name in names:
                parameter = module._parameters.get(name)
                if parameter is not None and device is not None:
                    _to_device(parameter, device)
    return model


def select(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The names of the parameters that ``patterns`` match and that can be in host memory.

    ``"all"`` matches all. Those of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` cannot be there, nor
    those of embeddings with ``max_norm`` or sparse gradients, nor subclasses of tensors.
    InvalidOption for a pattern that gives none, with the reason.
    """
    places = list(_places(model))
    unfit = {id(p.parameter): p.unfit for p in places if p.unfit is not None}
    names: dict[str, None] = {}
    for pattern in patterns:
        matching = [p for p in places if pattern == "all" or fnmatchcase(p.name, pattern)]
        fit = [p.name for p in matching if id(p.parameter) not in unfit]
        if not fit and pattern != "all":
            raise _no_weights(pattern, [unfit[id(p.parameter)] for p in matching], places)
        names.update(dict.fromkeys(fit))
    return list(names)


def place(model: Model, names: Iterable[str], device: DeviceLike = None) -> Model:
    """Move the named parameters of ``model`` to host memory, all else to ``device``; the model.

    ``names`` are some of those that `select` gives; a parameter of several names moves under all
    of them; further calls add to earlier ones. Without ``device`` it is `default_device`.

    What moves is never on the device as a whole, so a model that does not fit there can be built
    on the CPU, or on the meta device and loaded with ``load_state_dict(..., assign=True)``.
    ``model.to(...)`` afterwards moves and converts as always, but leaves these parameters in host
    memory; each module's own are for a moment on the device. ``copy.deepcopy`` and
    ``load_state_dict`` keep them there too. If memory runs out on the way, the model still works:
    what is in host memory by then is fetched, and the rest is where it was.

    InvalidOption (a ValueError) for models with parameters or buffers that have no data yet;
    `HostMemoryExceeded` if the parameters would exceed the cap on host memory.
    """
    _check_has_data(model)
    where = torch.empty(0, device=device or default_device(model)).device  # with its index
    wanted = set(names)
    moving = {id(p.parameter): p.parameter for p in _places(model) if p.name in wanted}
    for module in list(model.modules()):
        _offload_module(module, moving.keys(), where)
    for parameter in moving.values():
        _to_host(parameter, where)
    with _hidden(model):
        model.to(where)
    return model


def default_device(model: nn.Module) -> torch.device:
    """Where the rest of ``model`` goes, and what is fetched, if nobody says.

    Where an earlier call of `place` put it, else the first device besides the CPU on which the
    model has parameters or buffers, else CUDA if there is one, else the CPU: there, for tests, the
    CPU is the device, and memory that torch did not allocate is host memory.
    """
    for module in model.modules():
        if _is_offloaded(module) and module.fxremat_device is not None:
            return module.fxremat_device
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# --- what a module becomes ---------------------------------------------------------------


class _Reading(threading.local):
    """Whether this thread is inside a forward, where reading a parameter fetches it."""

    def __init__(self) -> None:
        self.inside = False  # of the instance: Dynamo watches where an attribute is found


_READING = _Reading()


class _Offloaded(nn.Module):
    """Base of the classes that `place` makes; its methods keep the parameters in host memory."""

    fxremat_plain: ClassVar[type[nn.Module]]
    fxremat_names: ClassVar[tuple[str, ...]]
    fxremat_device: torch.device | None = None
    """None in what ``type(model)(...)`` makes: a model of its own, not offloaded."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``fn`` for parameters and buffers, as ``to`` asks for it; see where it moves them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.fxremat_device is not None:
            self.fxremat_device = fn(torch.empty(0, device=self.fxremat_device)).device
            self._keep_in_host_memory()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also what assigning an attribute and ``load_state_dict(..., assign=True)`` call."""
        super().register_parameter(name, param)
        self._keep_in_host_memory()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class and make the subclass anew."""
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the plain class knows better
        return (_new_instance, (self.fxremat_plain, self.fxremat_names), *reduced[2:])

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_in_host_memory()

    def _keep_in_host_memory(self) -> None:
        for parameter in map(self._parameters.get, self.fxremat_names):
            if parameter is not None and self.fxremat_device is not None:
                _to_host(parameter, self.fxremat_device)


def _class_for(plain: type[nn.Module], names: tuple[str, ...]) -> type[_Offloaded]:
    """The subclass of ``plain`` whose parameters ``names`` are fetched where they are read.

    One for all modules alike, so that code compiled for one block of a model serves them all.
    """
    for known in plain.__subclasses__():
        if vars(known).get("fxremat_names") == names:
            return cast("type[_Offloaded]", known)
    members: dict[str, Any] = {name: property(_reader(name)) for name in names}
    members |= {"fxremat_plain": plain, "fxremat_names": names, "forward": _entering(plain)}
    members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    made = types.new_class(plain.__name__, (_Offloaded, plain), {}, lambda it: it.update(members))
    return cast("type[_Offloaded]", made)


def _reader(name: str) -> Callable[[_Offloaded], Any]:
    def read(self: _Offloaded) -> Any:
        if name not in self._parameters:
            raise AttributeError(name)  # nn.Module looks further and words the error
        parameter, device = self._parameters[name], self.fxremat_device
        if parameter is None or device is None or not _READING.inside:
            return parameter
        return fetch(parameter, device) if parameter.device.type == "cpu" else parameter

    return read


def _entering(plain: type[nn.Module]) -> Callable[..., Any]:
    """The forward of ``plain``, inside which parameters are fetched."""

    @functools.wraps(plain.forward, updated=())  # not what decorators left on it
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _READING.inside:
            return plain.forward(self, *args, **kwargs)
        _READING.inside = True
        try:
            return plain.forward(self, *args, **kwargs)
        finally:
            _READING.inside = False

    return forward


def _new_instance(plain: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module without attributes, of the class that `place` gives to a ``plain`` one."""
    made = _class_for(plain, names)
    return made.__new__(made)


def _is_offloaded(module: nn.Module) -> TypeGuard[_Offloaded]:
    """Whether `place` gave ``module`` its class, and nobody changed the class since."""
    return "fxremat_plain" in vars(type(module)) and "fxremat_device" in vars(module)


def _offload_module(module: nn.Module, moving: Set[int], device: torch.device) -> None:
    """Give ``module`` its subclass if it owns parameters ``moving``, or has a forward above some.

    A forward that is an attribute of the module itself, as ``torch.compile(model)`` has one, only
    calls those of modules below.
    """
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    names, plain = [name for name, parameter in own if id(parameter) in moving], type(module)
    if _is_offloaded(module):
        plain = module.fxremat_plain
        names = [n for n in module._parameters if n in {*names, *module.fxremat_names}]
    elif not names:
        has_forward = plain.forward is not nn.Module.forward and "forward" not in vars(module)
        if not (has_forward and any(id(p) in moving for p in module.parameters())):
            return
    changed: Any = module
    changed.__class__ = _class_for(plain, tuple(names))
    changed.fxremat_device = device


# --- where data is -----------------------------------------------------------------------


def _with_gradient(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    yield parameter
    if parameter.grad is not None:
        yield parameter.grad


def _to_host(parameter: nn.Parameter, device: torch.device) -> None:
    """The data and the gradient in host memory from which ``device`` fetches."""
    for tensor in _with_gradient(parameter):
        if not (is_host(tensor) or tensor.is_meta):
            tensor.data = host_copy(tensor.data, device)


def _to_device(parameter: nn.Parameter, device: torch.device) -> None:
    """The data and the gradient in memory of ``device``."""
    for tensor in _with_gradient(parameter):
        if is_host(tensor) or tensor.device != device:
            tensor.data = fetch(tensor.data, device)


@contextmanager
def _hidden(model: nn.Module) -> Iterator[None]:
    """Inside, modules seem not to have the parameters that are in host memory."""
    offloaded = [module for module in model.modules() if _is_offloaded(module)]
    kept = [dict(module._parameters) for module in offloaded]
    for module in offloaded:
        module._parameters.update(dict.fromkeys(module.fxremat_names))
    try:
        yield
    finally:
        for module, parameters in zip(offloaded, kept, strict=True):
            module._parameters.update(parameters)


# --- which parameters --------------------------------------------------------------------


class _Place(NamedTuple):
    """A parameter under one of its names, and why it cannot be in host memory, if so."""

    name: str
    parameter: nn.Parameter
    unfit: str | None


def _places(model: nn.Module) -> Iterator[_Place]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in own:
            full = f"{prefix}.{name}" if prefix else name
            yield _Place(full, parameter, _why_unfit(module, parameter))


def _why_unfit(module: nn.Module, parameter: nn.Parameter) -> str | None:
    """Why this parameter of ``module`` cannot be in host memory, None if it can."""
    embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    if isinstance(module, nn.RNNBase):
        reason = "keeps its weights in a list of its own, past which none of them is read"
    elif embeds and module.max_norm is not None:
        reason = "writes its weights in the forward, because of max_norm"
    elif embeds and module.sparse:
        reason = "has sparse gradients"
    elif type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
        reason = "has parameters that are no plain dense tensors"
    else:
        return None
    return f"{type(module).__name__} {reason}"


def _no_weights(pattern: str, reasons: list[str], places: list[_Place]) -> InvalidOption:
    if reasons:
        expected = f"parameters that can be in host memory, but {reasons[0]}"
        return InvalidOption("weights", pattern, expected)
    names = tuple(p.name for p in places)
    return InvalidOption("weights", pattern, "names of parameters, or patterns of them", names)


def _check_has_data(model: nn.Module) -> None:
    """InvalidOption if a parameter or buffer of ``model`` has no data yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidOption("model", f"{name} without data", "data: run the model once before")
        if tensor.is_meta:
            expected = "data: load_state_dict(..., assign=True) replaces what is on the meta device"
            raise InvalidOption("model", f"{name} without data", expected)
