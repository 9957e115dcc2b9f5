"""What torch asks of a CUDA device while it generates code, answered from a table.

Inductor reads the properties of the device when it chooses how loops run, and asks whether Triton
can compile for it. Nothing is run: who launches a kernel inside fails. Everything is as before at
the end.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as interfaces
import torch.utils._triton as triton_utilities
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton_package

CUDA = torch.device("cuda", 0)

_ASKED_OF_TORCH = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.codegen.cuda.cuda_env",
)
"""Modules whose functions remember what the device has said."""


@dataclass(frozen=True)
class Properties:
    """Those of `torch.cuda.get_device_properties` that code depends on, by the same names."""

    warp_size = 32
    gcnArchName = ""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    max_threads_per_block: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def architecture(self) -> int:
        """As Triton names it: 90."""
        return 10 * self.major + self.minor


def has_triton() -> bool:
    """Whether the `triton` package is installed; it can write code without a device."""
    return bool(has_triton_package())


@contextmanager
def pretending(properties: Properties) -> Iterator[None]:
    """Inside, ``cuda:0`` has these properties, as far as code is generated for it."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    # Inductor's patterns are traced where they can be: autograd refuses a device without code.
    # Traced once, they serve graphs on any device. They are asked for just as Inductor does.
    joint_graph.lazy_init(_HERE)
    post_grad.lazy_init()
    name, absent = "triton_hash_with_backend", f"absent-{properties.architecture}"
    answers = _answers(properties)
    with (
        fake_cuda(),
        mock.patch.multiple(torch.cuda, create=True, **answers),
        mock.patch.object(torch.cuda, "default_generators", (_Generator(),), create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", always(0), create=True),
        mock.patch.object(triton_utilities, name, always(absent), create=True),
        _interface(answers),
        mock.patch.object(joint_graph, "lazy_init", _nothing),
        mock.patch.object(post_grad, "lazy_init", _nothing),
        _constants_on_host(),
        _forgetting(),
        _driver(properties),
    ):
        yield


def always(answer: Any) -> Any:
    """A function that gives this, whatever it is given."""
    return lambda *_, **__: answer


_nothing = always(None)
"""Stands for what a device would do."""


def _answers(properties: Properties) -> dict[str, Any]:
    """What stands for functions of `torch.cuda`, by their names."""
    answers = {
        "get_device_properties": properties,
        "get_device_capability": properties.capability,
        "get_device_name": properties.name,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": properties.major >= 8,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    return {name: always(answer) for name, answer in answers.items()}


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, tensors without memory may lie on CUDA, whether torch knows CUDA or not."""
    with (
        _guard(),
        mock.patch.object(torch.cuda, "_lazy_init", _nothing),
        mock.patch.object(fake_tensor, "init_gpu_context", _nothing),  # a byte on the device
    ):
        yield


@contextmanager
def _guard() -> Iterator[None]:
    """Methods of tensors switch to the tensor's device, by its guard. A torch without CUDA has
    none; inside, that of meta tensors stands for it, which does nothing.

    The guards are a table of pointers by kind of device (`c10/core/impl/DeviceGuardImplInterface`).
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        torch._C._ensureCUDADeviceGuardSet()  # one that does nothing where there is no device
        yield
        return
    library = Path(torch.__file__).parent / "lib"
    [path] = [p for p in library.iterdir() if p.name in ("libc10.so", "libc10.dylib")]
    table = ctypes.c_void_p * (_META + 1)
    guards = table.in_dll(ctypes.CDLL(str(path)), "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


_CUDA, _META = 1, 14
"""Kinds of devices (`c10/core/DeviceType.h`)."""


class _Generator(torch.Generator):
    """The state of random numbers on the device, which the code of checkpointed blocks keeps."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def clone_state(self) -> torch.Generator:
        return self


def _interface(answers: Mapping[str, Any]) -> AbstractContextManager[object]:
    """What Dynamo and Inductor know of CUDA as one kind of device among others.

    It has the functions of `torch.cuda` as they were, or asks for their answers.
    """
    cuda: Any = interfaces.CudaInterface
    own = {name.removeprefix("_"): staticmethod(answer) for name, answer in answers.items()}
    worker = type("Worker", (cuda.Worker,), own)
    interface = type("CudaInterface", (cuda,), {**own, "Worker": worker})
    interfaces.get_interface_for_device("cpu")  # all kinds are registered at first use
    both = {"cuda": interface, "cuda:0": interface}
    return mock.patch.dict(interfaces.device_interfaces, both)


_HERE = torch.device("cpu")


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made on the device is made on the host instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            return _HERE if value == CUDA and isinstance(value, torch.device) else value

        return func(*pytree.tree_map(here, args), **pytree.tree_map(here, kwargs or {}))


def _constants_on_host() -> AbstractContextManager[object]:
    """Constants that Inductor folds are single numbers, which it computes on the device."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    folded = Folder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnHost():  # type: ignore[no-untyped-call]
            return folded(self, *args, **kwargs)

    return mock.patch.object(Folder, "run", run)


@contextmanager
def _forgetting() -> Iterator[None]:
    """What was remembered of devices before is not believed inside, and the other way round."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    describe: Any = DeviceProperties.create
    describe.cache_clear()
    for name in _ASKED_OF_TORCH:
        module: ModuleType | None = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else []:
            getattr(value, "cache_clear", lambda: None)()


@contextmanager
def _driver(properties: Properties) -> Iterator[None]:
    """Triton's driver, which Inductor asks for the target and for shared memory."""
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    described = {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "max_num_regs": properties.regs_per_multiprocessor,
        "multiprocessor_count": properties.multi_processor_count,
        "warpSize": properties.warp_size,
    }
    target = GPUTarget("cuda", properties.architecture, properties.warp_size)
    stand_in = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=always(described)),
        get_current_target=always(target),
        get_current_device=always(0),
    )
    name = "_active" if "_active" in vars(driver) else "active"  # before Triton 3.6
    with (
        mock.patch.object(driver, name, stand_in),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", _nothing),
    ):
        yield
