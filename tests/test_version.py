"""The digest of our sources: what empties the caches, and what does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fxremat import version

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


def digest(root: Path) -> str:
    return version.digest(root, root.parent / "cache" / "known.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Something else."""'),
        ('"""Tries."""\n', ""),
        ("How many.", "The number."),
        ("# at most", "# and no more"),
        ("return MOST  ", "\n    return MOST "),
    ],
)
def test_words_and_lines_keep_it(root: Path, old: str, new: str) -> None:
    before, path = digest(root), root / "planner/solve.py"
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    assert digest(root) == before


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


def test_what_only_shows_something_keeps_it(root: Path) -> None:
    before = digest(root)
    for name in ("cli/show.py", "report/page/writing.py"):
        (root / name).write_text("x = 1\n")
    (root / "whatif").mkdir()
    (root / "whatif/fit.py").write_text("x = 1\n")
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


def test_what_has_no_effect_exists() -> None:
    root = Path(version.__file__).parent
    assert {name for name in version.WITHOUT_EFFECT if not (root / name).exists()} == set()


def test_only_what_changed_is_parsed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "planner/other.py").write_text("y = 1\n")
    digest(root)
    parsed: list[bytes] = []
    real = version._syntax_digest

    def recorded(content: bytes) -> str:
        parsed.append(content)
        return real(content)

    monkeypatch.setattr(version, "_syntax_digest", recorded)
    digest(root)
    assert parsed == []
    (root / "planner/other.py").write_text("y = 2\n")
    digest(root)
    assert parsed == [b"y = 2\n"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "b"}'])
def test_a_file_that_is_not_what_was_kept(root: Path, text: str) -> None:
    before, known = digest(root), root.parent / "cache" / "known.json"
    known.write_text(text)
    assert digest(root) == before


def test_a_folder_that_cannot_be_written(root: Path) -> None:
    (root.parent / "file").write_text("here is no folder")
    assert version.digest(root, root.parent / "file" / "known.json") == digest(root)


def test_it_is_soon_there(tmp_path: Path) -> None:
    """A tenth of a second, of the processor's time, once the sources are known."""
    root, known = Path(version.__file__).parent, tmp_path / "known.json"
    first = version.digest(root, known)
    start = time.process_time()
    assert version.digest(root, known) == first
    assert time.process_time() - start < 0.1


def test_the_build_names_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    version.build.cache_clear()
    assert version.build().startswith(f"{version.__version__}+")
    assert [*(tmp_path / "fxremat").glob("sources-*.json")]
