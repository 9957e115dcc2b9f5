"""The digest of our sources: what empties the caches, and what does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fxremat import version
from fxremat.version import digest

SOURCE = '''\
"""A module."""

MOST = 3
"""Tries."""


def tries() -> int:
    """How many."""
    return MOST  # at most
'''
FILES = {"planner/solve.py": SOURCE, "cli/show.py": SOURCE, "report/page/writing.py": SOURCE}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "fxremat" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "fxremat"


@pytest.mark.parametrize(
    ("old", "new"), [("MOST = 3", "MOST = 4"), ("return MOST", "return -MOST"), ("tries", "looks")]
)
def test_code_changes_it(root: Path, old: str, new: str) -> None:
    before, path = digest(root), root / "planner/solve.py"
    path.write_text(SOURCE.replace(old, new))
    assert digest(root) != before
    path.write_text(SOURCE)
    assert digest(root) == before


def test_files_that_come_and_go_change_it(root: Path) -> None:
    before = digest(root)
    new = root / "planner/another.py"
    (root / "planner/solve.py").rename(new)
    assert digest(root) != before
    new.unlink()
    assert digest(root) != before


def test_what_is_no_source_keeps_it(root: Path) -> None:
    before = digest(root)
    (root / "planner/notes.txt").write_text("not a source")
    assert digest(root) == before


def test_a_folder_that_is_a_link_counts(root: Path) -> None:
    before = digest(root)
    passes = root.parent / "passes"
    passes.mkdir()
    (root / "passes").symlink_to("../passes")
    (passes / "remat.py").write_text("x = 1\n")
    linked = digest(root)
    assert linked != before
    (root / "passes").unlink()
    passes.rename(root / "passes")
    assert digest(root) == linked


def test_it_is_soon_there() -> None:
    """A tenth of a second, of the processor's time."""
    start = time.process_time()
    digest(Path(version.__file__).parent)
    assert time.process_time() - start < 0.1


def test_the_build_names_the_version() -> None:
    assert version.build().startswith(f"{version.__version__}+")
