"""Inductor and the two eager compilers call our partition."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxremat.compat.compilers import trace_as_inductor
from tests import nets
from tests.compat_graphs import ATEN, inductor_by
from tests.graphs import Capture, batch, compiled, everything_again, linear, mlp


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    """Our partition is called from Inductor's own compiler, and the gradients are right."""
    seen = Capture(everything_again, fused=True)
    model, reference = mlp(), mlp()
    torch._dynamo.reset()
    torch.compile(model, backend=inductor_by(seen))(batch(4, 8)).sum().backward()
    reference(batch(4, 8)).sum().backward()
    assert seen.rewritten.recomputed
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_compile_with_aot_eager() -> None:
    model, inputs = nets.make("mlp")
    seen = Capture()
    compiled(model, seen)(*inputs).sum().backward()
    assert len(seen.calls(ATEN.gelu)) == 3  # not decomposed


def test_trace_as_inductor_decomposes() -> None:
    seen = nets.traced("mlp", fused=True)
    assert seen.calls(ATEN.gelu) == []
    assert len(seen.calls(ATEN.erf)) == 3


def test_trace_as_inductor_takes_random_numbers() -> None:
    seen = Capture()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return trace_as_inductor(gm, inputs, {}, seen)

    torch._dynamo.reset()
    model = nn.Sequential(linear(), nn.Dropout())
    torch.compile(model, backend=backend)(batch(4, 8)).sum().backward()


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
