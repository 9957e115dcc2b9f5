"""What of Dynamo and of torch's settings is used: contexts, logs, compilers and stacks."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.testing import CompileCounter
from torch._logging import _internal as torch_logs
from torch.utils.checkpoint import checkpoint

from fxremat.compat import dynamo
from fxremat.compat.configuration import inductor_patches, passes_of
from fxremat.compat.logs import GRAPH_LOG, PLAN_LOG, artifact_logger, trace_artifact
from fxremat.passes.fixed_order import WriteResults
from tests.compat_graphs import X
from tests.graphs import Net


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

    assert dynamo.is_for_dynamo(RestartAnalysis())
    assert not dynamo.is_for_dynamo(InductorError(ValueError("lowering"), None))
    assert not dynamo.is_for_dynamo(ValueError("ours"))


LOG = logging.getLogger(__name__)


def test_what_is_logged_ends_no_graph_if_it_is_left_out() -> None:
    counted = CompileCounter()

    def log(x: torch.Tensor) -> torch.Tensor:
        LOG.warning("a message")
        return x * 2

    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        dynamo.leave_out_logs([logging.Logger.warning])
        torch.compile(log, backend=counted, fullgraph=True)(X)
    assert counted.frame_count == 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_graphs_of_a_model_with_graph_breaks() -> None:
    """Each graph has a frame of its own; all but the last end in a graph break."""
    seen: list[tuple[int, bool]] = []
    backend = noting(
        seen, lambda gm, inputs: (dynamo.current_compilation()[0], dynamo.more_follow(gm))
    )
    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(X)
    frames, breaks = zip(*seen, strict=True)
    assert breaks == (True, False)
    assert frames[0] < frames[1]
    assert dynamo.current_compilation() == (-1, None)


def test_a_graph_is_the_whole_call_unless_somebody_goes_on_with_its_results() -> None:
    """A break, a function around the one that is compiled, and a hook that is not traced go on."""
    whole: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            whole.append(dynamo.is_whole_call(caller))
            return gm(*given)

        return run

    def around(x: torch.Tensor) -> Any:
        return torch.compile(lambda x: x.sin(), backend=backend)(x)

    hooked = nn.Linear(4, 4)
    unseen: Any = torch._dynamo.disable(lambda module, given, result: None)  # type: ignore[no-untyped-call]
    hooked.register_forward_hook(unseen)
    caller = sys._getframe().f_code
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
    assert said[4] in ([False], [])  # torch 2.11 compiles nothing of a module with such a hook
    assert said[5] == [False]


def test_what_dynamo_wraps_has_frames_of_its_own() -> None:
    """Functions and modules of torch are compiled behind one function of Dynamo's."""
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: dynamo.current_compilation()[0])
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
    with dynamo.fresh_dynamo_caches():
        compiled(torch.ones(4))
    torch._dynamo.reset_code_caches()
    compiled(torch.ones(3))
    assert symbols == [0, 0, 0]
    compiled(torch.ones(5))
    assert symbols == [0, 0, 0, 1]


def test_regions_that_run_again_are_counted_also_inside_of_each_other() -> None:
    seen: list[int] = []
    backend = noting(seen, lambda gm, inputs: dynamo.checkpointed_regions(gm))

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def outer(x: torch.Tensor) -> Any:
        return checkpoint(inner, x.exp(), use_reentrant=False)

    def step(x: torch.Tensor) -> Any:
        return checkpoint(outer, inner(x), use_reentrant=False)

    for function in (inner, outer, step):
        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True)(X)
    assert seen == [0, 1, 2]


class Doubled(nn.Linear):
    """A compiled part: twice a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def parts_of_all_sorts() -> torch.nn.Sequential:
    """One part that is compiled in place, one that is wrapped, one that is not compiled."""
    model = torch.nn.Sequential(*(Doubled(4, 4) for _ in range(3)))
    model[0].compile(backend="eager")
    wrapped: Any = torch.compile(model[1], backend="eager")
    model[1] = wrapped
    return model


def test_compiled_in_place() -> None:
    """Parts are compiled for a while, and then for good: where they stand, as they are wrapped."""
    torch._dynamo.reset()
    model, x, seen = parts_of_all_sorts(), torch.ones(2, 4), list[int]()
    backend = noting(seen, lambda gm, inputs: len(inputs))
    expected, before = model(x), list(model)
    wrapped, first = model[1], model[0]._compiled_call_impl
    with dynamo.compiled_in_place(model, dynamo.compiled_parts(model), backend):
        assert type(model[1]) is Doubled
        model(x)
    assert len(seen) == 2  # an input with a gradient, and one without
    assert model[1] is wrapped
    assert model[0]._compiled_call_impl is first
    assert dynamo.unwrapped(wrapped)._compiled_call_impl is None
    torch._dynamo.reset()
    dynamo.compile_parts(model, dynamo.compiled_parts(model), backend=backend)
    torch.testing.assert_close(model(x), expected)
    assert list(model) == before
    assert len(seen) == 4


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
        seen.append(dynamo.inline_regions(gm))
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
    assert dynamo.inline_regions(plain) is plain


def test_what_is_compiled_in_training_only() -> None:
    """Evaluation, and what runs without gradients, is not; how is asked at the first training."""
    compiled, asked = list[int](), list[Any]()

    def how(inputs: Any) -> dict[str, Any]:
        asked.append(inputs)
        return {"backend": noting(compiled, lambda gm, inputs: len(inputs))}

    torch._dynamo.reset()
    model = Net(lambda net, x: x.sin() * 2)
    expected = model(X)
    dynamo.compile_in_training(model, how)
    with torch.no_grad():
        model(X)
    model.eval()(X)
    assert (compiled, asked) == ([], [])
    model.train()
    for _ in range(2):
        torch.testing.assert_close(model(X), expected)
    assert len(compiled) == 1
    assert asked == [((X,), {})]


# --- compilers ----------------------------------------------------------------------------


@pytest.mark.slow
def test_decompositions_find_what_they_look_up() -> None:
    """A pooling is the first graph of a process: nothing has loaded Inductor's lowerings yet."""
    script = (
        "import torch, fxremat\n"
        "pool = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2))\n"
        "print(fxremat.explain(pool, torch.randn(1, 1, 8, 8)).predicted_peak_bytes)\n"
    )
    assert int(subprocess.check_output([sys.executable, "-c", script])) > 0


# --- configuration ------------------------------------------------------------------------


def test_inductor_patches() -> None:
    assert inductor_patches(None, {}) == {}
    assert inductor_patches("default", {"max-autotune": True}) == {"max_autotune": True}
    tuned = inductor_patches("max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    assert tuned["max_autotune"] is True
    assert tuned["epilogue_fusion"] is False


@dataclass
class Recording:
    """A pass that says that it ran."""

    name: str | None
    ran: list[str | None]

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str | None:
        return self.name


def test_passes_of_the_user() -> None:
    ran: list[str | None] = []
    a, b, nameless = (Recording(name, ran) for name in ("a", "b", None))
    assert passes_of(None) == ()
    assert passes_of(a) == (a,)
    graph = fx.Graph()
    graph.output(())
    both = WriteResults("1", passes_of([a, b]))
    both(graph)
    assert ran == ["a", "b"]
    assert both.uuid()[1:] == ("a", "b")
    assert WriteResults("1", passes_of([a, nameless])).uuid() is None
    assert pickle.loads(pickle.dumps(both)).uuid() == both.uuid()


# --- logs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PLAN_LOG, GRAPH_LOG])
def test_artifact_logger(name: str) -> None:
    logger = artifact_logger(name)
    assert logger.name == f"fxremat.__{name}"
    known: Any = torch_logs.log_registry
    assert known.is_artifact(name)
    assert known.is_off_by_default(name)
    assert known.is_log("fxremat")
    assert not logger.propagate  # nobody has asked for it


def test_trace_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is to hold is made only where a trace is written."""
    handler = mock.Mock(level=logging.NOTSET)
    monkeypatch.setattr(torch_logs.trace_log, "handlers", [])
    trace_artifact("one", "json", lambda: pytest.fail("it was made"))
    monkeypatch.setattr(torch_logs.trace_log, "handlers", [handler])
    trace_artifact("two", "json", lambda: {"three": 4})
    records = [vars(each.args[0]) for each in handler.handle.call_args_list]
    (written,) = (one for one in records if "artifact" in one["metadata"])  # others: a call stack
    assert written["metadata"]["artifact"] == {"name": "two", "encoding": "json"}
    assert written["payload"].split() == ["{", '"three":', "4", "}"]


# --- call stack ---------------------------------------------------------------------------


def test_modules_whose_call_is_running() -> None:
    seen: list[dict[torch.nn.Module, Any]] = []

    inner = Net(lambda net, x: seen.append(dynamo.calling_modules()) or x)  # type: ignore[func-returns-value]
    outer = torch.nn.Sequential(torch.nn.Identity(), inner)
    x = torch.ones(1)
    outer(x)
    (found,) = seen
    assert list(found) == [outer, inner]
    assert all(given is x for (given,) in found.values())
    assert dynamo.calling_modules() == {}


def test_functions_that_are_compiled_beside_the_one_that_runs() -> None:
    """Not modules, and nothing that takes no results."""
    seen: list[list[Any]] = []

    def backend(gm: fx.GraphModule, inputs: Any, *, options: Any) -> Any:
        seen.append([one["name"] for one in dynamo.functions_compiled_by(backend)])
        return gm

    def compiled(one: Any, name: str) -> Any:
        return torch.compile(one, backend=backend, options={"name": name})

    kept = [compiled(torch.sin, "sin"), compiled(nn.Linear(1, 1), "module")]
    kept += [compiled(lambda: torch.ones(1), "nothing"), compiled(lambda x: x.cos(), "cos")]
    in_place = nn.Linear(1, 1)
    in_place.compile(backend=backend, options={"name": "in place"})
    for one in kept:
        one(*([] if one is kept[2] else [torch.ones(1)]))
    assert list(map(sorted, seen)) == [["cos"], ["cos", "sin"], ["cos", "sin"], ["sin"]]
