"""Small graphs for the tests of fxremat.compat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.compilers import compile_with_inductor, trace_as_inductor
from fxremat.compat.configuration import PARTITIONER, CustomPartitionerFn, inductor_config
from fxremat.compat.inductor.generated_code import generate
from fxremat.compat.joint_graph import torch_partition
from tests.graphs import Capture, Net, batch, capture, mlp

ATEN = torch.ops.aten
X = torch.zeros(4, 4)


def dynamic(**bounds: int) -> Capture:
    """An MLP with a dynamic first size, seen as 6."""
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    return capture(mlp(), [x])


def half(model: nn.Module, step: Callable[[Any, Any], Any], *inputs_: torch.Tensor) -> Any:
    """What ``step`` gives of the halves of a small model, as Inductor gets them."""
    given = []

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        halves = torch_partition(module, inputs, **kwargs)
        given.append(step(*halves))
        return halves

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return trace_as_inductor(gm, inputs, {}, partition)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*(inputs_ or [batch(32, 64)]))
    (found,) = given
    return found


def forward_code(model: nn.Module, x: torch.Tensor, **patches: Any) -> str:
    """The code that Inductor, configured so, makes of the forward of ``model``."""

    def step(forward: fx.GraphModule, _: fx.GraphModule) -> str:
        with inductor_config.patch(patches):
            return generate(forward, is_backward=False).source

    code: str = half(model, step, x)
    return code


class Cut(CustomPartitionerFn):
    """Inductor's partitioner, by a function; what it cuts is kept in no cache."""

    def __init__(self, partition: Callable[..., Any]) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return self.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: Any) -> Cut:  # Inductor copies its configuration
        return self

    def uuid(self) -> Any:
        return None


def inductor_by(partition: Callable[..., Any], **patches: Any) -> Callable[..., Any]:
    """Inductor as a backend of torch.compile that cuts joint graphs by a function."""

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_with_inductor(gm, inputs, {PARTITIONER: Cut(partition), **patches})

    return backend


def shared() -> Net:
    """A cheap result that two library calls, through loops of their own, read."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        cheap = x.abs()
        return (((cheap + 1) @ net.w) @ net.w) * cheap  # type: ignore[no-any-return]

    return Net(forward, w=nn.Parameter(torch.ones(64, 64)))
