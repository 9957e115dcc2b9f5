"""Planning for a card that is not here: by its name, without a byte, and nothing left behind."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.compat.absent.pretending import Properties, pretending
from fxremat.compat.configuration import functorch_config, inductor_config
from fxremat.compat.inductor.generated_code import Generated
from fxremat.cost.device import CARDS, absent_card, card_named, spec_of_card
from fxremat.errors import NeedsTriton, UnknownDevice
from fxremat.whatif.device import absent
from tests.absent_nets import halves_on, net_and_tokens
from tests.end_to_end import least
from tests.graphs import Net

_AS_TRITON_COMPILES = {
    name: False
    for name in ("use_static_triton_launcher", "use_static_cuda_launcher")
    if hasattr(inductor_config, name)
}
"""Else what comes back can only be launched."""


def cubins(generated: Generated, properties: Properties) -> Mapping[str, tuple[bytes, ...]]:
    """Each Triton kernel's name, and its machine code for each way in which it may be run.

    Raises what Triton raises where a kernel cannot be compiled.
    """
    with pretending(properties), inductor_config.patch(_AS_TRITON_COMPILES):
        return {name: tuple(_compiled(name, source)) for name, source in _kernels(generated)}


def _kernels(generated: Generated) -> list[tuple[str, str]]:
    """Names and sources, as they stand in the generated code."""
    asked = r"async_compile\.triton\('(\w+)', ('''.*?''')"
    found = re.findall(asked, generated.source, re.DOTALL)
    return [(name, ast.literal_eval(source)) for name, source in found]


def _compiled(name: str, source: str) -> Iterator[bytes]:
    from torch._inductor.codecache import PyCodeCache

    kernel: Any = getattr(PyCodeCache.load(source), name)
    for config in kernel.configs:
        yield bytes(kernel._precompile_config(config).kernel.asm["cubin"])


KERNELS = {"H100": "cudnn", "A100": "flash", "T4": "math"}
"""Of attention in bfloat16, by card."""


def _attentions(graph: Any) -> list[str]:
    return [str(n.target) for n in graph.nodes if "_scaled_dot_product" in str(n.target)]


@pytest.mark.parametrize(
    "name", ["H100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("A100", "T4"))]
)
def test_kernels_of_a_card_compile_for_it(name: str) -> None:
    """Forward and backward, each kernel in each way to run it; attention as torch runs it there.

    Kernels of the forward are tuned in the step: Inductor alone would copy what one overwrites,
    whatever is free.
    """
    card = card_named(name)
    forward, backward, codes = halves_on(name)
    called = _attentions(forward.graph) + _attentions(backward.graph)
    expected = [] if KERNELS[name] == "math" else [KERNELS[name]]
    assert all(any(word in target for word in expected) for target in called)
    assert bool(called) == bool(expected)
    for code in codes:
        machine = cubins(code, card.properties())
        asked = set(re.findall(r"(triton_\w+) = async_compile\.triton", code.source))
        assert set(machine) == asked
        assert all(one.startswith(b"\x7fELF") for ways in machine.values() for one in ways)
        assert all(ways for ways in machine.values())
        assert "'optimize_mem': True" in code.source
        assert "'optimize_mem': False" not in code.source


def test_budgets_count_reserved_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """Or allocated ones, if that is asked for; the least that is named is obeyed.

    The peak is that of a dry run.
    """
    options: dict[str, Any] = {"variants": "none", "solver": "greedy"}
    with absent("H100"), caplog.at_level(logging.WARNING, "fxremat"):
        model, inputs = _layers()
        [whole] = fxremat.explain(model, *inputs, options=options).graphs
        assert whole.provenance.dry_runs
        assert whole.predicted_reserved_bytes is not None
        assert whole.count == "reserved"
        named = least(model, inputs, **options)
        budget = options["memory_budget"] = (named + whole.predicted_reserved_bytes) // 2
        [loose] = fxremat.explain(model, *inputs, options={**options, "count": "allocated"}).graphs
        tight = fxremat.explain(model, *inputs, options=options)
        lowest = fxremat.explain(model, *inputs, memory_budget=named, options=options)
    assert not [r for r in caplog.records if r.name.startswith("fxremat")]
    assert tight.time_overhead >= 0
    assert loose.counted_peak_bytes == loose.predicted_peak_bytes
    assert loose.counted_peak_bytes + loose.tuning_bytes <= budget
    assert tight.predicted_reserved_bytes is not None
    assert tight.predicted_peak_bytes < tight.predicted_reserved_bytes <= budget
    assert "the budget counts reserved bytes" in str(tight)
    assert lowest.predicted_reserved_bytes is not None
    assert lowest.predicted_reserved_bytes <= named


def _layers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Values of 6 MiB, in segments of 20; each graph has few kernels to write."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 1), nn.Flatten(0)).to(torch.bfloat16)
    return model, (torch.zeros(12 * 1024, 256, dtype=torch.bfloat16),)


def test_other_allocators_are_not_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated bytes are counted then; who asks for reserved ones is told."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    with absent("H100"):
        model, inputs = _layers()
        [report] = fxremat.explain(model, *inputs).graphs
        with pytest.raises(fxremat.InvalidOption, match="the model is of that allocator alone"):
            fxremat.explain(model, *inputs, options={"count": "reserved"})
    assert (report.count, report.predicted_reserved_bytes) == ("allocated", None)


def test_budget_is_the_card_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """All but the context; what cuBLAS works in, and what tuning writes over, is held."""
    with absent("A100-40GB") as card, caplog.at_level(logging.WARNING, "fxremat"):
        model, inputs = net_and_tokens()
        [report] = fxremat.explain(model, *inputs).graphs
    assert not [r for r in caplog.records if r.name.startswith("fxremat")]
    assert report.provenance.dry_runs
    assert report.budget_bytes == card.usable
    reserved = report.predicted_reserved_bytes
    assert reserved is not None
    assert report.predicted_peak_bytes <= reserved <= 1.3 * report.predicted_peak_bytes
    assert report.tuning_bytes == 0
    cublas, mib = 2 * (2 * 4096 * 1024 + 16 * 8 * 1024), 2**20
    assert 10 * mib < cublas < 20 * mib  # both lie in one segment of 20 MiB, weights in one of 2
    assert report.held_bytes + report.resident_bytes == (2 + 20) * mib + card.l2_cache


def test_models_from_elsewhere_are_taken_by_their_sizes() -> None:
    """On meta tensors, or with real ones, or for CUDA: the same plan."""
    peaks = set()
    for device in ("meta", "cpu", "cuda"):
        with torch.device("meta" if device == "meta" else "cpu"):
            model, inputs = _layers()
        with absent("H100"):
            if device == "cuda":
                model, inputs = model.to("cuda"), tuple(x.to("cuda") for x in inputs)
            peaks.add(fxremat.explain(model, *inputs).predicted_peak_bytes)
    assert len(peaks) == 1


def test_nothing_is_left_behind() -> None:
    """Neither of what torch is asked, nor in the plans for what is here."""
    from torch._dynamo.device_interface import get_interface_for_device

    cuda = torch.cuda
    asked = ("is_available", "get_device_properties", "get_device_capability", "current_device")
    before = [getattr(cuda, name) for name in asked]
    interface = get_interface_for_device("cuda")
    here = _explained_here()
    with pytest.raises(ZeroDivisionError):
        _explain_and_fail()
    assert [getattr(cuda, name) for name in asked] == before
    assert get_interface_for_device("cuda") is interface
    assert absent_card() is None
    assert _explained_here() == here
    assert torch.zeros(2).sum().item() == 0
    if torch.version.cuda is None:
        mode: Any = torch._subclasses.fake_tensor.FakeTensorMode()
        with mode, pytest.raises(RuntimeError, match="not linked with support"):
            ~torch.empty(2, dtype=torch.bool, device="cuda")


def _explained_here() -> int:
    """By Inductor, on the CPU: it traces patterns of its own once in a process."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 1))
    explained = fxremat.explain(model, torch.zeros(4, 8), memory_budget="1GiB")
    return explained.predicted_peak_bytes


def _explain_and_fail() -> None:
    with absent("H100"):
        model, inputs = _layers()
        fxremat.explain(model, *inputs)
        raise ZeroDivisionError


def test_cards_are_known_by_any_name() -> None:
    """By ours, by what CUDA calls them, and by what people write."""
    for card in CARDS:
        assert card_named(card.name) is card
        assert card_named(card.full_name) is card
        assert spec_of_card(card.full_name) == card.spec
        assert 0 < card.usable < card.total_bytes
    assert card_named("h100").name == "H100"
    assert card_named("RTX 4090").name == "4090"
    assert card_named("A100-80GB").name == "A100"


def test_compiled_models_are_planned_and_run_without_memory() -> None:
    """As in a training loop that is not told where it runs."""
    torch.compiler.reset()  # Dynamo compiles the same code so often only
    with absent("H100"):
        model, inputs = net_and_tokens()
        loss = torch.compile(model, backend="fxremat", options={"memory_budget": "1GiB"})(*inputs)
        [report] = fxremat.reports()
    assert loss.shape == ()
    assert report.budget_bytes == 2**30
    assert report.predicted_peak_bytes <= 2**30


def test_an_unknown_card_names_those_there_are_and_triton_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = r"'H10O'.*did you mean 'H100'.*A100-40GB"
    with pytest.raises(UnknownDevice, match=why), absent("H10O"):
        pass
    monkeypatch.setattr("fxremat.whatif.device.has_triton", lambda: False)
    with pytest.raises(NeedsTriton, match="pip install"), absent("H100"):
        pass


@pytest.mark.gpu
def test_code_is_that_of_the_card_that_is_here() -> None:
    """Kernels of the absent card, against those that Inductor writes on the card."""
    from torch._inductor.utils import run_and_get_code

    name = next(c.name for c in CARDS if spec_of_card(torch.cuda.get_device_name()) == c.spec)
    _, _, codes = halves_on(name)
    model, inputs = net_and_tokens()
    model, on_card = model.cuda(), [x.cuda() for x in inputs]

    def step() -> None:
        torch.compile(model, options={"shape_padding": False})(*on_card).backward()

    with functorch_config.patch(donated_buffer=False):  # unless fxremat marks one
        _, real = run_and_get_code(step)
    for code, source in zip(codes, real, strict=True):
        assert "\n".join(_kernel_bodies(code.source)) == "\n".join(_kernel_bodies(source))


def _kernel_bodies(source: str) -> list[str]:
    return re.findall(r"@triton\.jit\n(def triton_.*?)\n'''", source, re.S)


def test_ops_are_taken_apart_as_on_the_card() -> None:
    """Those too that a torch without CUDA would run as other ops, in place."""

    def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ weight) * x).sum()

    with absent("H200"):
        inputs = [torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "xw"]
        [report] = fxremat.explain(gated, *inputs).graphs
    names = {op.name for op in report.problem.ops}
    assert not [name for name in names if name.startswith(("copy_", "sub_", "empty"))]


def conv_over_tokens(net: Any, x: Tensor) -> Any:
    """A convolution over tokens, whose result is a view of tokens on the CPU, not elsewhere."""
    y = net.conv(x.transpose(1, 2).view(len(x), 32, 16, 16))
    return net.linear(F.gelu(y.flatten(2).transpose(1, 2))).square().mean()


def test_views_that_are_copies_on_the_device_are_traced_there() -> None:
    conv = nn.Conv2d(32, 32, 3, padding=1, groups=32)
    net = Net(conv_over_tokens, conv=conv, linear=nn.Linear(32, 32))
    with absent("H200"):
        found = fxremat.explain(net, torch.randn(4, 256, 32))
    assert found.graphs
