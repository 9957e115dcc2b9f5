"""What Dynamo says of the graph that it compiles."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from fxremat.compat.dynamo import (
    checkpointed_regions,
    compile_in_training,
    compile_parts,
    compiled_in_place,
    compiled_parts,
    current_compilation,
    fresh_dynamo_caches,
    inline_regions,
    is_for_dynamo,
    is_whole_call,
    leave_out_logs,
    more_follow,
    unwrapped,
)
from tests.compat_graphs import X


def noting(seen: list[Any], note: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that changes nothing; ``seen`` gets what ``note`` says of each graph."""

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(note(gm, inputs))
        return gm

    return backend


def test_errors_that_dynamo_waits_for() -> None:
    """Inductor's own are a compiler's."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._inductor.exc import InductorError

    assert is_for_dynamo(RestartAnalysis())
    assert not is_for_dynamo(InductorError(ValueError("lowering"), None))
    assert not is_for_dynamo(ValueError("ours"))


class Logs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.warning("a message")
        return x * 2


LOG = logging.getLogger(__name__)


def test_what_is_logged_ends_no_graph_if_it_is_left_out() -> None:
    counted = CompileCounter()
    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        leave_out_logs([logging.Logger.warning])
        torch.compile(Logs(), backend=counted, fullgraph=True)(X)
    assert counted.frame_count == 1


def test_graphs_of_a_model_with_graph_breaks() -> None:
    """Each graph has a frame of its own; all but the last end in a graph break."""
    seen: list[tuple[int, bool]] = []
    backend = noting(seen, lambda gm, inputs: (current_compilation()[0], more_follow(gm)))

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(X)
    frames, breaks = zip(*seen, strict=True)
    assert breaks == (True, False)
    assert frames[0] < frames[1]
    assert current_compilation() == (-1, None)


def test_a_graph_is_the_whole_call_unless_somebody_goes_on_with_its_results() -> None:
    """A break, a function around the one that is compiled, and a hook that is not traced go on."""
    whole: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            whole.append(is_whole_call(caller))
            return gm(*given)

        return run

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.compile(inner, backend=backend)(x)

    hooked = nn.Linear(4, 4)
    unseen: Any = torch._dynamo.disable(lambda module, given, result: None)  # type: ignore[no-untyped-call]
    hooked.register_forward_hook(unseen)
    caller = sys._getframe()
    compiled = [torch.compile(one, backend=backend) for one in (
        nn.Linear(4, 4), torch.sin, nn.Sequential(nn.Linear(4, 4)), broken, hooked
    )]  # fmt: skip
    said = []
    for model in (*compiled, around):
        torch._dynamo.reset()
        model(torch.ones(4, 4))
        said.append(whole.copy())
        whole.clear()
    assert said[:3] == [[True]] * 3
    # The first graph of two is called straight, too: `more_follow` tells that it is not the last.
    assert said[3] == [True, False]
    assert said[4:] == [[False], [False]]


def test_what_dynamo_wraps_has_frames_of_its_own() -> None:
    """Functions and modules of torch are compiled behind one function of Dynamo's."""
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: current_compilation()[0])
    torch._dynamo.reset()
    given: list[Any] = [nn.functional.gelu, nn.functional.silu]
    for one in [*given, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]:
        compiled: Any = torch.compile(one, backend=backend)
        compiled(torch.ones(2, 4))
    gelu, silu, *linear = seen
    assert gelu != silu
    assert not {gelu, silu} & {*linear}
    assert len({*linear}) == 2


def test_sizes_that_are_seen_apart_do_not_vary_outside() -> None:
    """Nor the other way round: what is compiled inside has symbols only if sizes vary there."""
    torch._dynamo.reset()
    symbols: list[int] = []
    backend = noting(symbols, lambda gm, inputs: sum(isinstance(x, torch.SymInt) for x in inputs))
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    compiled(torch.ones(3))
    with fresh_dynamo_caches():
        compiled(torch.ones(4))
    torch._dynamo.reset_code_caches()
    compiled(torch.ones(3))
    assert symbols == [0, 0, 0]
    compiled(torch.ones(5))
    assert symbols == [0, 0, 0, 1]


def test_regions_that_run_again_are_counted_also_inside_of_each_other() -> None:
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: checkpointed_regions(gm))

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(inner, x.exp(), use_reentrant=False)
        return again

    def step(x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(outer, inner(x), use_reentrant=False)
        return again

    for function in (inner, outer, step):
        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True)(X)
    assert seen == [0, 1, 2]


class Doubled(torch.nn.Module):
    """A compiled part: twice a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = 2 * self.linear(x)
        return y


def parts_of_all_sorts() -> torch.nn.Sequential:
    """One part that is compiled in place, one that is wrapped, one that is not compiled."""
    model = torch.nn.Sequential(Doubled(), Doubled(), Doubled())
    model[0].compile(backend="eager")
    wrapped: Any = torch.compile(model[1], backend="eager")
    model[1] = wrapped
    return model


def test_compiled_in_place() -> None:
    model = parts_of_all_sorts()
    wrapped = model[1]
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: len(inputs))
    torch._dynamo.reset()
    first = model[0]._compiled_call_impl
    with compiled_in_place(model, compiled_parts(model), backend):
        assert type(model[1]) is Doubled
        model(torch.ones(2, 4))
    assert len(seen) == 2  # an input with a gradient, and one without
    assert model[1] is wrapped
    assert model[0]._compiled_call_impl is first
    assert unwrapped(wrapped)._compiled_call_impl is None


def test_compile_parts() -> None:
    """Where they stand, and as they are wrapped."""
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: len(inputs))
    torch._dynamo.reset()
    model = parts_of_all_sorts()
    expected = model(torch.ones(2, 4))
    before = list(model)
    compile_parts(model, compiled_parts(model), backend=backend)
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    assert list(model) == before
    assert len(seen) == 2  # an input with a gradient, and one without


def test_regions_are_inlined_also_inside_of_each_other() -> None:
    """Each call gives what it gave; constants of a region keep their values."""
    torch._dynamo.reset()
    weight = torch.arange(3.0)

    @torch.compiler.nested_compile_region
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * weight

    @torch.compiler.nested_compile_region
    def outer(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inner(x) + torch.tensor([2.0, 3.0, 4.0]), inner(y)

    seen: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(inline_regions(gm))
        return seen[-1]

    def step(x: torch.Tensor) -> torch.Tensor:
        a, b = outer(x, x + 1)
        c, d = outer(b, a)
        product: torch.Tensor = c * d
        return product

    region = torch.ops.higher_order.invoke_subgraph
    x = torch.tensor([0.1, 0.2, 0.3])
    assert torch.equal(torch.compile(step, backend=backend)(x), step(x))
    assert not any(node.target is region for gm in seen for node in gm.graph.nodes)
    assert sum(node.target == "sin" for node in seen[0].graph.nodes) == 4
    plain = fx.symbolic_trace(lambda x: x.cos())
    assert inline_regions(plain) is plain


def test_what_is_compiled_in_training_only() -> None:
    """Evaluation, and what runs without gradients, is not; how is asked at the first training."""
    compiled: list[torch.Size] = []
    asked: list[Any] = []
    backend = noting(compiled, lambda gm, inputs: X.shape)

    def how(inputs: Any) -> dict[str, Any]:
        asked.append(inputs)
        return {"backend": backend}

    torch._dynamo.reset()

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 2

    model = Own()
    expected = model(X)
    compile_in_training(model, how)
    with torch.no_grad():
        model(X)
    model.eval()(X)
    assert (compiled, asked) == ([], [])
    model.train()
    for _ in range(2):
        torch.testing.assert_close(model(X), expected)
    assert len(compiled) == 1
    assert asked == [((X,), {})]
