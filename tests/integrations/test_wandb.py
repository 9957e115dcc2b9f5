"""What was planned arrives in W&B, offline."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import fxremat

pytest.importorskip("wandb")


def test_what_was_planned_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is synchronised later has each name with its value."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    losses = importlib.import_module("wandb_loop").train("fxremat", {"memory_budget": "100MiB"})
    planned = fxremat.metrics()
    assert planned["fxremat/budget(GiB)"] == pytest.approx(100 / 1024)
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for name, value in {"loss": losses[-1], **planned}.items():
        assert name.encode() in written
        assert json.dumps(value).encode() in written
