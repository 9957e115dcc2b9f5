"""The command line on real configs: each Auto class that it knows, without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxremat.cli import main

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**SIZES, "vocab_size": 128, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "sizes", "architecture"),
    [
        ("llama", TEXT, "LlamaForCausalLM"),
        ("llama", TEXT, "LlamaForSequenceClassification"),
        ("bert", TEXT, "BertForMaskedLM"),
        ("bert", TEXT, "BertForSequenceClassification"),
        ("bert", TEXT, "BertForTokenClassification"),
        ("vit", {**SIZES, "image_size": 32, "patch_size": 16}, "ViTForImageClassification"),
    ],
)
def test_explain(
    kind: str, sizes: dict[str, int], architecture: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = {"model_type": kind, **sizes, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(data))
    asked = ["--device", "cpu", "--budget", "1GiB", "--batch", "2", "--dtype", "bf16"]
    assert main(["explain", str(tmp_path), *asked]) == 0, capsys.readouterr().err
    assert "of 1.00 GiB" in capsys.readouterr().out
