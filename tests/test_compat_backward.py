"""Torch's joint graph and backward: how it is cut, what is donated, what is dropped."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor import compile_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.nets.language import GPT
from fxremat.compat.backward import (
    autograd_position,
    given_before,
    leaves_of_one_edge,
    no_other_backward,
    node_of_forward,
    running_backward,
    saved_before,
    watch_backwards,
    when_backward_returns,
    when_backward_starts,
)
from fxremat.compat.compilers import compile_with_aot_eager
from fxremat.compat.configuration import PARTITIONER, functorch_config, inductor_config
from fxremat.compat.inductor.generated_code import code_key, generate
from fxremat.compat.joint_graph import (
    donatable,
    donate,
    donated_inputs,
    is_tangent,
    must_be_in_backward,
    must_be_in_forward,
    mutated_input_of,
    name_in_forward,
    torch_partition,
    user_tag,
    without_user_tags,
)
from fxremat.passes.halves import DonateSaved
from tests import nets
from tests.compat_graphs import ATEN, Cut, X, half
from tests.graphs import Capture, Net, batch, compiled, everything_again
from tests.single_calls import call
from tests.small import Convolutions, seeded


def test_what_eager_code_has_read_is_known_where_a_backward_starts() -> None:
    """Weights and data as the program has them, and nothing that was made on the way."""
    head, target = nn.Linear(3, 5), torch.randint(5, (4,))
    made = torch.ones(4, 3, requires_grad=True) * 2
    seen = list[torch.Tensor]()
    when_backward_starts(lambda outputs: seen.extend(given_before(outputs)))
    loss: Any = F.cross_entropy(head(made), target)
    assert not seen
    loss.backward()
    assert {id(x) for x in (head.weight, head.bias, target)} <= {id(x) for x in seen}
    assert all(x.grad_fn is None for x in seen)
    seen.clear()
    head(torch.ones(4, 3)).sum().backward()
    assert not seen  # it is called once


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_called_when_the_outermost_backward_returns(fails: bool) -> None:
    seen = list[str]()
    watch_backwards()
    inner: Any = torch.ones((), requires_grad=True) * 2

    def hook(gradient: torch.Tensor) -> None:
        when_backward_returns(lambda: seen.append(str(running_backward())))
        inner.backward()
        seen.append("inside")
        if fails:
            raise ValueError("a hook of the user's")

    loss: Any = torch.ones((), requires_grad=True) * 3
    loss.register_hook(hook)
    with pytest.raises(ValueError, match="user's") if fails else nullcontext():
        loss.backward()
    assert seen == ["inside", "None"]
    when_backward_returns(lambda: seen.append("at once"))
    assert seen[-1] == "at once"


class Product(torch.autograd.Function):
    """Notes what is known of the backward while it runs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        watched.append(leaves_of_one_edge())
        with no_other_backward() as alone:
            assert alone or not watched[-1]
        assert running_backward() is not None
        return gradient, gradient


watched: list[list[torch.Tensor]] = []


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Product.apply(a, b)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.filterwarnings("ignore:Using backward")
def test_leaves_of_the_backwards_that_are_watched() -> None:
    """Where a backward begins is known; so are its leaves, wherever the node is that asks."""
    autograd: Any = torch.autograd
    before = autograd._engine_run_backward
    autograd._engine_run_backward = inspect.unwrap(before)
    watch_backwards()
    installed = autograd._engine_run_backward
    watch_backwards()
    assert autograd._engine_run_backward is installed
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    try:
        for loss, expected in (
            (product(a, b), [a, b]),
            (product(a, b).exp(), [a, b]),
            (product(a, b) + a, [b]),
            (product(a, b) * product(a, torch.ones(())), [b]),
        ):
            torch.autograd.backward(loss)
            assert list(map(id, watched.pop())) == list(map(id, expected))
            watched.clear()
        torch.autograd.backward([product(a, b), b.exp()])
        assert list(map(id, watched.pop())) == [id(a)]
        torch.autograd.backward([product(a, b), a])
        torch.autograd.grad(product(a, b), [a, b])
        torch.autograd.backward(product(a, b), create_graph=True)
        assert watched == [[], [], []]
        autograd._engine_run_backward = inspect.unwrap(before)
        torch.autograd.backward(product(a, b))
        assert watched.pop() == []
        with no_other_backward() as alone:
            assert not alone
    finally:
        watched.clear()
        autograd._engine_run_backward = before


def test_what_eager_nodes_have_saved() -> None:
    """Not what hooks have made of a tensor, and nothing after a backward."""
    x, again = torch.ones(3, requires_grad=True), [0]

    def counted(y: torch.Tensor) -> torch.Tensor:
        again[0] += 1
        return y.sin().cos()

    first = x.exp()
    y = checkpoint(counted, torch.cat([first, first]), use_reentrant=False)
    z = torch.stack([y, y])[torch.tensor([0])]
    saved = {each.data_ptr() for each in saved_before([z, None, 3, x.detach()])}
    assert first.data_ptr() in saved
    assert again == [1]
    assert x.data_ptr() not in saved
    assert any(each.dtype == torch.int64 for each in saved_before([z]))
    torch.autograd.backward(z.sum())
    assert saved_before([z]) == []
    assert saved_before([x]) == []


def test_the_node_of_a_forward_that_writes_into_the_result_of_another() -> None:
    """As where a loss of experts is added to a loss: the newer node is found, behind the copy."""
    x = torch.ones(3, requires_grad=True)
    loss = torch.compile(lambda x: x.exp().sum(), backend="aot_eager")(x)
    first, since = node_of_forward(loss, 0), autograd_position()
    added = torch.compile(lambda loss, x: loss.add_(x.sum()), backend="aot_eager")(loss, x)
    second = node_of_forward(added, since)
    assert second is not None
    assert second is not first
    assert node_of_forward(loss.view(1), 0) is second
    added.backward()
    torch.testing.assert_close(x.grad, x.detach().exp() + 1)


# --- donation -----------------------------------------------------------------------------


def classifier() -> Net:
    """The cross-entropy of logits."""

    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net.head(x), torch.zeros(len(x), dtype=torch.int64))

    return Net(loss, head=nn.Linear(64, 500))


def saved_names(backward: fx.GraphModule) -> list[str]:
    """What a backward reads of its forward, by the names in the joint graph, in order."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    return [name_in_forward(node) for node in placeholders if not is_tangent(node)]


LOGITS = "empty_strided_cpu((32, 500)"


def test_the_gradient_of_logits_is_written_over_them() -> None:
    """The same backward allocates a gradient of its own before, and none after it is marked.

    The forward is marked, too: it may lay out its results as it likes.
    """
    codes: list[str] = []
    keys: list[str | None] = []

    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        names = donatable(forward, backward, 1)
        assert "addmm" in names
        assert not any(name.startswith("primals") for name in names)
        saved = saved_names(backward)
        for marked in ((), ("addmm",)):
            donate(backward, marked)
            keys.append(code_key(backward, is_backward=True))
            codes.append(generate(backward, is_backward=True).source)
        assert saved_names(backward) == saved
        assert donated_inputs(backward) == [saved.index("addmm")]
        backward.graph.lint()
        keys.append(code_key(forward, is_backward=False))
        assert DonateSaved(backward, 1).call(forward).modified
        assert "addmm" in [saved[index] for index in donated_inputs(backward)]
        keys.append(code_key(forward, is_backward=False))

    half(classifier(), step)
    assert [LOGITS in code for code in codes] == [True, False]
    assert None not in keys
    assert len({*keys}) == 4  # else Inductor's cache would give the one for the other


def views(x: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Halves whose forward saves an exponential, a view of it, a view of its input and a sine."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(x: torch.Tensor) -> Any:
        exponential = x.exp()
        return x.cos(), exponential, exponential.view(-1), x.view(-1), x.sin()

    def backward(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a * d + (b * c).view(a.shape),)

    made = make_fx(forward, tracing_mode="fake")(x)
    results: Any = made.graph.output_node().args[0]
    mode = results[0].meta["val"].fake_mode
    with mode:
        second = make_fx(backward)(*(node.meta["val"] for node in results[1:]))
    return made, second


def test_what_shares_its_memory_is_not_donated() -> None:
    """Neither a view of an input, nor two of one storage; and nothing where the user forbids it."""
    forward, backward = views(torch.randn(4, 4))
    assert donatable(forward, backward, 1) == ("sin",)
    assert donatable(forward, backward, 5) == ()
    with functorch_config.patch(donated_buffer=False):
        names = half(classifier(), lambda forward, backward: donatable(forward, backward, 1))
    assert names == ()


@pytest.mark.parametrize("donates", [False, True])
def test_a_backward_that_donates_runs_once(donates: bool) -> None:
    """torch itself refuses to keep its graph; without marks it may be kept, as torch would not."""

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        forward, backward = torch_partition(module, inputs, **kwargs)
        if donates:
            donate(backward, donatable(forward, backward, kwargs["num_fwd_outputs"]))
        return forward, backward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_with_aot_eager(gm, inputs, partition)

    model = classifier()
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend)
    call(batch(32, 64)).backward()
    loss = call(batch(32, 64))
    if donates:
        with pytest.raises(RuntimeError, match="retain_graph=False"):
            loss.backward(retain_graph=True)
    else:
        loss.backward(retain_graph=True)
        loss.backward()


# --- partitioning -------------------------------------------------------------------------


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


# --- joint graph --------------------------------------------------------------------------


def test_where_a_node_must_be() -> None:
    copy = call(ATEN.copy_.default, X, X.clone())
    assert must_be_in_forward(copy)
    assert not must_be_in_backward(copy)
    copy.meta["partitioner_tag"] = "is_backward"
    assert must_be_in_backward(copy)
    assert not must_be_in_forward(copy)
    plain = call(ATEN.sin.default, X)
    assert not must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_forward"
    assert must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_backward"
    assert must_be_in_backward(plain)


def overwrite_after(x: torch.Tensor) -> torch.Tensor:
    """The new content of the input has a gradient: AOTAutograd writes it after the graph."""
    result = x.exp()
    x.mul_(2)
    return result


def test_mutated_input_of_one_that_is_overwritten_after_the_graph() -> None:
    seen = Capture(everything_again)
    run = compiled(overwrite_after, seen)
    leaf = batch(4, 8).requires_grad_()
    given = leaf * 1
    (run(given).sum() + given.sum()).backward()
    torch.testing.assert_close(leaf.grad, batch(4, 8).exp() + 2)
    descriptions = seen.joint.module.graph.output_node().meta["desc"]
    assert any(mutated_input_of(d) is not None for d in descriptions)
    assert len(seen.joint.mutated) == 1


def test_tags_are_taken_off_a_copy() -> None:
    """All else is as it was, and so is the graph that they are taken off."""
    module = nets.traced("save nothing").joint.module
    tagged = [node.name for node in module.graph.nodes if user_tag(node)]
    copy = without_user_tags(module)
    assert tagged
    assert tagged == [node.name for node in module.graph.nodes if user_tag(node)]
    assert not any(user_tag(node) for node in copy.graph.nodes)
    assert copy.graph.python_code("self").src == module.graph.python_code("self").src
    for one, other in zip(module.graph.nodes, copy.graph.nodes, strict=True):
        assert one.meta.keys() - other.meta.keys() <= {"recompute", "ac_graph_id"}
