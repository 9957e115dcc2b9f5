"""A step that is looked at before its parts are compiled: bytes are exact, budgets are kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import fxremat
from fxremat.compile import session
from fxremat.options import Options
from fxremat.step import preparation as preparing
from tests.end_to_end import QUICK, Steps, measured
from tests.graphs import Net
from tests.small import Block

PLAIN: dict[str, Any] = {"backend": "aot_eager"}
WORDS = 600


pytestmark = pytest.mark.usefixtures("fresh")


def language(depth: int = 6, width: int = 64, wide: int = 0) -> Net:
    """Embedding, blocks of one or two widths, and a head that is large beside them."""

    def forward(net: Any, tokens: Tensor) -> Any:
        x = net.embedding(tokens)
        for part in (*net.blocks, net.widen, *net.wide):
            x = part(x)
        return net.head(x)

    last = 2 * width if wide else width
    return Net(
        forward,
        embedding=nn.Embedding(WORDS, width),
        blocks=nn.ModuleList(Block(width) for _ in range(depth)),
        widen=nn.Linear(width, last) if wide else nn.Identity(),
        wide=nn.ModuleList(Block(last) for _ in range(wide)),
        head=nn.Linear(last, WORDS),
    )


def loss_of(logits: Tensor) -> Tensor:
    """Of every token as its own next one."""
    return logits.flatten(0, 1).logsumexp(1).mean() - logits[..., 0].mean()


def with_loss(**given: Any) -> Net:
    """The same, with the loss inside."""
    return Net(lambda net, tokens: loss_of(net.model(tokens)), model=language(**given))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, Block)]


def compile_blocks(model: nn.Module) -> None:
    for block in blocks_of(model):
        block.compile(**PLAIN)


def wrap_blocks(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for name, block in list(module._modules.items()):
                wrapped: Any = torch.compile(block, **PLAIN)
                module._modules[name] = wrapped


def compile_nothing(model: nn.Module) -> None:
    """`prepare` compiles the whole then."""


class Case(Steps):
    """A model, its plain step, what that takes, and the gradients that it gives."""

    def __init__(self, compile_parts: Callable[[nn.Module], None], *, inside: bool, wide: int = 0):
        torch.manual_seed(0)
        size = {"wide": wide, "depth": 2 if compile_parts is compile_nothing else 6}
        self.model = with_loss(**size) if inside else language(**size)
        self.loss = None if inside else loss_of
        self.tokens = torch.randint(WORDS, (4, 64))
        self.models, self.given = (self.model,), (self.tokens,)
        self.expected = self.gradients()
        compile_parts(self.model)
        self.step()
        self.plain_peak = self.peak_bytes()

    def run(self) -> None:
        result = self.model(self.tokens)
        (result if self.loss is None else self.loss(result)).backward()

    def prepare(self, budget: int, **more: Any) -> None:
        torch._dynamo.reset()
        self.forget_gradients()
        options = {**QUICK, **more}
        fxremat.prepare(
            self.model, self.tokens, loss=self.loss, memory_budget=budget, options=options
        )


PARTS = [compile_blocks, wrap_blocks, compile_nothing]


@pytest.mark.parametrize(
    ("compile_parts", "inside"),
    [
        (compile_blocks, True),
        (compile_nothing, True),
        *(pytest.param(part, False, marks=pytest.mark.slow) for part in PARTS),
        pytest.param(wrap_blocks, True, marks=pytest.mark.slow),
    ],
)
def test_budgets_are_kept_and_gradients_stay(
    compile_parts: Callable[[nn.Module], None], inside: bool
) -> None:
    """At 80 % of what the plain step takes, and at the least that is named.

    Where it is refused the model is left as it was.
    """
    case = Case(compile_parts, inside=inside)
    before = dict(case.model.named_parameters())
    compiled = [block._compiled_call_impl for block in blocks_of(case.model)]
    with pytest.raises(fxremat.InfeasibleBudget) as refused:
        case.prepare(1 << 20)
    assert all(one is before[name] for name, one in case.model.named_parameters())
    assert [block._compiled_call_impl for block in blocks_of(case.model)] == compiled
    assert all(p.grad is None for p in case.model.parameters())
    case.step()
    least = refused.value.minimum_bytes
    assert least is not None
    for budget in (case.plain_peak * 8 // 10, least):
        case.prepare(budget)
        torch.testing.assert_close(case.gradients(), case.expected)
        case.step()
        assert case.peak_bytes() <= budget


def test_blocks_of_two_kinds_share_the_budget() -> None:
    case = Case(compile_blocks, inside=True, wide=3)
    case.prepare(case.plain_peak * 7 // 10)
    seen, _ = next(iter(session.STATE.seen.values()))
    assert len(seen.parts) == 2
    assert sorted(len(seen.runs_of(part)) for part in range(2)) == [3, 6]
    for _ in range(2):
        case.step()
    assert case.peak_bytes() <= case.plain_peak * 7 // 10


def blocks_and_head() -> Net:
    """Blocks, and what comes after them in one module."""

    def head_and_loss(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(net.head(x).flatten(0, 1), tokens.flatten())

    def whole(net: Any, tokens: Tensor) -> Any:
        x = net.embedding(tokens)
        for block in net.blocks:
            x = block(x)
        return net.last(x, tokens)

    blocks = nn.ModuleList(Block(64) for _ in range(2))
    last = Net(head_and_loss, head=nn.Linear(64, WORDS))
    return Net(whole, embedding=nn.Embedding(WORDS, 64), blocks=blocks, last=last)


@pytest.mark.slow
def test_a_head_and_its_loss_are_a_part() -> None:
    """Compiled, they run a few rows at a time, and the step needs less; gradients stay."""
    torch.manual_seed(0)
    model, tokens = blocks_and_head(), torch.randint(WORDS, (4, 64))
    model(tokens).backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    least = {}
    parts: Any = model
    for is_compiled in (False, True):
        for part in (*parts.blocks, *([parts.last] if is_compiled else [])):
            part.compile()
        torch._dynamo.reset()
        with pytest.raises(fxremat.InfeasibleBudget) as refused:
            fxremat.prepare(model, tokens, memory_budget=1 << 20)
        least[is_compiled] = refused.value.minimum_bytes or 0
    assert least[True] < 0.8 * least[False]
    torch._dynamo.reset()
    budget = least[True] * 105 // 100
    fxremat.prepare(model, tokens, memory_budget=budget)
    model(tokens).backward()
    torch.testing.assert_close(gradients_of(model), gradients)
    assert measured(model, model, (tokens,)) <= budget


def test_blocks_move_what_they_save_to_the_host_where_that_is_faster() -> None:
    """Over a link that costs nothing, nothing runs again; bytes are as exact as before."""
    case = Case(compile_blocks, inside=True)
    budget = case.plain_peak * 7 // 10
    case.prepare(budget, solver="auto", offload=True, host_bandwidth="400GB/s")
    torch.testing.assert_close(case.gradients(), case.expected)
    case.step()
    measured, reports = case.peak_bytes(), fxremat.reports()
    assert measured <= budget
    assert measured == pytest.approx(reports[-1].step_peak_bytes, rel=0.01)
    assert any(report.moved for report in reports)
    assert not any(report.recomputed for report in reports)


def test_a_model_without_a_loss_is_told_what_to_give() -> None:
    with pytest.raises(fxremat.FxrematError, match="loss="):
        fxremat.prepare(language(), torch.zeros(2, 8, dtype=torch.long), memory_budget="1GiB")


def test_an_object_with_a_loss_is_gone_backward_from() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.loss = F.mse_loss(logits, torch.zeros_like(logits))

    model: Any = Net(lambda net, x: Output(net.block(x)), block=Block(16))
    model.block.compile(backend="aot_eager")
    assert fxremat.prepare(model, torch.ones(2, 16), memory_budget="1GiB", options=QUICK) is model
    model(torch.ones(2, 16)).loss.backward()


def test_a_part_without_a_backward_is_no_part() -> None:
    """It is compiled, and saves nothing; without a look it is no part either."""

    def whole(net: Any, x: Tensor) -> Any:
        y = net.block(x)
        for choice in net.choices:
            y = y + choice(x).unsqueeze(-1)
        return y.square().mean()

    choices = nn.ModuleList(
        Net(lambda net, x: net.linear(x).argmax(-1), linear=nn.Linear(16, 16)) for _ in range(2)
    )
    model: Any = Net(whole, choices=choices, block=Block(16))
    x = torch.ones(2, 16)
    expected = model(x)
    options = {**QUICK, "memory_budget": "1GiB"}
    for part in (*model.choices, model.block):
        part.compile(backend="fxremat", options=options)
    torch.testing.assert_close(model(x), expected)
    torch._dynamo.reset()
    fxremat.prepare(model, x, options=options)
    seen, _ = next(iter(session.STATE.seen.values()))
    assert len(seen.parts) == 1
    torch.testing.assert_close(model(x), expected)
    model(x).backward()


def test_a_model_whose_step_was_looked_at_may_be_freed() -> None:
    """Modules that live on count as trained for the same budget."""
    case = Case(compile_blocks, inside=True)
    with pytest.raises(fxremat.InfeasibleBudget):
        case.prepare(1 << 20)
    alive = weakref.ref(blocks_of(case.model)[0])
    del case
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_more_runs_than_were_seen_are_planned_again() -> None:
    """The second kind of block runs more often than in the look; the parts stay apart."""
    case = Case(compile_blocks, inside=True, wide=2)
    case.prepare(case.plain_peak)
    case.step()
    losses = [case.model(case.tokens) for _ in range(4)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(case.gradients(), case.expected)


class Looking(Block):
    """A block that does more where it is given a tensor without memory."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        return result + x.sin() if isinstance(x, FakeTensor) else result


def test_regions_of_a_model_are_wrapped_and_look_at_tensors() -> None:
    """As those that accelerate compiles: layers of torch too, and code that knows fake tensors."""

    def wrap(model: Any) -> None:
        for name in ("embedding", "head"):
            setattr(model.model, name, torch.compile(model.model.get_submodule(name), **PLAIN))
        model.model.blocks = nn.ModuleList(Looking(64) for _ in range(6))
        wrap_blocks(model)

    case = Case(wrap, inside=True)
    expected = case.gradients()
    budget = case.plain_peak * 7 // 10
    case.prepare(budget)
    (seen, _), *_ = session.STATE.seen.values()
    assert sorted(len(seen.runs_of(part)) for part in range(len(seen.parts))) == [1, 1, 6]
    torch.testing.assert_close(case.gradients(), expected)
    case.step()
    assert case.peak_bytes() <= budget
    assert len(fxremat.reports()) <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["blocks", "prepared"])
def test_reserved_bytes_of_blocks_on_a_gpu(how: str) -> None:
    """Blocks that are compiled one by one, with fused kernels: at 60 % of what plain reserves."""
    torch.manual_seed(0)
    model = with_loss(depth=8, width=1024).cuda().bfloat16()
    tokens = torch.randint(WORDS, (16, 512), device="cuda")

    def reserved() -> int:
        """Of three steps, from an empty cache on; gradients of the last stay."""
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(tokens).backward()
        return torch.cuda.max_memory_reserved()

    for block in blocks_of(model):
        block.compile()
    reserved()
    plain = reserved()
    gradients = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
    options: dict[str, Any] = {"memory_budget": plain * 6 // 10}
    torch._dynamo.reset()
    if how == "prepared":
        fxremat.prepare(model, tokens, options=options)
    else:
        for block in blocks_of(model):
            block.compile(backend="fxremat", options=options)
    taken = reserved(), reserved()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=0.05, atol=0.05)
    assert max(taken) <= options["memory_budget"], (taken, torch.cuda.max_memory_allocated())


def test_what_lies_beside_the_model_counts_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is allocated there and is not the model's, and what is said to come."""
    cuda, model = torch.device("cuda"), nn.Linear(4, 4)
    monkeypatch.setattr(preparing, "allocate_cublas", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5000)

    def held(device: torch.device, reserve: int | None) -> int:
        return preparing._held_bytes(model, (), Options(reserve=reserve), device)

    assert held(cuda, None) == 5000
    assert held(cuda, 300) == 5300
    assert held(torch.device("cpu"), None) == 0
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert held(torch.device("cpu"), 300) == 300 + 20 * 4
    assert optimizer.param_groups
