"""Results that a graph returns beside its loss, for which nobody is expected to send a gradient.

Who returns a loss calls its backward, and returns the logits beside it to look at them. Their
gradient would be full of zeros, as large as they are. So the graph is compiled as if they were
detached. Should one come after all, then the graph runs again, with gradients for all results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxremat.compat.tensors import is_fake

Compiled = Callable[..., Any]


def unsent_results(
    gm: fx.GraphModule, inputs: Iterable[object], *, ends_model: bool = False
) -> tuple[int, ...]:
    """Which results of a Dynamo graph get no gradient if only its losses do; none without a loss.

    A loss is one number. Nor where an input was computed that needs a gradient: the graph is a part
    of a model then, whose other parts may be given the results, unless it ``ends_model``.
    """
    computed = (isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf for x in inputs)
    if not ends_model and any(computed):
        return ()
    results, trained = results_of(gm), trained_results(gm)
    losses = [k for k, value in trained.items() if _is_number(value)]
    left = tuple(k for k in trained if k not in losses)
    return left if losses and reads_all(gm, [results[k] for k in losses]) else ()


def reads_all(gm: fx.GraphModule, results: Iterable[Any]) -> bool:
    """Whether each input of a Dynamo graph that needs a gradient has one of these ``results``.

    One that only other results read would have none if these were left out: plain
    ``torch.compile`` gives it zeros.
    """
    made_of = {one for one in results if _is_trained(one)}
    for node in reversed(gm.graph.nodes):
        if node in made_of:
            made_of.update(filter(_may_be_trained, node.all_input_nodes))
    inputs = gm.graph.find_nodes(op="placeholder")
    return all(node in made_of for node in inputs if _is_trained(node))


def _is_trained(node: Any) -> bool:
    """Whether it is a node that gives something which needs a gradient."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    leaves = pytree.tree_leaves(value)
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves)


def _may_be_trained(node: fx.Node) -> bool:
    """The same, or what it gives does not say, as inside of ``torch.vmap``."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    unknown = any(isinstance(one, torch.Tensor) and not is_fake(one) for one in leaves)
    return unknown or _is_trained(node)


def writes_nothing(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph surely leaves what it is given as it is, so that it may run again.

    Not where norms count, embeddings are scaled, or a region is run by an operator on graphs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    written = any(isinstance(x, torch.Tensor) and x._version for x in values)
    regions = any(isinstance(one, fx.GraphModule) for one in gm.children())
    scaled = any(map(_scales, gm.graph.nodes))
    return not (written or regions or scaled or written_inputs(gm))


def _scales(node: fx.Node) -> bool:
    """Whether it is an embedding that writes its weights, as the fourth argument says."""
    most = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    return node.target is F.embedding and most is not None


def gives_loss(gm: fx.GraphModule) -> bool:
    """Whether a result of a Dynamo graph is a loss: one number that needs a gradient."""
    return any(map(_is_number, trained_results(gm).values()))


def written_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """The places of what a Dynamo graph is given, and writes into.

    Dynamo's stand-ins count how often they are written; norms write their statistics uncounted.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("example_value") for n in placeholders]
    tensors = {n: x for n, x in zip(placeholders, values, strict=True) if torch.is_tensor(x)}
    norms = [
        n
        for n in gm.graph.nodes
        if "batch_norm" in str(n.target) or "instance_norm" in str(n.target)
    ]
    statistics = {x for norm in norms for x in norm.all_input_nodes if x not in norm.args[:1]}
    return tuple(
        k
        for k, n in enumerate(placeholders)
        if n in tensors and not tensors[n].requires_grad
        if tensors[n]._version or n in statistics
    )


def results_of(gm: fx.GraphModule) -> list[Any]:
    """What a Dynamo graph returns."""
    (given,) = gm.graph.output_node().args
    return list(given) if isinstance(given, (list, tuple)) else [given]


def trained_results(gm: fx.GraphModule) -> dict[int, torch.Tensor]:
    """By their places, the results that a graph computes and that need a gradient; no memory."""
    nodes = ((k, one) for k, one in enumerate(results_of(gm)) if isinstance(one, fx.Node))
    values = ((k, one.meta.get("example_value")) for k, one in nodes if one.op != "placeholder")
    return {k: x for k, x in values if isinstance(x, torch.Tensor) and x.requires_grad}


def _is_number(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def detach_results(gm: fx.GraphModule, which: Sequence[int]) -> fx.GraphModule:
    """The graph, whose results at these places need no gradient any more."""
    if not which:
        return gm
    output, results = gm.graph.output_node(), results_of(gm)
    with gm.graph.inserting_before(output):
        for k in which:
            results[k] = gm.graph.call_method("detach", (results[k],))
    output.args = (tuple(results),)
    gm.recompile()
    return gm


def like(call: Compiled, other: Compiled) -> Compiled:
    """The other function with the attributes that the first was compiled with."""
    attributes = getattr(call, "__dict__", {}).items()
    vars(other).update({k: v for k, v in attributes if not k.startswith(_DYNAMO_MARKS)})
    return other


# By these Dynamo finds the function below a wrapper, and would call that.
_DYNAMO_MARKS = ("_torchdynamo", "__wrapped__")


def gradients_on_demand(
    call: Compiled,
    which: Sequence[int],
    written: Sequence[int],
    compile_all: Callable[[], Compiled],
    sent: Callable[[], None],
) -> Compiled:
    """``call``, whose results at these places have a gradient if somebody asks for it.

    Then ``sent()`` is called, and what ``compile_all()`` gives runs, which has gradients for all
    results. What is ``written``, by the places of arguments, is copied before each run.
    """
    whole = cache(compile_all)

    def run(*args: Any) -> Any:
        with torch.no_grad():
            copies = {k: args[k].clone() for k in written}
        random: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
            random["cuda"] = torch.cuda.get_rng_state()
        kinds, versions = tuple(_autocast(random)), _versions(args)
        again = _Again(whole, which, sent, args, copies, random, versions, kinds)
        results = call(*args)
        given = list(results)
        apply: Any = _Late.apply
        late = apply(again, len(which), *(given[k] for k in which), *again.leaves)
        for k, result in zip(which, late, strict=True):
            given[k] = result
        return given if isinstance(results, list) else tuple(given)

    return like(call, run)


def _autocast(kinds: Iterable[str]) -> Iterator[torch.autocast]:
    """What autocast does now for these kinds of devices."""
    for kind in kinds:
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        yield torch.autocast(kind, dtype=dtype, enabled=enabled)


def _versions(args: Iterable[object]) -> tuple[int, ...]:
    tensors = (x if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in args)
    return tuple(0 if x is None else x._version for x in tensors)


@dataclass
class _Again:
    """One run, and all that it takes to run again."""

    whole: Callable[[], Compiled]
    """What has gradients for all results."""
    which: Sequence[int]
    sent: Callable[[], None]
    args: tuple[Any, ...]
    copies: dict[int, torch.Tensor]
    random: dict[str, Any]
    """By the type of device, the state of its generator before the run."""
    versions: tuple[int, ...]
    """Of the arguments, before the run."""
    autocast: tuple[torch.autocast, ...]
    """As it was in the run."""
    leaves: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        tensors = (x for x in self.args if isinstance(x, torch.Tensor) and x.requires_grad)
        self.leaves = list({id(x): x for x in tensors}.values())

    def gradients(self, sent: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Of the leaves, for what was ``sent`` to the results.

        Raises RuntimeError where an argument was overwritten since.
        """
        now = _versions(self.args)
        overwritten = {k for k, old in enumerate(self.versions) if now[k] != old}
        if not overwritten <= self.copies.keys():
            raise RuntimeError(
                "a gradient came for a result that is returned beside a loss, after something "
                "that the graph was given had been overwritten. Call backward() for it before the "
                "optimizer steps, or call it for a sum of the loss and what is made of this result."
            )
        self.sent()
        # What made an argument goes backward by itself: the run begins at copies that nothing made.
        begins = {id(x): x.detach().requires_grad_() for x in self.leaves}
        args = [self.copies.get(k, begins.get(id(x), x)) for k, x in enumerate(self.args)]
        cuda = [torch.cuda.current_device()] if "cuda" in self.random else []
        with ExitStack() as contexts:
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(torch.random.fork_rng(cuda))
            for one in self.autocast:
                contexts.enter_context(one)
            whole = self.whole()
            torch.set_rng_state(self.random["cpu"])
            if cuda:
                torch.cuda.set_rng_state(self.random["cuda"])
            results = whole(*args)
            pairs = zip((results[k] for k in self.which), sent, strict=True)
            asked = [(result, gradient) for result, gradient in pairs if gradient is not None]
            outputs, gradients = zip(*asked, strict=True)
            leaves = list(begins.values())
            return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)


class _Late(torch.autograd.Function):
    """Gives results as they are; its backward runs if one of them gets a gradient."""

    @staticmethod
    def forward(ctx: Any, again: _Again, count: int, *tensors: torch.Tensor) -> Any:
        ctx.again, ctx.count = again, count
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in tensors[:count])  # their version is still that of one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *sent: torch.Tensor | None) -> Any:
        nothing = (None,) * (2 + ctx.count)
        return (*nothing, *ctx.again.gradients(sent))
