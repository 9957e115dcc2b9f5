"""The version, in one place, and a digest of the sources that what is cached depends on."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

WITHOUT_EFFECT = {
    "__main__.py", "cli", "errors.py", "integrations", "logged_metrics.py", "report/page", "whatif",
}  # fmt: skip
"""Files and folders of ours that change neither a plan nor anything else that is kept on disk."""


@cache
def build() -> str:
    """The version and a digest of our sources: a cache is emptied by a change that may matter.

    Comments and docstrings do not matter, nor does what is `WITHOUT_EFFECT`.
    """
    root = Path(__file__).parent
    place = hashlib.sha256(str(root).encode()).hexdigest()[:16]
    known = f"sources-{place}-{sys.implementation.cache_tag}.json"
    return f"{__version__}+{digest(root, cache_folder() / known)[:16]}"


def digest(root: Path, known: Path) -> str:
    """A digest of the syntax of all sources below ``root`` that have an effect.

    Parsing all of them takes a second. So the digest of each file's syntax is kept in ``known``
    beside that of its bytes, and only files that changed are parsed again.
    """
    before: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        before = dict(json.loads(known.read_text(encoding="utf-8")))
    now, total = {}, hashlib.sha256()
    for path in _sources(root):
        content = path.read_bytes()
        name = hashlib.sha256(content).hexdigest()
        now[name] = before.get(name) or _syntax_digest(content)
        total.update(f"{path.relative_to(root).as_posix()} {now[name]}\n".encode())
    if now != before:
        with suppress(OSError):  # a part of it, which others may see, is no JSON
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps(now), encoding="utf-8")
    return total.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    """The files in the order of their paths; `passes` may be a link to a folder elsewhere."""
    for place, folders, files in os.walk(root, followlinks=True):
        folder = Path(place)
        paths = {(folder / name).relative_to(root).as_posix(): name for name in folders + files}
        kept = {name for path, name in paths.items() if path not in WITHOUT_EFFECT}
        folders[:] = sorted(kept.intersection(folders))
        yield from (
            folder / name for name in sorted(kept.intersection(files)) if name[-3:] == ".py"
        )


class _WithoutTexts(ast.NodeTransformer):
    """Removes strings that stand alone: docstrings, and those that describe a constant."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def _syntax_digest(content: bytes) -> str:
    tree = _WithoutTexts().visit(ast.parse(content))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def cache_folder() -> Path:
    """Where digests of the sources are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "fxremat"
