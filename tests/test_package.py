"""The package: errors, sizes as text, the digest of its sources, and what is installed."""

from __future__ import annotations

import copy
import email
import importlib.metadata
import importlib.util
import pickle
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat import errors, version
from fxremat.report.page import SCRIPTS
from fxremat.sizes import format_bytes, parse_bytes, round_up_bytes
from tests.conftest import Golden

# --- errors -------------------------------------------------------------------------------

MIB = 2**20
IN_FLIGHT = ("graph 1", 4, 3 * MIB, 9 * MIB, 8 * MIB)
ERRORS: dict[str, Exception] = {
    "infeasible": errors.InfeasibleBudget(
        2 * 2**30,
        2_684_366_905,
        (
            ("gradient of embedding.weight (model.py:12)", 2**29),
            ("gelu in layers.3.mlp (model.py:41)", 1_000_000),
        ),
    ),
    "infeasible, reserved": errors.InfeasibleBudget(2**30, 3 * 2**29, fragmentation_bytes=2**27),
    "infeasible, results held": errors.InfeasibleBudget(2**30, 3 * 2**29, let_go_bytes=5 * 2**28),
    "infeasible, minimum unknown": errors.InfeasibleBudget(2**20, None),
    "value": errors.InvalidOption("verify", "maybe", "1 or 0", variable="FXREMAT_VERIFY"),
    "choice": errors.InvalidOption("solver", "gredy", "'auto' or 'greedy'", ("auto", "greedy")),
    "unknown": errors.UnknownOption("memory_budgt", 8, ("memory_budget", "reserve")),
    "unknown, nothing near": errors.UnknownOption("colour", 8, ("memory_budget", "reserve")),
    "refused": errors.SolverRefused("rotor", "it is no chain. Use the solver 'auto'."),
    "not traceable": errors.NotTraceable("step", "it breaks the graph"),
    "host memory": errors.HostMemoryExceeded(400, 800, 1000),
    "in flight": errors.PromiseBroken(*IN_FLIGHT),
    "in flight, planned again": errors.PromiseBroken(*IN_FLIGHT, planned_for=4),
    "in flight, others leave more": errors.PromiseBroken(*IN_FLIGHT, left_bytes=MIB),
    "in flight, planned together": errors.PromiseBroken(*IN_FLIGHT, together=True),
    "exceeded": errors.BudgetExceeded("graph 0", 9 * MIB, 8 * MIB, 2 * MIB, MIB // 2),
    "another graph": errors.GraphsDiffer(0, (1, 2), {0: "9 nodes", 1: "7 nodes", 2: "7 nodes"}),
    "another plan": errors.GraphsDiffer(0, (1,), {0: "a", 1: "b"}, "plan"),
    "rank": errors.RankMissing("plan", 300.0, 2),
    "rank that failed": errors.RankMissing("plan", 300.0, None, "ValueError: no"),
    "device": errors.UnknownDevice("H10", ("A100", "H100"), "H100"),
    "other device": errors.UnsupportedDevice("mps"),
    "triton": errors.NeedsTriton(),
    "vary": errors.CannotVary("batch", "the model fixes it"),
    "verification": errors.VerificationFailed(
        "peak of the plan", "step 3 needs 12 bytes, budget 10"
    ),
}


def test_error_texts(golden: Golden) -> None:
    golden("\n\n".join(f"[{name}]\n{error}" for name, error in ERRORS.items()))


@pytest.mark.parametrize("name", ERRORS)
def test_copies_say_the_same(name: str) -> None:
    error = ERRORS[name]
    assert isinstance(error, ValueError) or not isinstance(error, errors.InvalidOption)
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


# --- sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 2 kib ", 2048),
        ("3kB", 3000),
        ("1TiB", 2**40),
        ("0.1 TB", 10**11),
        ("1048576", 2**20),
        ("7 B", 7),
        ("0.0001KiB", 0),
    ],
)
def test_parse(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


REFUSED = ["", "GiB", "8G", "8 Gib its", "-1GiB", "1e9", "nan", "inf", "1,5GiB", "1..5GB", "\u0663"]


@pytest.mark.parametrize("text", REFUSED)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (7_849_123_000, "7.31 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**50))
def test_rounded_up_is_enough_and_little_more(nbytes: int) -> None:
    again = parse_bytes(round_up_bytes(nbytes))
    assert nbytes <= again <= nbytes * 1.01 + 1


def test_round_up_is_short_where_it_can_be() -> None:
    assert round_up_bytes(2**30) == "1GiB"
    assert round_up_bytes(2**30 + 1) == "1.01GiB"


# --- version ------------------------------------------------------------------------------

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
    ("old", "new", "keeps"),
    [
        ('"""A module."""', '"""Something else."""', True),
        ('"""Tries."""\n', "", True),
        ("How many.", "The number.", True),
        ("# at most", "# and no more", True),
        ("return MOST  ", "\n    return MOST ", True),
        ("MOST = 3", "MOST = 4", False),
        ("return MOST", "return -MOST", False),
        ("tries", "looks", False),
    ],
)
def test_code_changes_it_and_words_and_lines_do_not(
    root: Path, old: str, new: str, keeps: bool
) -> None:
    before, path = digest(root), root / "planner/solve.py"
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    assert (digest(root) == before) == keeps
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


# --- packaging ----------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def settings() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk(folder: Path, name: str) -> set[str]:
    """Names of all packages below ``folder``, itself included."""
    names = {name}
    for child in folder.iterdir():
        if (child / "__init__.py").exists():
            names |= packages_on_disk(child, f"{name}.{child.name}")
    return names


def test_every_package_is_listed() -> None:
    listed = set(settings()["tool"]["setuptools"]["packages"])
    assert packages_on_disk(ROOT / "fxremat", "fxremat") == listed
    assert (ROOT / "fxremat" / "passes").resolve() == ROOT / "passes"  # by a link


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in settings()["project"]
    assert settings()["project"]["dynamic"] == ["version"]
    files = [path for path in ROOT.joinpath("fxremat").rglob("*.py") if "passes" not in path.parts]
    assert sum(f'"{fxremat.__version__}"' in path.read_text() for path in files) == 1


def test_ci_runs_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert targets == ["test-all", "check", "installed"]
    assert all(re.search(rf"^{target}: ", makefile, re.MULTILINE) for target in targets)


def test_the_entry_point_resolves_and_dynamo_lists_it() -> None:
    try:
        declared = importlib.metadata.distribution("fxremat").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fxremat is not installed")
    (entry,) = declared.select(group="torch_dynamo_backends")
    assert entry.name == "fxremat"
    assert callable(entry.load())
    assert "fxremat" in torch._dynamo.list_backends()


def test_the_script_is_the_module() -> None:
    """The console script calls what ``python -m fxremat`` calls."""
    module, _, name = settings()["project"]["scripts"]["fxremat"].partition(":")
    main = importlib.import_module("fxremat.__main__").main
    assert getattr(importlib.import_module(module), name) is main


def can_build() -> bool:
    """Whether a wheel can be built here without fetching anything."""
    if importlib.util.find_spec("setuptools") is None:
        return False
    return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77


@pytest.mark.skipif(not can_build(), reason="needs setuptools 77 or newer")
def test_the_wheel_holds_each_file_once(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("fxremat", "passes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {"fxremat/passes/__init__.py", "fxremat/core/check.py", "fxremat/py.typed"} <= {*names}
    page = {"page.html", "page.css", *SCRIPTS}
    assert {f"fxremat/report/page/{name}" for name in page} <= {*names}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fxremat"}
    assert any(name.endswith("LICENSE") for name in names)
    (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(about))
    assert metadata["Version"] == fxremat.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# fxremat" in metadata.get_payload()
