"""Kernels, compiled in processes of their own before Inductor comes to wait for them."""

from __future__ import annotations

import ast
import contextvars
import logging
import threading
from contextlib import suppress
from itertools import takewhile
from typing import Any

from fxremat.compat.inductor.generated_code import Generated
from fxremat.compat.inductor.kernels_together import compiled_together

log = logging.getLogger(__name__)


_looking: list[threading.Thread] = []
"""One for each kind of vector instructions that the processor has."""


def look_for_vectors() -> None:
    """Begin to find out which vector instructions can be used, without waiting for it.

    Inductor compiles and runs a program for each kind, one after the other, once in a process.
    Here all are compiled at the same time, and Inductor waits for them where it needs the answer.
    """
    from torch._inductor import cpu_vec_isa

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
        thread = threading.Thread(target=context.run, args=(_try, kind), daemon=True)
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


def _try(kind: Any) -> None:
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
