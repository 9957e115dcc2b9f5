"""The size of the source tree, and a check that it does not grow unnoticed.

    python -m benchmarks.house                 print the figures
    python -m benchmarks.house --json OUT      write them to a file, too
    python -m benchmarks.house --check         fail where one is larger than the committed one
    python -m benchmarks.house --write         commit to the figures as they are now

The product is `fxremat` and `passes`; `fxremat/passes` is a link to the latter and is not counted
again. Lines are physical lines of `.py` files. A function is counted from its `def` to its last
line. A folder's files are the `.py` files directly in it. A record is a dataclass or a named tuple,
with the fields that it inherits; `Options` is exempt, because each of its fields is an option that
users set. Imports count wherever they stand, also in functions and for type checkers only. File
names are those of modules and packages, without `__init__`.

What counts as a tuning number and what as a fact is said in `benchmarks/house_numbers.py`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import parser_for, write_json
from .house_numbers import numbers

ROOT = Path(__file__).parent.parent
COMMITTED = "benchmarks/results/house.json"
FUNCTION_LINES, FILE_LINES, FOLDER_FILES, FIELDS, SAME_NAMES = 60, 500, 15, 12, 3
EXEMPT_RECORDS = {"Options"}

Figure = int | list[str]
Graph = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Module:
    """A file of the product: its dotted name, its path below the root, its text and syntax."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def product(root: Path) -> list[Module]:
    """All modules of the product, in the order of their names."""
    found = []
    for folder, name in ((root / "fxremat", "fxremat"), (root / "passes", "fxremat.passes")):
        for path in folder.rglob("*.py"):
            if not path.is_relative_to(root / "fxremat" / "passes"):
                parts = (name, *path.relative_to(folder).with_suffix("").parts)
                text = path.read_text(encoding="utf-8")
                dotted = ".".join(parts).removesuffix(".__init__")
                found.append(Module(dotted, path.relative_to(root), text, ast.parse(text)))
    return sorted(found, key=lambda module: module.name)


def nodes(modules: Sequence[Module]) -> Iterator[tuple[Module, ast.AST]]:
    """All nodes of the syntax of all modules."""
    for module in modules:
        yield from ((module, node) for node in ast.walk(module.tree))


def long_functions(modules: Sequence[Module]) -> list[str]:
    """Functions of more than `FUNCTION_LINES`."""
    return [
        f"{module.name}.{node.name}"
        for module, node in nodes(modules)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    ]


def large_records(modules: Sequence[Module]) -> list[str]:
    """Records of more than `FIELDS` fields, inherited ones included."""
    mark = re.compile(r"(dataclasses\.)?dataclass\b|(typing\.)?NamedTuple\b")
    records = {
        f"{module.name}.{node.name}": node
        for module, node in nodes(modules)
        if isinstance(node, ast.ClassDef)
        and any(mark.match(ast.unparse(one)) for one in (*node.decorator_list, *node.bases))
    }
    by_name = {node.name: node for node in records.values()}

    def fields(node: ast.ClassDef) -> set[str]:
        own = {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        bases = (by_name.get(ast.unparse(base).rpartition(".")[2]) for base in node.bases)
        return own.union(*(fields(base) for base in bases if base and base is not node))

    return [
        name
        for name, node in records.items()
        if node.name not in EXEMPT_RECORDS and len(fields(node)) > FIELDS
    ]


def imports(modules: Sequence[Module]) -> dict[str, list[str]]:
    """The modules of the product that each of them imports."""
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module, node in nodes(modules):
        if isinstance(node, ast.Import):
            found[module.name] |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.name.split(".")
            up = node.level - (module.path.name == "__init__.py")
            start = parts[: len(parts) - up] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            found[module.name] |= {name if name in found else base for name in inner}
    return {name: sorted((others & {*found}) - {name}) for name, others in found.items()}


def import_cycles(graph: Graph) -> list[str]:
    """Sets of modules that import each other, directly or by way of others."""
    below = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            below[name] |= below[middle] if middle in below[name] else set()
    cycles = {
        " <-> ".join(sorted(other for other in below[name] if name in below[other]))
        for name in graph
        if name in below[name]
    }
    return sorted(cycles)


def longest_chain(graph: Graph) -> list[str]:
    """The longest path of imports; one that comes back to itself ends there."""
    chains: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in chains:
            chains[name] = []  # what a cycle finds when it comes back here
            chains[name] = [name, *max(map(chain, graph[name]), key=len, default=[])]
        return chains[name]

    return max(map(chain, graph), key=len, default=[])


def bytes_names(modules: Sequence[Module]) -> list[str]:
    """Distinct identifiers that end with ``_bytes``."""
    fields = ("id", "attr", "arg", "name")
    names = {str(getattr(node, field, "")) for _, node in nodes(modules) for field in fields}
    return sorted(name for name in names if name.endswith("_bytes"))


def more_than(most: int, names: Iterator[str]) -> list[str]:
    """Names that occur more often than that."""
    return sorted(name for name, count in Counter(names).items() if count > most)


def measure(root: Path = ROOT) -> dict[str, Figure]:
    """All figures: sizes, or the names of what is counted."""
    modules = product(root)
    lines = {str(module.path): len(module.text.splitlines()) for module in modules}
    found = [one for module in modules for one in numbers(module.name, module.text, module.tree)]
    tests = (root / "tests").rglob("*.py")
    glossary = (root / "docs" / "glossary.md").read_text(encoding="utf-8")
    base_names = (module.name.rpartition(".")[2] for module in modules)
    return {
        "product lines": sum(lines.values()),
        "product files": len(modules),
        "test lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        f"functions over {FUNCTION_LINES} lines": long_functions(modules),
        f"files over {FILE_LINES} lines": [path for path in lines if lines[path] > FILE_LINES],
        f"folders over {FOLDER_FILES} files": more_than(
            FOLDER_FILES, (str(module.path.parent) for module in modules)
        ),
        f"records over {FIELDS} fields": large_records(modules),
        f"file names used over {SAME_NAMES} times": more_than(SAME_NAMES, base_names),
        "import cycles": import_cycles(imports(modules)),
        "modules in the longest import chain": longest_chain(imports(modules)),
        "names ending in _bytes": bytes_names(modules),
        "tuning numbers": [name for name, fact in found if not fact],
        "facts": [name for name, fact in found if fact],
        "glossary entries": re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE),
    }


def size(figure: Figure) -> int:
    """A figure as a number."""
    return figure if isinstance(figure, int) else len(figure)


def growth(now: Mapping[str, Figure], before: Mapping[str, Figure]) -> Iterator[str]:
    """A line for each figure that is larger than it was, and one for each name that is new."""
    for name, figure in now.items():
        old = before.get(name, 0)
        if size(figure) > size(old):
            yield f"{name}: {size(figure):,}, where {size(old):,} are committed"
            if isinstance(figure, list):
                known = old if isinstance(old, list) else []
                yield from (f"    new: {one}" for one in figure if one not in known)


def show(figures: Mapping[str, Figure]) -> Iterator[str]:
    """A line for each figure, and below it the names that it counts."""
    for name, figure in figures.items():
        yield f"{size(figure):,} {name}"
        if isinstance(figure, list):
            yield from (f"    {one}" for one in figure)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print, write or compare; gives the exit status."""
    parser = parser_for("benchmarks.house", __doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help=f"compare with {COMMITTED}")
    parser.add_argument("--write", action="store_true", help=f"write {COMMITTED}")
    options = parser.parse_args(arguments)
    figures, committed = measure(root), root / COMMITTED
    if options.check:
        grown = [*growth(figures, json.loads(committed.read_text(encoding="utf-8")))]
        if grown:
            print("The source tree has grown:", *grown, sep="\n")
            print("Make it smaller. If it has to grow, say why in the message of the commit, and")
            print("commit what `python -m benchmarks.house --write` writes.")
        return 1 if grown else 0
    print(*show(figures), sep="\n")
    for path in [*filter(None, [options.json]), *([committed] if options.write else [])]:
        write_json(path, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
