"""Numbers in code: which of them tune something, and which are facts.

A *number* is an upper-case name that a module of the product sets to a number or to a tuple of
numbers. In the files of `CONSTANTS` all numbers are tuning numbers. A number elsewhere is
a fact, and listed apart, if

- its name, or the comment or string beside it, names a source (`SOURCE`): a library, a format;
- the docstring of its module names the C++ or CUDA file that its numbers are taken from;
- it is a unit of `UNITS`, negative or at least 2**40 (a marker or an address), or one of several
  names that are set to 0, 1, 2 and so on;
- its module draws something (`DRAWS`): it is a width or a place in a picture.

Every other number is a tuning number too, so one that nobody explains counts against the limit.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

CONSTANTS = {f"fxremat.{folder}.constants" for folder in ("planner", "compile", "core")}
DRAWS = ("fxremat.report", "fxremat.cli")
UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LEAST_MARKER = 2**40
SOURCE = re.compile(
    r"torch|\baten\b|inductor|triton|cuda|cudnn|cublas|\bcub\b|gloo|nccl|highs\b|cp-sat|cpython"
    r"|glibc|onednn|ieee|float\d|u?int\d|fp\d|(\b|_)bits\b|\bdimensions\b|\bformat\b|protocol"
    r"|arxiv|et al\.|data sheet|perfetto",
    re.IGNORECASE,
)
SOURCE_FILE = re.compile(r"\w\.(?:h|cpp|cu|cuh)\b")


def values(node: ast.expr) -> list[float]:
    """The numbers that an expression is made of by arithmetic; none where it is anything else."""
    if isinstance(node, ast.Tuple):
        parts = [values(part) for part in node.elts]
        return list(itertools.chain(*parts)) if all(parts) else []
    try:
        value = eval(ast.unparse(node), {"__builtins__": {}}, {**UNITS})
    except Exception:  # it calls something, or reads another name
        return []
    return [value] if type(value) in (int, float) else []


def is_mark(names: Sequence[str], found: Sequence[float]) -> bool:
    """Whether numbers are no quantities: units, markers, addresses, or names in a row."""
    if {*names} <= {*UNITS} or found in ([*range(len(names))], [*range(1, len(names) + 1)]):
        return len(names) > 1 or names[0] in UNITS
    return any(type(value) is int and not 0 <= value < LEAST_MARKER for value in found)


def numbers(module: str, text: str, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The names of a module's numbers, and whether each is a fact by the rules above."""
    lines, body = text.splitlines(), tree.body
    source_file = SOURCE_FILE.search(ast.get_docstring(tree) or "")
    for before, node, after in zip([None, *body], body, [*body[1:], None], strict=False):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
        found = values(node.value)
        if not found:
            continue
        explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        end = after.end_lineno if after and explained else node.end_lineno
        beside = "\n".join(lines[(before and before.end_lineno) or 0 : end])
        fact = module not in CONSTANTS and bool(
            module.startswith(DRAWS)
            or source_file
            or SOURCE.search(beside)
            or is_mark(names, found)
        )
        yield from ((f"{module}.{name}", fact) for name in names if name.isupper())
