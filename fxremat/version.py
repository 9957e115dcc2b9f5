"""The version, in one place, and a digest of the sources that what is cached depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def build() -> str:
    """The version and a digest of our sources: what is cached does not outlive a change of them."""
    return f"{__version__}+{digest(Path(__file__).parent)[:16]}"


def digest(root: Path) -> str:
    """A digest of all sources below ``root``, by their names and contents."""
    total = hashlib.sha256()
    for path in _sources(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    """The files in the order of their paths; `passes` may be a link to a folder elsewhere."""
    for place, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".py"))
