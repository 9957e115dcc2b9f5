"""Small kernels of our own, compiled by Inductor apart from the graph that calls them."""

from __future__ import annotations

import ast
import contextvars
import functools
import logging
import os
import queue
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import cpu_vec_isa
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxremat.compat.compilers import inductor_decompositions, tuned_in_the_step
from fxremat.compat.configuration import (
    CUDAGRAPHS,
    PARTITIONER,
    POST_GRAD_PASS,
    SCHEDULER_PASS,
    inductor_config,
)
from fxremat.compat.inductor.generated_code import (
    Generated,
    code_key,
    generate,
    load_without_kernels,
)
from fxremat.compat.inductor.lowered_ahead import hand_over
from fxremat.compat.tensors import (
    Watching,
    apart_from_tracing,
    storage_key,
    storage_watch,
    without_memory,
)
from fxremat.core.constants import MOST_TOGETHER

log = logging.getLogger(__name__)

_INCLUDE = re.compile(r"^[ \t]*#include .*$", re.MULTILINE)
_KERNEL = re.compile(r"^(extern .*\bvoid\s+)(kernel\()", re.MULTILINE)
_INLINED = r"\1__attribute__((flatten)) \2"
_ENTRY = """
#include <dlfcn.h>
#include <cstring>

static bool is_named(const char* file, const char* name) {{
    const size_t all = std::strlen(file), end = std::strlen(name);
    return all >= end && std::strcmp(file + all - end, name) == 0;
}}

PyMODINIT_FUNC PyInit_kernel(void) {{
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&is_named), &here) != 0) {{
{choices}
    }}
    PyErr_SetString(PyExc_ImportError, "this library has no kernel of its file's name");
    return nullptr;
}}
"""

_looking: list[threading.Thread] = []
"""One for each kind of vector instructions that the processor has."""


def look_for_vectors() -> None:
    """Begin to find out which vector instructions can be used, without waiting for it.

    Inductor compiles and runs a program for each kind, one after the other, once in a process.
    Here all are compiled at the same time, and Inductor waits for them where it needs the answer.
    """
    module: Any = cpu_vec_isa
    kinds = _kinds(module)
    if _looking or not kinds:
        return
    find = module.valid_vec_isa_list

    def found() -> Any:
        wait_for_vectors()
        return find()

    for name in ("cache_clear", "cache_info"):  # it is a cached function
        setattr(found, name, getattr(find, name, None))
    for kind in kinds:
        context = contextvars.copy_context()  # the configuration of now
        thread = threading.Thread(target=context.run, args=(_ask, kind), daemon=True)
        _looking.append(thread)
        thread.start()
    module.valid_vec_isa_list = found


def wait_for_vectors() -> None:
    """Wait until nothing is compiled any more to find them: no time is measured meanwhile."""
    for thread in _looking:
        thread.join()


def _kinds(module: Any) -> list[Any]:
    """Those that this processor has, where Inductor asks for several."""
    has = module.x86_isa_checker()
    return [
        kind
        for kind in module.supported_vec_isa_list
        if all(flag in has for flag in str(kind).split())
    ]


def _ask(kind: Any) -> None:
    with suppress(Exception):  # Inductor comes to it again, and says what is wrong
        bool(kind)


def begin_kernels(generated: Generated) -> None:
    """Begin to compile the kernels of some generated code, without waiting for it.

    Inductor keeps what is compiled by its source: it finds it, or waits for what has begun. Where
    something fails, nothing is begun; Inductor itself will come to it and say why.
    """
    try:
        tree = ast.parse(generated.source)
        tree.body = [one for one in takewhile(_is_no_wait, tree.body) if not _defines(one)]
        with compiled_together():
            exec(compile(tree, "<kernels ahead>", "exec"), {"__name__": "<kernels ahead>"})
    except Exception as error:  # whatever the code of any kernel may raise
        log.debug("kernels are not begun ahead: %s: %s", type(error).__name__, error)


def _is_no_wait(statement: ast.stmt) -> bool:
    """False for the statement at the top of generated code that waits for all kernels."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    return not (isinstance(function, ast.Attribute) and function.attr == "wait")


def _defines(statement: ast.stmt) -> bool:
    """Whether a statement defines what calls kernels, or is for a run as a program."""
    return isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.If))


_gathering = threading.Lock()
"""Held while Inductor's own way of beginning a kernel is replaced: by one thread at a time."""


@dataclass(frozen=True)
class _Kernel:
    """One kernel that Inductor asks for: the file it wants, and how it would make it."""

    library: Path
    source: Path
    command: str
    done: Future[None] = field(default_factory=Future)

    @property
    def symbol(self) -> str:
        return "kernel_" + re.sub(r"\W", "_", self.library.name)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Inside, C++ kernels that Inductor begins are gathered; then they are begun together.

    Inductor compiles each kernel by itself. Most of the time that this takes goes to headers, the
    same for all. Here a few kernels are one source, each in a namespace of its own. The library is
    put where Inductor looks for each of them. Asked for its one kernel, it looks at the name of its
    own file.

        a.cpp b.cpp c.cpp  ->  one source  ->  one library  ->  a.so = b.so = c.so

    A compiler inlines what is called from one place. What several kernels call it would not inline,
    and loops would take longer than compiled by themselves; so kernels ask for it.

    Where something fails, Inductor compiles a kernel by itself when it comes to need it. Where it
    is to compile in its own thread, kernels are there when this is left.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    owner: Any = AsyncCompile
    thread, kernels = threading.get_ident(), list[_Kernel]()

    def gather(task: Any) -> Future[None]:
        kernel = _kernel_of(task)
        if kernel is None:
            nothing = Future[None]()
            nothing.set_result(None)
            return nothing
        kernels.append(kernel)
        return kernel.done

    def begin(self: Any, argument_types: list[str], source: str) -> Any:
        if threading.get_ident() != thread:
            return begin_alone(self, argument_types, source)
        load: Any = CppPythonBindingsCodeCache.load_pybinding_async
        return load(argument_types, source, submit_fn=gather)

    with _gathering:
        begin_alone = owner.cpp_pybinding
        owner.cpp_pybinding = begin
        try:
            yield
        finally:
            owner.cpp_pybinding = begin_alone
            workers = get_compile_threads()
            for group in groups(kernels, workers):
                _compile_in(workers, group)


def groups(kernels: Sequence[Any], workers: int) -> list[Sequence[Any]]:
    """The kernels for each run of the compiler: each worker has two runs, if they are enough."""
    each = ceil(len(kernels) / (2 * workers)) if workers > 1 else MOST_TOGETHER
    size = min(MOST_TOGETHER, max(1, each))
    return [kernels[begin : begin + size] for begin in range(0, len(kernels), size)]


def _kernel_of(task: Any) -> _Kernel | None:
    """The kernel that a task of Inductor's compiles; None if it does something else."""
    from torch._inductor import codecache

    worker: Any = codecache._worker_compile_cpp
    if not isinstance(task, functools.partial) or task.func is not worker:
        return None
    _, builders = task.args
    if len(builders) != 1:
        return None
    library = Path(builders[0].get_target_file_path())
    source, command = library.with_suffix(".cpp"), builders[0].get_command_line()
    known = source.exists() and str(source) in command and str(library) in command
    return _Kernel(library, source, command) if known else None


_waiting: queue.SimpleQueue[Sequence[_Kernel]] = queue.SimpleQueue()
_workers = list[threading.Thread]()
os.register_at_fork(after_in_child=_workers.clear)  # a child has none of them


def _compile_in(workers: int, kernels: Sequence[_Kernel]) -> None:
    """Let one of so many threads compile the kernels; they do not keep the program from ending."""
    if workers <= 1:
        _try(kernels)
        return
    _waiting.put(kernels)
    while len(_workers) < workers:
        _workers.append(threading.Thread(target=_work, daemon=True))
        _workers[-1].start()


def _work() -> None:
    while True:
        _try(_waiting.get())


def _try(kernels: Sequence[_Kernel]) -> None:
    try:
        _compile(kernels)
    except Exception as error:  # Inductor compiles what is not there, and says what is wrong
        log.debug("kernels are not compiled together: %s: %s", type(error).__name__, error)
    for kernel in kernels:
        kernel.done.set_result(None)


def _compile(kernels: Sequence[_Kernel]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        first, source, library = kernels[0], Path(directory, "all.cpp"), Path(directory, "all.so")
        source.write_text(
            joined([(k.symbol, k.library.name, k.source.read_text()) for k in kernels])
        )
        command = first.command.replace(str(first.source), str(source))
        command = command.replace(str(first.library), str(library))
        arguments = [*shlex.split(command), "-ldl"]
        subprocess.run(arguments, check=True, capture_output=True, cwd=directory)
        for kernel in kernels:
            _put(library, kernel.library)


def _put(library: Path, place: Path) -> None:
    """Copy a library; nobody sees a part of it. The same file would be the same library."""
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as temporary:
        shutil.copyfile(library, temporary.name)
    os.chmod(temporary.name, 0o755)
    os.replace(temporary.name, place)


def joined(kernels: Sequence[tuple[str, str, str]]) -> str:
    """One source of several: the symbol that each is to have, its library's name, its source."""
    includes = dict.fromkeys(
        line.strip() for _, _, source in kernels for line in _INCLUDE.findall(source)
    )
    parts = ["#define PY_SSIZE_T_CLEAN", *includes]
    for symbol, _, source in kernels:
        parts += [
            f"#define kernel {symbol}",
            f"#define PyInit_kernel PyInit_{symbol}",
            f"namespace in_{symbol} {{",
            _KERNEL.sub(_INLINED, _INCLUDE.sub("", source)),
            "}",
            "#undef kernel",
            "#undef PyInit_kernel",
        ]
    choices = "\n".join(
        f'        if (is_named(here.dli_fname, "{name}")) return in_{symbol}::PyInit_{symbol}();'
        for symbol, name, _ in kernels
    )
    return "\n".join([*parts, _ENTRY.format(choices=choices)])


@contextmanager
def apart() -> Iterator[None]:
    """Inside, tensors are real, and nothing that is being compiled around it has a say.

    Else a kernel would be written anew where its graph's code comes from the cache.
    """
    own = {CUDAGRAPHS: False, POST_GRAD_PASS: None, SCHEDULER_PASS: None, PARTITIONER: None}
    own["allow_buffer_reuse"] = False  # as for graphs under a budget
    with apart_from_tracing(), inductor_config.patch(own), tuned_in_the_step(), torch.no_grad():
        yield


@contextmanager
def for_a_kernel() -> Iterator[None]:
    """Inside, tensors are fake and of one mode, which the inputs of a kernel's graph have to be.

    A kernel is made of a graph that writes into its inputs and returns nothing.
    """
    # Inductor's cache keeps what is made of a graph only where its sizes belong to a shape env.
    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with apart(), mode:
        yield


@contextmanager
def _kept_by_inductor(module: fx.GraphModule) -> Iterator[list[Any]]:
    """Inside, Inductor's cache keeps what it makes of a kernel's graph; its inputs."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with apart():  # else what is compiled around it would give its own mode
        mode = detect_fake_mode(inputs)
        with tracing(TracingContext(mode)), V.set_fake_mode(mode):
            yield inputs


def kernel_key(module: fx.GraphModule) -> str | None:
    """Equal for graphs that are the same kernel, in all processes; None where that is not known."""
    with _kept_by_inductor(module):
        return code_key(module, is_backward=False)


def decomposed(function: Callable[..., object], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A trace in the operators that Inductor has kernels for; inside `for_a_kernel`."""
    table = inductor_decompositions()
    traced = make_fx(function, decomposition_table=table)(*inputs)
    # while a graph is compiled, a trace writes its code later, and Inductor's key sees when
    return fx.GraphModule(traced, traced.graph)


@dataclass(frozen=True)
class Unbuilt:
    """A kernel as Inductor wrote it, not compiled.

    ``allocates`` are bytes beside its inputs, at its peak. ``run`` allocates as the kernel does, on
    tensors without memory, given in a list.
    """

    allocates: int
    run: Callable[[list[torch.Tensor]], object]


def unbuilt_kernel(module: fx.GraphModule) -> Unbuilt:
    """What a kernel allocates; compiles nothing."""
    with apart():
        generated = generate(module, is_backward=False)
    live: dict[int, tuple[int, Callable[[], bool]]] = {}
    peak = 0
    call = load_without_kernels(generated, generated.constants, "<kernel>")
    with without_memory() as made:
        given = [made(_like(n)) for n in module.graph.nodes if n.op == "placeholder"]
        known = {storage_key(tensor) for tensor in given}

        def count(_op: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            nonlocal peak
            for key in [key for key, (_, is_gone) in live.items() if is_gone()]:
                del live[key]
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known:
                    key, is_gone = storage_watch(leaf)
                    live[key] = leaf.untyped_storage().nbytes(), is_gone
            peak = max(peak, sum(size for size, _ in live.values()))

        with Watching(count):
            call(list(given))
    return Unbuilt(peak, call)


def begin_kernel(module: fx.GraphModule) -> None:
    """Begin to compile a kernel without waiting for it; `compile_kernel` then finds it."""
    with apart():
        generated = generate(module, is_backward=False, with_kernels=True)
        begin_kernels(generated)
        if generated.lowered is not None:
            hand_over(generated.lowered)


def compile_kernel(module: fx.GraphModule) -> Callable[[list[torch.Tensor]], object]:
    """Called with a list of tensors, which it empties."""
    from torch._inductor.compile_fx import compile_fx_inner

    with _kept_by_inductor(module) as inputs:
        compiled: Any = compile_fx_inner(module, inputs)
    return cast("Callable[[list[torch.Tensor]], object]", compiled)


def _like(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
