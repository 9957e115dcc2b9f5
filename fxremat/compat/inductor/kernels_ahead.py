"""Kernels, compiled in processes of their own before Inductor comes to wait for them."""

from __future__ import annotations

import ast
import contextvars
import logging
import threading

from fxremat.compat.inductor.generated_code import Generated

log = logging.getLogger(__name__)


def look_for_vectors() -> None:
    """Begin to find out which vector instructions there are, without waiting for it.

    Inductor compiles and runs a program for each kind, once in a process, and waits meanwhile.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    context = contextvars.copy_context()  # the configuration of now
    threading.Thread(target=context.run, args=(pick_vec_isa,), daemon=True).start()


def begin_kernels(generated: Generated) -> None:
    """Begin to compile the kernels of some generated code, without waiting for it.

    Inductor keeps what is compiled by its source: it finds it, or waits for what has begun. Where
    something fails, nothing is begun; Inductor itself will come to it and say why.
    """
    from torch._inductor.async_compile import get_compile_threads

    if get_compile_threads() <= 1:  # they are compiled in this process: nothing is won
        return
    try:
        tree = ast.parse(generated.source)
        tree.body = [statement for statement in tree.body if not _waits_or_runs(statement)]
        exec(compile(tree, "<kernels ahead>", "exec"), {"__name__": "<kernels ahead>"})
    except Exception as error:  # whatever the code of any kernel may raise
        log.debug("kernels are not begun ahead: %s: %s", type(error).__name__, error)


def _waits_or_runs(statement: ast.stmt) -> bool:
    """Whether a statement at the top of generated code waits for kernels, or is no part of them."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.If)):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "wait"
