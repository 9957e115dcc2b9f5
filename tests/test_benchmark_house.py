"""Sizes of a source tree that is made up, and tests that take too long."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import house, house_numbers

# --- house --------------------------------------------------------------------------------


FUNCTION = "def long():\n" + "    pass\n" * house.FUNCTION_LINES
FIELDS = "".join(f"    f{i}: int\n" for i in range(house.FIELDS))
RECORDS = f"""\
from dataclasses import dataclass

@dataclass(frozen=True)
class Base:
{FIELDS}
@dataclass
class Wide(Base):
    one_more_bytes: int = 0

@dataclass
class Options(Base):
    exempt: int = 0
"""
FILES = {
    "fxremat/__init__.py": "",
    "fxremat/sizes.py": "KIB, MIB = 2**10, 2**20\n",
    "fxremat/core/__init__.py": "from fxremat.core.plan import x\n",
    "fxremat/core/constants.py": 'ROUNDS = 3\n"""A figure of torch that tunes something."""\n',
    "fxremat/core/plan.py": "def f(some_bytes):\n    from . import problem\n",
    "fxremat/core/problem.py": "from ..core import plan\nfrom fxremat.sizes import MIB\n",
    "fxremat/long.py": FUNCTION + "x = 1\n" * house.FILE_LINES,
    "fxremat/records.py": RECORDS,
    "passes/__init__.py": "",
    "passes/plan.py": "from fxremat.core import constants\nfrom .base import y\n",
    "passes/base.py": "import fxremat.sizes\n",
    "passes/inner/plan.py": "",
    "passes/inner/deep/plan.py": "",
    "tests/test_it.py": "a\nb\n",
    "docs/glossary.md": "| word | meaning |\n|---|---|\n| **op** | what runs |\n",
    "benchmarks/results/other.json": "{}",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with `FILES`, in which passes are linked as in this repository."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "fxremat" / "passes").symlink_to("../passes")
    return tmp_path


def test_sizes_of_a_tree(tree: Path) -> None:
    found = house.measure(tree)
    product = {name: text for name, text in FILES.items() if name.startswith(("fxremat", "passes"))}
    assert found["product files"] == len(product)
    assert found["product lines"] == sum(len(text.splitlines()) for text in product.values())
    assert found["test lines"] == 2
    assert found["functions over 60 lines"] == ["fxremat.long.long"]
    assert found["files over 500 lines"] == ["fxremat/long.py"]
    assert found["records over 12 fields"] == ["fxremat.records.Wide"]
    assert found["file names used over 3 times"] == ["plan"]
    assert found["names ending in _bytes"] == ["one_more_bytes", "some_bytes"]
    assert found["tuning numbers"] == ["fxremat.core.constants.ROUNDS"]
    assert found["facts"] == ["fxremat.sizes.KIB", "fxremat.sizes.MIB"]
    assert found["glossary entries"] == ["op"]
    for i in range(house.FOLDER_FILES):
        (tree / "passes" / "inner" / f"part_{i}.py").write_text("")
    assert house.measure(tree)["folders over 15 files"] == ["passes/inner"]


def test_imports_of_a_tree(tree: Path) -> None:
    """One in a function closes a circle; a name of a package is its module where it is one."""
    found = house.measure(tree)
    assert found["import cycles"] == ["fxremat.core.plan <-> fxremat.core.problem"]
    assert found["modules in the longest import chain"] == [
        "fxremat.core", "fxremat.core.plan", "fxremat.core.problem", "fxremat.sizes",
    ]  # fmt: skip
    graph = house.imports(house.product(tree))
    assert graph["fxremat.passes.plan"] == ["fxremat.core.constants", "fxremat.passes.base"]
    assert graph["fxremat.passes.base"] == ["fxremat.sizes"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("TRIES = 3", False),
        ("TRIES = 3  # times that a plan is made", False),
        ("SLACK, TRIES = 0.5, 3", False),
        ("BYTES = 4 * MIB", False),
        ("LIMITS = ((1.0, 2.0), (0.5, 0.25))", False),
        ("MOST = 30  # as Inductor counts them", True),
        ('MOST = 30\n"""Threads of a CUDA block."""', True),
        ("# Bytes of an int64.\nINDEX = 8", True),
        ("NOTHING = -1", True),
        ("ADDRESS = 1 << 45", True),
        ("PAY, PAID = 0, 1", True),
        ("FEW = 1", False),
    ],
)
def test_tuning_numbers_and_facts(text: str, fact: bool) -> None:
    found = house_numbers.numbers("fxremat.cost.here", text, ast.parse(text))
    assert {is_fact for _, is_fact in found} == {fact}


def test_growth_fails_the_check(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--write"], tree) == 0
    assert json.loads((tree / house.COMMITTED).read_text()) == house.measure(tree)
    assert house.main(["--check"], tree) == 0
    (tree / "fxremat" / "step.py").write_text("MOST_TRIES = 3\n")
    capsys.readouterr()
    assert house.main(["--check"], tree) == 1
    said = capsys.readouterr().out
    assert "product files: 14, where 13 are committed" in said
    assert "new: fxremat.step.MOST_TRIES" in said
    assert "--write" in said
    (tree / "fxremat" / "step.py").unlink()
    (tree / "fxremat" / "long.py").write_text("")
    assert house.main(["--check"], tree) == 0, "it may become smaller"


# --- slowness -----------------------------------------------------------------------------


pytest_plugins = ["pytester"]

TESTS = """
import time
import pytest

def compute():
    begun = time.process_time()
    while time.process_time() < begun + 0.3:
        pass

@pytest.fixture
def prepared():
    compute()

def test_computes():
    compute()

def test_is_prepared(prepared):
    pass

@pytest.mark.slow
def test_is_marked():
    compute()

def test_waits():
    time.sleep(0.4)

def test_does_little():
    pass
"""
CONFIGURATION = """
from tests.slowness import SlowTests

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    config.pluginmanager.register(SlowTests(0.2))
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_what_computes_long_unmarked_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    """In its call as in what a fixture prepares; who waits for the machine does not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(CONFIGURATION)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines_random(["*test_computes took 0.* s in its call, more than 0.2 s*"])
    result.stdout.fnmatch_lines_random(["*test_is_prepared took 0.* s in its setup*"])
