"""What torch asks of a CUDA device while it generates code, answered from a table.

Inductor reads the properties of the device when it chooses how loops run, and asks whether Triton
can compile for it. Nothing is run: who launches a kernel inside fails. Everything is as before at
the end.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
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
    "torch._inductor.runtime.hints",
    "torch._inductor.codegen.cuda.cuda_env",
)
"""Modules whose functions remember what the device has said."""


@dataclass(frozen=True)
class Properties:
    """Those of `torch.cuda.get_device_properties` that code depends on, by the same names.

    What is the same on all cards of NVIDIA stands in the class.
    """

    warp_size = 32
    gcnArchName = ""
    is_integrated = 0
    is_multi_gpu_board = 0
    uuid = "absent"

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
    _prepare_patterns()
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        for target, name, value in _answers(properties):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(_interface(properties))
        stack.enter_context(_patterns_of_now())
        stack.enter_context(_constants_on_host())
        stack.enter_context(_forgetting())
        stack.enter_context(_driver(properties))
        yield


def _answers(properties: Properties) -> Iterator[tuple[Any, str, Any]]:
    """Functions, and what stands for them."""
    cuda = torch.cuda
    yield cuda, "get_device_properties", lambda device=None: properties
    yield cuda, "get_device_capability", lambda device=None: properties.capability
    yield cuda, "get_device_name", lambda device=None: properties.name
    yield cuda, "current_device", lambda: 0
    yield cuda, "device_count", lambda: 1
    yield cuda, "is_available", lambda: True
    yield cuda, "is_bf16_supported", lambda including_emulation=True: properties.major >= 8
    yield cuda, "synchronize", _nothing
    yield cuda, "default_generators", (_Generator(),)
    yield cuda, "set_device", _nothing
    yield cuda, "_exchange_device", lambda device: 0
    yield cuda, "_maybe_exchange_device", lambda device: 0
    yield torch._C, "_cuda_getCurrentRawStream", lambda device: 0

    def described(device: torch.device) -> DeviceProperties:
        if device.type != "cuda":
            return known(device)
        return DeviceProperties(
            type="cuda",
            index=0,
            cc=properties.architecture,
            **{f: getattr(properties, f) for f in _FIELDS if f in DeviceProperties._fields},
        )

    known = DeviceProperties.create
    yield DeviceProperties, "create", staticmethod(described)
    yield triton_utilities, "triton_hash_with_backend", lambda: f"absent-{properties.architecture}"


_FIELDS = (
    "multi_processor_count",
    "major",
    "regs_per_multiprocessor",
    "max_threads_per_multi_processor",
    "max_threads_per_block",
    "warp_size",
)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, tensors without memory may lie on CUDA, whether torch knows CUDA or not."""
    with (
        _guard(),
        mock.patch.object(torch.cuda, "_lazy_init", _nothing),
        mock.patch.object(fake_tensor, "init_gpu_context", _nothing),  # a byte on the device
    ):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for what a device would do."""


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


@contextmanager
def _interface(properties: Properties) -> Iterator[None]:
    """What Dynamo and Inductor know of CUDA as one kind of device among others."""

    class Worker(interfaces.CudaInterface.Worker):
        get_device_properties = staticmethod(lambda device=None: properties)
        current_device = staticmethod(lambda: 0)

    class Interface(interfaces.CudaInterface):
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        get_compute_capability = staticmethod(lambda device=None: properties.architecture)
        get_device_properties = staticmethod(lambda device=None: properties)  # type: ignore[assignment]
        device_count = staticmethod(lambda: 1)
        synchronize = staticmethod(lambda device=None: None)
        exchange_device = staticmethod(lambda device: 0)
        maybe_exchange_device = staticmethod(lambda device: 0)
        is_bf16_supported = staticmethod(lambda including_emulation=False: properties.major >= 8)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    Interface.Worker = Worker  # type: ignore[misc]
    interfaces.get_interface_for_device("cpu")  # all kinds are registered at first use
    with mock.patch.dict(interfaces.device_interfaces, {"cuda": Interface, "cuda:0": Interface}):
        yield


def _prepare_patterns() -> None:
    """Trace Inductor's patterns where they can be traced: autograd refuses a device without code.

    Traced once, they serve graphs on any device. They are asked for just as Inductor does.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    joint_graph.lazy_init(_HERE)
    post_grad.lazy_init()


_HERE = torch.device("cpu")


@contextmanager
def _patterns_of_now() -> Iterator[None]:
    """Inside, no pattern is traced again for another device."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    with ExitStack() as stack:
        for module in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(module, "lazy_init", _nothing))
        yield


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made on the device is made on the host instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            return _HERE if value == CUDA and isinstance(value, torch.device) else value

        return func(*pytree.tree_map(here, args), **pytree.tree_map(here, kwargs or {}))


@contextmanager
def _constants_on_host() -> Iterator[None]:
    """Constants that Inductor folds are single numbers, which it computes on the device."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    folded = Folder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnHost():  # type: ignore[no-untyped-call]
            return folded(self, *args, **kwargs)

    with mock.patch.object(Folder, "run", run):
        yield


@contextmanager
def _forgetting() -> Iterator[None]:
    """What was remembered of devices before is not believed inside, and the other way round."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name in _ASKED_OF_TORCH:
        module: ModuleType | None = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else []:
            getattr(value, "cache_clear", lambda: None)()


@contextmanager
def _driver(properties: Properties) -> Iterator[None]:
    """Triton's driver, which Inductor asks for the target and for shared memory."""
    if not has_triton():
        yield
        return
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utilities:
        def get_device_properties(self, device: int) -> Mapping[str, int]:
            return {
                "max_shared_mem": properties.shared_memory_per_block_optin,
                "max_num_regs": properties.regs_per_multiprocessor,
                "multiprocessor_count": properties.multi_processor_count,
                "warpSize": properties.warp_size,
            }

    class Driver:
        utils = Utilities()

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", properties.architecture, properties.warp_size)

        def get_current_device(self) -> int:
            return 0

    from torch._inductor.runtime import triton_helpers

    name = "_active" if "_active" in vars(driver) else "active"  # before Triton 3.6
    with (
        mock.patch.object(driver, name, Driver()),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", _nothing),
    ):
        yield
