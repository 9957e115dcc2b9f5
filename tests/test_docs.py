"""README and docs: what they name exists, what exists is named, and their code runs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fxremat
from benchmarks import readme_table
from fxremat import errors
from fxremat.options import options_table
from fxremat.passes.variants.table import RULES
from fxremat.planner import SOLVERS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
CHANGES = ROOT / "CHANGELOG.md"  # it also names what is gone
PAGES = [README, ROOT / "CONTRIBUTING.md", CHANGES, *DOCS]
BLOCK = re.compile(r"^(<!-- run -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:fxremat|passes|tests|benchmarks)/[\w/.-]*\w")
MODULE = re.compile(r"python\s-m\s((?:benchmarks|fxremat)[\w.]*)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def row_names(page: str) -> list[str]:
    """What stands in code in the first column of the page's tables."""
    first = re.findall(r"^\| ([^|]+) \|", text_of(ROOT / "docs" / page), re.MULTILINE)
    return [name for cell in first for name in CODE.findall(cell)]


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {anchor(heading) for heading in headings}


def paths_in(text: str) -> Iterator[str]:
    """The paths that stand in code, alone or in lists, and in graphs of text."""
    for part in [*CODE.findall(FENCED.sub("", text)), *FENCED.findall(text)]:
        yield from PATH.findall(part)


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= 180


def test_limits_and_commands_are_on_the_first_screen() -> None:
    screen = " ".join(text_of(README).splitlines()[:35])
    for needed in ("Limits first", "pip install", "make demo", "make test", "torch.compile("):
        assert needed in screen


def test_the_glossary_is_short() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", text_of(ROOT / "docs/glossary.md"), re.MULTILINE)
    assert 0 < len(words) <= 18
    assert len({*words}) == len(words)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", text_of(page))):
        if "://" in link:
            continue
        file, _, part = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not part or part in anchors(target), link


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = {README}, [README]
    while left:
        page = left.pop()
        for link in LINK.findall(text_of(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target not in reached:
                reached.add(target)
                left.append(target)
    assert set(PAGES) == reached


@every_page
def test_paths_exist(page: Path) -> None:
    for path in paths_in(text_of(page)):
        assert (ROOT / path).exists(), path


@every_page
def test_commands_exist(page: Path) -> None:
    for module in MODULE.findall(text_of(page)):
        assert importlib.util.find_spec(module), module


@every_page
def test_code_compiles(page: Path) -> None:
    for _, code in BLOCK.findall(text_of(page)):
        compile(code, name_of(page), "exec")


WITH_CODE_TO_RUN = ["adding_a_pass.md", "adding_a_variant.md"]


@pytest.mark.parametrize("page", WITH_CODE_TO_RUN)
def test_code_runs(page: str) -> None:
    """The blocks of a page that are marked run one after the other, in one namespace."""
    marked = [code for mark, code in BLOCK.findall(text_of(ROOT / "docs" / page)) if mark]
    assert marked
    module = ModuleType(Path(page).stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # dataclasses look for theirs there
        for code in marked:
            exec(compile(code, page, "exec"), module.__dict__)


def test_only_these_pages_have_code_to_run() -> None:
    marked = {page.name for page in PAGES if any(mark for mark, _ in BLOCK.findall(text_of(page)))}
    assert marked == set(WITH_CODE_TO_RUN)


def test_the_table_of_options_is_that_of_the_code() -> None:
    assert options_table() in text_of(README)


@every_page
def test_every_name_of_fxremat_is_public_or_a_module(page: Path) -> None:
    """In what stands in code, also in blocks of it; a list of changes names what is gone."""
    text = "" if page == CHANGES else text_of(page)
    for code in [*CODE.findall(FENCED.sub("", text)), *FENCED.findall(text)]:
        for name in re.findall(r"\bfxremat\.(\w+)", code):
            assert name in fxremat.__all__ or importlib.util.find_spec(f"fxremat.{name}"), name


def test_modules_that_moved_are_where_the_list_of_changes_says() -> None:
    rows = re.findall(r"^\| `fxremat\..*?\| `(fxremat[.\w]+)`", text_of(CHANGES), re.MULTILINE)
    assert rows
    assert {name for name in rows if not importlib.util.find_spec(name)} == set()


def test_every_public_name_is_said_to_be_stable_or_not() -> None:
    parts = text_of(ROOT / "docs/stability.md").split("\n## ")[1:]
    stable, experimental = (set(re.findall(r"`fxremat\.(\w+)`", part)) for part in parts)
    assert stable | experimental == set(fxremat.__all__)
    assert not stable & experimental


def test_every_public_function_is_described() -> None:
    everything = "".join(map(text_of, PAGES))
    functions = {name for name in fxremat.__all__ if inspect.isfunction(getattr(fxremat, name))}
    assert functions
    assert {name for name in functions if f"fxremat.{name}(" not in everything} == set()


def test_every_error_is_in_the_readme() -> None:
    there = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.FxrematError)
    } - {"FxrematError", "UnknownOption"}  # the base, and one that is an InvalidOption
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text_of(README), re.MULTILINE)) == there


def test_every_rule_has_its_row_of_the_right_kind() -> None:
    """Exact rules stand in the first table, lossy ones in the second."""
    text = text_of(ROOT / "docs/variants.md")
    exact, lossy = (
        re.findall(r"^\| `(\w+)` \|", text.split(f"## {title}")[1].split("\n## ")[0], re.MULTILINE)
        for title in ("Exact rules", "Lossy rules")
    )
    assert exact == [rule.name for rule in RULES if not rule.lossy]
    assert sorted(lossy) == sorted(rule.name for rule in RULES if rule.lossy)


def test_every_solver_has_its_row() -> None:
    assert {*SOLVERS} == {*row_names("how_it_works.md")} - {"solver"}


def test_pages_on_algorithms_begin_with_their_invariants() -> None:
    pages = [page for page in DOCS if page.parent.name == "design"]
    assert pages
    for page in pages:
        assert re.findall(r"^## (.+)$", text_of(page), re.MULTILINE)[0] == "Invariants", page


def figures_of_the_readme() -> str:
    return text_of(README).split(readme_table.BEGIN + "\n")[1].split(readme_table.END)[0]


def test_figures_of_the_readme_are_those_of_its_file() -> None:
    """Until they are taken the place says so."""
    figures = figures_of_the_readme()
    if figures == readme_table.NOT_TAKEN:
        return
    (source,) = LINK.findall(figures)
    assert figures == readme_table.table(json.loads((ROOT / source).read_text()), source)
