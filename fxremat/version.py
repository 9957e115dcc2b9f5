"""The version, in one place, and a digest of the sources: a plan depends on both."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def build() -> str:
    """Version and digest of all our sources, so that no cache outlives a change of them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    passes = Path(__file__).parent / "passes"
    for path in sorted(passes.resolve().rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:16]}"
