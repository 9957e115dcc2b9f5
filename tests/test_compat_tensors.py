"""Storages, and tensors without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.compilers import trace_as_inductor
from fxremat.compat.tensors import (
    fake_tensors,
    is_fake,
    on_device_without_memory,
    places_in_joint,
    storage_watch,
    without_memory,
)
from tests import nets
from tests.graphs import Capture, linear


def test_storage_watch() -> None:
    with without_memory():
        x = torch.empty(4, 4)
        key, is_gone = storage_watch(x)
        view = x.as_strided((2,), (1,), 3)
        assert storage_watch(view)[0] == key
        assert storage_watch(torch.empty(4))[0] != key
        del x
        assert not is_gone()
        del view
        assert is_gone()


def test_fake_tensors() -> None:
    """A model is made, initialised and converted, tied weights and all, and has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    with fake_tensors():
        first, second = nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 1 << 20)
        second.weight = first.weight
        model = nn.Sequential(first, second, nn.Embedding(8, 4), nn.BatchNorm1d(4))
        model.to(torch.bfloat16).double().half()
        nn.init.normal_(first.weight)
    assert isinstance(first.weight, FakeTensor)
    assert isinstance(first.weight, nn.Parameter)
    assert second.weight is first.weight
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not isinstance(torch.empty(1), FakeTensor)
    linear().half()  # outside, parameters are converted as ever


def test_fake_tensors_are_traced() -> None:
    with fake_tensors():
        fake = nets.make("mlp")
        seen = Capture(fused=True)

        def backend(gm: fx.GraphModule, inputs: Any) -> Any:
            return trace_as_inductor(gm, inputs, {}, seen)

        torch._dynamo.reset()
        model, inputs = fake
        torch.compile(model, backend=backend)(*inputs)
    assert seen.found.problem == nets.traced("mlp", fused=True).found.problem


def test_fake_tensors_that_are_seen_leave_compiled_parts_compiled() -> None:
    sizes: list[int] = []
    compiled: list[int] = []

    def seen(result: Any) -> None:
        sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return gm

    torch._dynamo.reset()
    with fake_tensors(seen):
        x = torch.empty(6)
        assert sizes == [6]
        torch.compile(lambda x: x.sin(), backend=backend)(x)
    assert compiled == [1]


def test_on_device_without_memory() -> None:
    """Everything is where it lies, has no memory, and is back at the end; what is tied stays so."""
    first, tied = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    tied.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(3), tied)
    before = dict(model.named_parameters())
    with fake_tensors(), on_device_without_memory(model, torch.ones(2, 3)) as x:
        assert is_fake(x)
        assert all(is_fake(p) for p in model.parameters())
        assert all(is_fake(b) for b in model.buffers())
        assert isinstance(first.weight, torch.nn.Parameter)
        assert first.weight is tied.weight
        assert x.device.type == "cpu"
    assert all(one is before[name] for name, one in model.named_parameters())


def test_a_tensor_of_a_subclass_becomes_its_parts_in_the_joint_graph() -> None:
    from torch.testing._internal import two_tensor

    two: Any = two_tensor.TwoTensor
    plain = torch.ones(2)
    both = two(plain, plain.clone())
    given = [plain, 3, both, two(both, both), plain]
    expected = [range(1), range(1, 2), range(2, 4), range(4, 8), range(8, 9)]
    assert places_in_joint(given) == expected
