"""What is installed: every package, the licence, the type marker, the entry point."""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fxremat
from fxremat.report.page import SCRIPTS

ROOT = Path(__file__).parent.parent
GROUP = "torch_dynamo_backends"


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


def test_passes_are_a_link() -> None:
    assert (ROOT / "fxremat" / "passes").resolve() == ROOT / "passes"


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in settings()["project"]
    assert settings()["project"]["dynamic"] == ["version"]
    files = [path for path in ROOT.joinpath("fxremat").rglob("*.py") if "passes" not in path.parts]
    assert sum(f'"{fxremat.__version__}"' in path.read_text() for path in files) == 1


def test_ci_runs_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert targets == ["test-all", "check", "package"]
    assert all(re.search(rf"^{target}: ", makefile, re.MULTILINE) for target in targets)


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert settings()["project"]["license"] == "Apache-2.0"


def installed_entry_points() -> importlib.metadata.EntryPoints:
    """Dynamo backends that fxremat declares; skips where it is not installed."""
    try:
        declared = importlib.metadata.distribution("fxremat").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fxremat is not installed")
    return declared.select(group=GROUP)


def test_the_entry_point_resolves() -> None:
    (entry,) = installed_entry_points()
    assert entry.name == "fxremat"
    assert callable(entry.load())


def test_the_script_is_the_module() -> None:
    """The console script calls what ``python -m fxremat`` calls."""
    module, _, name = settings()["project"]["scripts"]["fxremat"].partition(":")
    main = importlib.import_module("fxremat.__main__").main
    assert getattr(importlib.import_module(module), name) is main


def test_dynamo_lists_the_backend() -> None:
    installed_entry_points()
    import torch._dynamo

    assert "fxremat" in torch._dynamo.list_backends()


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
