"""Joint graphs cut in two: at given nodes, and as plain torch.compile cuts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor import compile_fx

from benchmarks.nets.language import GPT
from fxremat.compat.configuration import PARTITIONER, functorch_config, inductor_config
from fxremat.compat.joint_graph import saved_names, torch_partition
from tests.compat_graphs import Cut
from tests.small import Convolutions, seeded

Inputs = tuple[torch.Tensor, ...]
Halves = tuple[fx.GraphModule, fx.GraphModule]
Make = Callable[[], tuple[nn.Module, Inputs]]
Partition = Callable[..., Any]


class Stop(Exception):
    """Ends a compilation once the graph is cut."""


def gpt() -> tuple[nn.Module, Inputs]:
    """A small GPT, and its tokens and targets."""
    model = GPT(layers=1, width=16, heads=2, length=8, vocabulary=50)
    return model, model.sample(2, torch.Generator().manual_seed(0))


def cnn() -> tuple[nn.Module, Inputs]:
    """Convolutions with BatchNorm, and images."""
    model, images = seeded(Convolutions, 2, 3, 8, 8)
    return model, (images,)


def cut_by_inductor(make: Make, partition: Partition | None = None, **patches: Any) -> Halves:
    """The halves that Inductor gets from ``partition``, or from its own; compiles no further."""
    found: list[Halves] = []

    def noting(own: Partition) -> Partition:
        def cut(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            found.append(own(module, inputs, **kwargs))
            raise Stop

        return cut

    inductor: Any = compile_fx
    own = inductor.min_cut_rematerialization_partition
    patches |= {"force_disable_caches": True}
    if partition is not None:
        patches[PARTITIONER] = Cut(noting(partition))
    torch._dynamo.reset()
    model, inputs = make()
    with (
        mock.patch.object(compile_fx, "min_cut_rematerialization_partition", noting(own)),
        inductor_config.patch(patches),
        pytest.raises(Exception, match="Stop"),
    ):
        torch.compile(model)(*inputs)
    (halves,) = found
    return halves


def saved_bytes(backward: fx.GraphModule) -> int:
    values = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
    return sum(value.untyped_storage().nbytes() for value in values)


@pytest.mark.parametrize("make", [gpt, cnn])
def test_torch_partition_cuts_as_torch_compile_does(make: Make) -> None:
    """The very same halves, also where the user asks for less to be saved."""
    sizes = []
    for budget in (1.0, 0.5):
        with functorch_config.patch(activation_memory_budget=budget):
            plain, ours = cut_by_inductor(make), cut_by_inductor(make, torch_partition)
        assert [str(half.graph) for half in ours] == [str(half.graph) for half in plain]
        assert saved_names(ours[1]) == saved_names(plain[1])
        assert saved_bytes(ours[1]) == saved_bytes(plain[1])
        sizes.append(saved_bytes(ours[1]))
    assert sizes[1] < sizes[0]
