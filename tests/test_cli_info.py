"""``info``: what a report of a bug needs, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fxremat
from fxremat.cli import main


def test_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions, devices, what is supported, caches with their sizes, and what is set."""
    inductor = tmp_path / "inductor"
    (inductor / "fxremat").mkdir(parents=True)
    (inductor / "code.py").write_bytes(b"x" * 100)
    (inductor / "fxremat" / "plan.json").write_bytes(b"x" * 10)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    monkeypatch.setenv("FXREMAT_SLOVER", "greedy")
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["fxremat"] == fxremat.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][-1]["name"] == "cpu"
    assert found["devices"][-1]["bytes"] > 2**20
    assert found["support"]["ROCm"] == "not tried"
    assert [one["bytes"] for one in found["caches"]] == [110, 10, 0]
    assert found["settings"]["FXREMAT_SOLVER"] == "greedy"
    assert "there is no such option" in found["settings"]["FXREMAT_SLOVER"]
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"10 B in {inductor / 'fxremat'}" in printed
    assert re.search(r"FXREMAT_SLOVER +greedy \(there is no such option\)", printed)


def test_what_is_not_supported_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert main(["info", "--json"]) == 0
    support = json.loads(capsys.readouterr().out)["support"]
    assert support["ROCm"] == "not tried, and this is one"
    assert support["XPU"] == "not supported, and this is one"
    assert support["CPU"] == "yes"
