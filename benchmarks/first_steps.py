"""The first steps of one model in this process, as a line of JSON.

    python -m benchmarks.first_steps MODEL WAY [BUDGET]

WAY is ``plain`` (`torch.compile`), ``fxremat`` under BUDGET bytes, or ``refused``: fxremat under a
budget that no step fits, until the least is named. Models train with AdamW.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fxremat.memory.measured_peak import measure_peak

from .architectures.cases import Case, with_loss
from .architectures.models import ARCHITECTURES
from .models import build
from .training import IMPOSSIBLE_BYTES, infeasible_budget

OWN = {"gpt12": "gpt12", "llama8": "llama8", "bert6": "bert6", "resnet": "resnet"}
OF_OTHERS = {"vit": "vit", "t5": "t5", "lora": "lora", "unet": "unet", "gpt2": "gpt2"}
"""In small configurations, of transformers, peft and diffusers; GPT-2 is compiled as three graphs,
since its loss is told of in a log."""
MODELS = (*OWN, *OF_OTHERS)
FIRST, STEADY = 5, 5
"""Steps that count as the first ones, and further ones that tell what a step takes."""


def made(name: str) -> Case:
    """A model with fixed weights and batch. Raises `ImportError` where its library is missing."""
    torch.manual_seed(0)
    if name in OWN:
        network, batch = build(OWN[name])
        return with_loss(network, *batch)
    case = ARCHITECTURES[OF_OTHERS[name]]()
    for model in case.models:
        model.train()
    return case


def first_steps(case: Case, compiled: Callable[[Any], Any]) -> dict[str, Any]:
    """Seconds of each of the first steps and of the steady ones, and the peak of the last one."""
    functions = [compiled(model) for model in case.models]
    weights = [w for model in case.models for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights)

    def step() -> None:
        case.run(*functions)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(FIRST + STEADY):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    held = (*case.models, optimizer, *case.held)
    return {"steps": seconds, "peak_bytes": measure_peak(step, held=held).peak_bytes}


def refusal(case: Case, compiled: Callable[[Any], Any]) -> dict[str, Any]:
    """Seconds until the least is named, and the least."""
    begun = time.perf_counter()
    try:
        first_steps(case, compiled)
    except Exception as error:
        refused = infeasible_budget(error)
        if refused is None:
            raise
        return {"seconds": time.perf_counter() - begun, "least_bytes": refused.minimum_bytes}
    return {"error": f"it trains in {IMPOSSIBLE_BYTES} bytes"}


def main(words: list[str]) -> None:
    """Run one way of one model, and print what it took."""
    name, way, *more = words
    if way == "plain":
        found = first_steps(made(name), torch.compile)
    else:
        from fxremat.backend import fxremat  # itself, not its name: works without installation

        options: dict[str, Any] = {"memory_budget": int(more[0]) if more else IMPOSSIBLE_BYTES}

        def compiled(model: Any) -> Any:
            return torch.compile(model, backend=fxremat, options=options)

        found = (refusal if way == "refused" else first_steps)(made(name), compiled)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
