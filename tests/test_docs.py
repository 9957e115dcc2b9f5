"""README and docs: what they name exists, what exists is named, and their code runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import guide, readme_table, tokens_picture
from benchmarks.seconds import Seconds
from fxremat.passes.variants.table import RULES
from fxremat.planner import SOLVERS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
CHANGES = ROOT / "CHANGELOG.md"  # it also names what is gone
PAGES = [README, ROOT / "CONTRIBUTING.md", CHANGES, *DOCS]
GUIDE = [README, *sorted((ROOT / "docs/guide").rglob("*.md"))]
FIGURES = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "benchmarks/results/tokens_h200"
RUN, AS_IN, RECIPE = "run", "as in ", "recipe"
BLOCK = re.compile(r"^(?:<!-- (\S[^\n]*) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^(?:<!-- (\S[^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    assert len(text_of(README).splitlines()) <= 150


def test_the_readme_has_everything_in_its_order() -> None:
    """What it is, a figure, a picture, how to install and use it, and where it does not hold."""
    text = text_of(README)
    needed = [
        "number of bytes", "On an H200", "![", "pip install", "make demo", "make test",
        "torch.compile(", "train_within(", "InfeasibleBudget:", "device.absent(",
        "activation_memory_budget", "## I use", "## Limits",
    ]  # fmt: skip
    places = [text.find(each) for each in needed]
    assert -1 not in places
    assert places == sorted(places)
    assert text[: text.index("## Plain PyTorch")].count("\n") <= 35  # the first screen


def test_six_limits_each_with_a_link() -> None:
    limits = text_of(README).split("## Limits\n")[1].split("\n## ")[0].split("\n* ")[1:]
    assert len(limits) == 6
    assert all(LINK.search(limit) for limit in limits)


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


def to_run(page: Path) -> list[str]:
    """The blocks of a page that are marked to be run."""
    return [code for mark, code in BLOCK.findall(text_of(page)) if mark == RUN]


def given() -> dict[str, object]:
    """What blocks may use without making it: a small model that returns its loss, and a batch."""
    model, batch = Regression(), {"inputs": torch.randn(16, 8), "targets": torch.randn(16, 8)}
    optimizer = torch.optim.AdamW(model.parameters())
    return {"torch": torch, "fxremat": fxremat, "model": model, "optimizer": optimizer, **batch}


class Regression(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs), targets)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=name_of)
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a page that are marked run one after the other, in one namespace."""
    module = ModuleType(page.stem)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look for theirs there
    monkeypatch.chdir(tmp_path)
    for code in to_run(page):
        module.__dict__.update(given() if page in GUIDE else {})
        exec(compile(code, name_of(page), "exec"), module.__dict__)


def test_these_pages_have_code_to_run() -> None:
    assert {page.name for page in PAGES if to_run(page)} >= {
        "README.md", "install.md", "pytorch.md", "adding_a_pass.md", "adding_a_variant.md",
    }  # fmt: skip


@pytest.mark.parametrize("page", GUIDE, ids=name_of)
def test_every_block_of_the_guide_runs_or_says_where_it_does(page: Path) -> None:
    """Or that it is a recipe; then the text around it says that nobody has run it."""
    for mark, language, code in SHOWN.findall(text_of(page)):
        if mark == RECIPE:
            assert re.search(r"not run\b", text_of(page))
            continue
        assert language == "python", code
        assert mark == RUN or mark.startswith(AS_IN), code
        if mark != RUN:
            files = [ROOT / name for name in mark.removeprefix(AS_IN).split(", ")]
            there = set(re.findall(r"\w+", "".join(map(text_of, files))))
            assert names_called(code) <= there


def names_called(code: str) -> set[str]:
    """The functions, methods and keywords of all calls in a block."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    functions = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
    keywords = (key.arg for call in calls for key in call.keywords if key.arg)
    return {*functions, *keywords} - {"print", "super"}


@pytest.mark.parametrize("name", guide.PAGES)
def test_pages_made_from_code_are_up_to_date(name: str) -> None:
    assert text_of(guide.FOLDER / name) == guide.PAGES[name](), "python -m benchmarks.guide"


def test_the_guide_has_every_option_and_every_error() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", text_of(guide.FOLDER / "options.md"), re.MULTILINE)
    assert {*rows} == {row.name for row in fxremat.list_options()}
    kinds = {name for name in fxremat.__all__ if isinstance(getattr(fxremat, name), type)}
    titles = re.findall(r"^## (\w+)$", text_of(guide.FOLDER / "errors.md"), re.MULTILINE)
    assert {*titles} == kinds - {"FxrematError"}
    assert len(titles) == len({*titles})


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
    assert all(map(importlib.util.find_spec, rows))


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


def test_the_table_of_small_steps_is_that_of_its_file() -> None:
    text = text_of(FIGURES).split(readme_table.BEGIN + "\n")[1].split(readme_table.END)[0]
    (source,) = LINK.findall(text)
    assert text == readme_table.table(json.loads((FIGURES.parent / source).read_text()), source)


def test_the_picture_of_the_readme_is_that_of_its_figures() -> None:
    figures, picture = (PICTURE.with_suffix(ending) for ending in (".json", ".svg"))
    assert text_of(picture) == tokens_picture.draw(json.loads(text_of(figures)))
    links = LINK.findall(text_of(README))
    assert {str(path.relative_to(ROOT)) for path in (figures, picture)} <= {*links}
    head = json.loads(text_of(figures))["head"]
    for needed in (head["gpu"], "torch 2.11", "27 November 2026"):
        assert needed in text_of(README)


def test_the_first_figure_of_the_readme_is_in_the_picture() -> None:
    """fxremat's smallest peak of the first model, plain, and checkpoints of every block."""
    model, *_ = json.loads(text_of(PICTURE.with_suffix(".json")))["models"]
    points = tokens_picture.points_of(model)
    plain = next(point for point in points if point.kind == "compile")
    each = next(point for point in points if point.name == tokens_picture.LABELS["ckpt"])
    least = min((point for point in points if point.kind == "fxremat"), key=lambda p: p.peak)
    first = " ".join(text_of(README).split("![")[0].split())
    for said in (
        f"in {least.peak:.1f} GiB instead of {plain.peak:.1f}, at {least.time / plain.time:.0%} of",
        f"took {each.peak:.1f} GiB, at {each.time / plain.time:.0%}",
    ):
        assert said.replace("%", " %") in first


def test_runs_over_their_budget_are_not_in_the_picture() -> None:
    over, within, free = (
        {"way": "fx:plain=0.5", "budget_mib": budget, "reserved_mib": reserved, "ms": [2.0, 1.0]}
        for budget, reserved in ((1024, 1025), (1024, 1024), (None, 1025))
    )
    assert [tokens_picture.is_within(each) for each in (over, within, free)] == [False, True, True]
    (point,) = tokens_picture.points_of({"tokens": 10, "rows": [over, within]})
    assert (point.name, point.peak, point.time) == ("fxremat within 1.0 GiB", 1.0, 10.0)


def test_what_the_readme_says_of_architectures() -> None:
    """Its figures are those of the rows."""
    rows = json.loads(text_of(ROOT / "benchmarks/results/architectures.json"))["rows"]
    of_name = {row["name"]: row for row in rows}
    count = Counter(row["status"] for row in rows)
    limits = " ".join(text_of(README).split("## Limits\n")[1].split())

    resnet = of_name["resnet"]
    assert count["over"] == 0
    refused = [row["name"] for row in rows if row["status"] == "refused"]
    assert refused == ["lstm", "mamba"]
    needed = {
        name: of_name[name]["least"] / max(of_name[name]["plain"]["peaks"]) for name in refused
    }
    mamba = of_name["mamba"]
    taken = max(mamba["checkpointed"]["peaks"]) / max(mamba["plain"]["peaks"])
    assert count["failed"] == 0
    for said in (
        f"**{len(rows)} architectures**", f"{count['ok']} keep both",
        f"an LSTM needs {100 * needed['lstm']:.0f} %, and a Mamba {100 * needed['mamba']:.0f} %",
        f"where checkpointed layers take {100 * taken:.0f} %",
        f"by up to {100 * of_name['bert_autocast']['gradient_error']:.1f} %",
        f"a ResNet's by {100 * resnet['gradient_error']:.1f} %",
    ):  # fmt: skip
        assert said in limits
    named = ("resnet", "bert_autocast")
    others = (row.get("gradient_error") or 0.0 for row in rows if row["name"] not in named)
    assert "the others' by less than 0.01 %" in limits
    assert max(others) < 1e-4


def test_what_the_readme_says_of_first_steps() -> None:
    """Its figures are those that are kept."""
    rows = json.loads(text_of(ROOT / "benchmarks/results/seconds_cpu.json"))["rows"]
    found = [Seconds(**row) for row in rows]
    limits = " ".join(text_of(README).split("## Limits\n")[1].split())
    for kind, where in (("cold", "with empty caches"), ("warm", "with full ones")):
        ratios = [ratio for row in found if (ratio := row.ratio(kind))]
        times = f"{min(ratios):.1f} to {max(ratios):.1f} times"
        assert times in limits.split(where)[0]
    assert len(found) == 8
