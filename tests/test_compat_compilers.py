"""Inductor and the two eager compilers call our partition."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_decompositions_find_what_they_look_up() -> None:
    """A pooling is the first graph of a process: nothing has loaded Inductor's lowerings yet."""
    script = (
        "import torch, fxremat\n"
        "pool = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2))\n"
        "print(fxremat.explain(pool, torch.randn(1, 1, 8, 8)).predicted_peak_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
