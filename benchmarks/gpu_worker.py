"""A training loop on the device of this machine: six steps, then timed ones, as it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fxremat.memory.allocator_settings import settings_of_environment

from .allocator_snapshot import compare
from .loops.graphs import checkpointed
from .loops.rows import made, model_named
from .loops.steps import STEPS, fused
from .models import MATMULS_AND_ATTENTION
from .training import infeasible_budget
from .worker import serve

KNOB = 0.5
"""Torch's own option, at the part that its documentation has as an example."""


def recorded_allocations(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What CUDA's allocator did while ``run`` ran, as `torch.cuda.memory._snapshot` gives it."""
    record: Any = torch.cuda.memory._record_memory_history
    record(context=None, stacks="python")
    try:
        run()
        torch.cuda.synchronize(device)
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot(device)
    finally:
        record(enabled=None)
    return snapshot


class TrainingLoop:
    """One model trained in one way, with fused AdamW."""

    def __init__(
        self, model: str, way: str, budget: int | None, device: str, op_times: str
    ) -> None:
        torch.manual_seed(0)
        self.device, self.way, self.budget = torch.device(device), way, budget
        module, inputs = made(model_named(model))
        self.model = module.to(self.device)
        self.inputs = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), inputs)
        self.optimizer = fused(self.model.parameters())
        self.stack = ExitStack()
        options = {"memory_budget": budget, "op_times": op_times}
        self.call: Any = self._compiled(options)

    def _compiled(self, options: dict[str, Any]) -> Any:
        from fxremat.backend import fxremat  # itself, not its name: works without installation

        if self.way.startswith("fxremat"):
            return torch.compile(self.model, backend=fxremat, options=options)
        if self.way == "knob":
            from fxremat.compat.configuration import functorch_config

            functorch_config.activation_memory_budget = KNOB
        if self.way in ("checkpoint", "save_matmuls"):
            contexts = partial(create_selective_checkpoint_contexts, MATMULS_AND_ATTENTION)
            saves = contexts if self.way == "save_matmuls" else None
            if not self.stack.enter_context(checkpointed(self.model, saves)):
                raise ValueError("the model has no repeated blocks to checkpoint")
        return torch.compile(self.model)

    def train(self) -> dict[str, Any]:
        """Six steps; of each, what it reserved and allocated at most. A refusal is an answer."""
        from fxremat import reports

        losses, seconds, reserved, allocated = [], [], list[int](), list[int]()
        try:
            for _ in range(STEPS):
                begin = time.perf_counter()
                losses.append(self._step())
                seconds.append(time.perf_counter() - begin)
                if self.device.type == "cuda":
                    reserved.append(torch.cuda.max_memory_reserved(self.device))
                    allocated.append(torch.cuda.max_memory_allocated(self.device))
                    torch.cuda.reset_peak_memory_stats(self.device)
        except Exception as error:
            refused = infeasible_budget(error)
            if refused is None:
                raise
            return {"status": "refused", "least": refused.minimum_bytes}
        most, found = max(reserved, default=None), reports()
        over = most is not None and self.budget is not None and most > self.budget
        return {
            "status": "over" if over else "ok",
            "promised": found[-1].predicted_reserved_bytes if found else None,
            "planned": 1 + found[-1].time_overhead if found else None,
            "reserved": most,
            "reserved_by_step": reserved,
            "allocated": max(allocated, default=None),
            "first_step_seconds": seconds[0],
            "losses": losses,
        }

    def time(self, rounds: int) -> dict[str, Any]:
        """Milliseconds of steps, and what the allocator's model says of two that are recorded."""
        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            self._step()
            found.append(1e3 * (time.perf_counter() - begin))
        return {"step_ms": found, **self._recorded()}

    def _recorded(self) -> dict[str, Any]:
        if self.device.type != "cuda":
            return {}
        torch.cuda.empty_cache()
        snapshot = recorded_allocations(self._step, self.device)
        place = self.device.index or 0
        return {"modelled": asdict(compare(snapshot, settings_of_environment(), place))}

    def _step(self) -> float:
        loss: Tensor = self.call(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # and so the device has done all of it


def _made(settings: dict[str, Any]) -> TrainingLoop:
    return TrainingLoop(**settings)


if __name__ == "__main__":
    serve(_made)
