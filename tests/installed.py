"""The first example of the README, run by a Python that has the package installed and nothing else.

    python tests/installed.py TORCH_VERSION

`make installed` runs it, in an empty environment. Exits with an error where fxremat comes from the
source tree, where installing it has brought another torch, or where the example does not train.
"""

import importlib.metadata
import re
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

START = time.perf_counter()
ROOT = Path(__file__).parent.parent


class Model(nn.Module):
    """Gives its loss, as the example wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


def main() -> None:
    """Run it, and look at what is there afterwards."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^<!-- run -->\n```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example is not None
    torch.manual_seed(0)
    model = Model()
    given = {"torch": torch, "model": model}
    given |= {"inputs": torch.randn(32, 64), "targets": torch.randint(10, (32,))}
    exec(compile(example[1], "README.md", "exec"), given)
    assert all(weight.grad is not None for weight in model.parameters())

    import fxremat

    assert Path(fxremat.__file__).parent != ROOT / "fxremat", fxremat.__file__
    assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
    (report,) = fxremat.reports()
    installed = importlib.metadata.version("fxremat")
    seconds = time.perf_counter() - START
    print(f"fxremat {installed} trained in {seconds:.0f} s: {str(report).splitlines()[0]}")


if __name__ == "__main__":
    main()
