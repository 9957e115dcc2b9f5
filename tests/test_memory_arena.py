"""Training in an arena: the same to the bit as without, whatever a loop does with what it is given.

One compiled model serves most tests. Each records a step, lays out an arena for it, and runs what
it is about without places, in the arena, and with dead memory filled with NaN.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.graphs import Net
from tests.placing import OPTIONS, Small, Trial, dry_runs, trial
from tests.small import Convolutions, Stack

Loop = Callable[[], Any]
WAYS = ("as ever", "placed", "poisoned")


def in_all_ways(small: Small, loop: Loop, found: Trial, record: Loop | None = None) -> None:
    """What the loop gives is the same without an arena, in it, and where dead memory is NaN."""
    results = {}
    if not found.placed:
        found.record(record or small.step, small.model)
    for way in WAYS:
        found.arena.poison = way == "poisoned"
        small.model.zero_grad(set_to_none=True)
        with found.running("as ever" if way == "as ever" else "placed"):
            copies = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, loop())
        results[way] = torch.utils._pytree.tree_leaves(copies)
    for way in WAYS[1:]:
        assert len(results[way]) == len(results["as ever"]) > 0
        assert all(map(torch.equal, results["as ever"], results[way])), way


@pytest.fixture
def ran(stack: Small) -> Iterator[Trial]:
    """A trial in whose arena a step of the stack has run."""
    with trial() as found:
        found.record(stack.step, stack.model)
        stack.step()
        yield found


def test_gradients_lie_in_the_arena(stack: Small) -> None:
    """All that is planned is placed, in each step again, and it takes less than all buffers."""
    with trial() as found:
        in_all_ways(stack, lambda: [stack.step(), *stack.gradients()], found)
        assert stack.lies_in(found.arena) == len(stack.weights)
        assert found.arena.nbytes < sum(one.buffer.nbytes for one in found.step.asked)
        assert (found.arena.conflicts, found.arena.differences, found.arena.missed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("make", "size"), [(lambda: Stack(2, 48), (64, 48)), (Convolutions, (8, 3, 16, 16))]
)
def test_what_a_dry_run_says_holds(make: Callable[[], nn.Module], size: tuple[int, ...]) -> None:
    """The code asks for the buffers of the dry run, and each is dead when that says so."""
    with dry_runs() as runs:
        small = Small(make, *size)
        small.step()
    with trial() as found:
        found.record(small.step, small.model)
        found.plan(runs)
        in_all_ways(small, lambda: [small.step(), *small.gradients()], found)
        assert (found.arena.conflicts, found.arena.differences, found.arena.missed) == (0, 0, 0)
        assert small.lies_in(found.arena) > 0


def test_the_arena_is_given_back_with_the_last_graph(stack: Small, ran: Trial) -> None:
    """What somebody still holds keeps its memory."""
    block, before = weakref.ref(ran.arena.block), [one.clone() for one in stack.gradients()]
    ran.placed.clear()
    gc.collect()
    assert ran.arena.nbytes == 0
    assert all(map(torch.equal, stack.gradients(), before))
    stack.step()
    gc.collect()
    assert block() is None


def test_a_larger_layout_takes_the_arena_anew(stack: Small, ran: Trial) -> None:
    """A gradient that is held stays in the one before."""
    kept, nbytes = stack.gradients(), ran.arena.nbytes
    values = [one.clone() for one in kept]
    (key,) = ran.placed
    before = ran.placed[key].forward
    (ran.placed[key],) = ran.arena.placed(ran.step_layout(2 * nbytes))
    stack.step(2)
    assert ran.arena.nbytes == 2 * nbytes
    assert all(map(torch.equal, kept, values))
    assert stack.lies_in(ran.arena) == len(stack.weights)
    assert ran.arena.conflicts == 0
    del before


# --- what a loop does with gradients and results ------------------------------------------


def hooks(stack: Small) -> Any:
    """One hook keeps what it sees, and one takes the gradient as soon as it is there."""
    seen: list[Tensor] = []

    def take(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad)
        weight.grad = None

    handles = [p.register_hook(lambda g: seen.append(g)) for p in stack.weights[::2]]
    handles += [p.register_post_accumulate_grad_hook(take) for p in stack.weights[::3]]
    losses = [stack.step(k) for k in range(1, 4)]
    for handle in handles:
        handle.remove()
    return losses, seen, stack.gradients()


def optimizer(stack: Small) -> Any:
    """Weights change, the states are made of gradients, and a copy of the weights follows."""
    before = [p.detach().clone() for p in stack.weights]
    adam, mean = torch.optim.AdamW(stack.weights, lr=1e-2), copy.deepcopy(stack.model)
    losses = []
    for k in range(1, 4):
        losses.append(stack.step(k))
        nn.utils.clip_grad_norm_(stack.weights, 0.1)
        adam.step()
        with torch.no_grad():
            for one, other in zip(mean.parameters(), stack.weights, strict=True):
                one.lerp_(other, 0.1)
    after = [p.detach().clone() for p in stack.weights]
    stack.restore(before)
    return losses, after, list(mean.parameters())


def evaluated_between(stack: Small) -> Any:
    found = []
    for k in range(1, 4):
        loss = stack.call(stack.x * k)
        with torch.no_grad():
            found.append(stack.call(stack.x))
        with torch.inference_mode():
            found.append(stack.call(stack.x).clone())
        loss.backward()
    return found, stack.gradients()


def saved_on_cpu(stack: Small) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = stack.call(stack.x)
    stack.call(stack.x * 2).backward()
    loss.backward()
    return stack.gradients()


def hooks_that_hold_what_is_saved(stack: Small) -> Any:
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        loss = stack.call(stack.x)
    values = [one.clone() for one in held]
    loss.backward()
    stack.step(2)
    return held, values, stack.gradients()


def hooks_that_hold_what_they_read(stack: Small) -> Any:
    """What was saved is held by somebody when the backward would lie there."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: held.append(x) or x):  # type: ignore[func-returns-value]
        loss = stack.call(stack.x)
    loss.backward()
    stack.step(2)
    return held, stack.gradients()


def checkpointed(stack: Small) -> Any:
    """A forward is computed again inside of the backward."""
    for k in range(1, 4):
        loss: Any = checkpoint(stack.call, stack.x * k, use_reentrant=k == 3)
        if loss.requires_grad:
            loss.backward()
    return stack.gradients()


def a_backward_fails(stack: Small) -> Any:
    """In a hook of the user, before and after the node of the graph."""
    for weight in stack.weights[:1]:
        handle = weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failed:
            stack.call(stack.x).backward()
        handle.remove()
    loss = stack.call(stack.x)
    loss.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    found = stack.step(), [one.clone() for one in stack.gradients()]
    del failed
    return found, stack.step(2), stack.gradients()


def compiled_autograd(stack: Small) -> Any:
    """The whole backward is one graph, without the nodes that know their places."""
    losses = []
    for k in range(1, 3):
        stack.model.zero_grad(set_to_none=True)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            losses.append(stack.call(stack.x * k))
            losses[-1].backward()
    return losses, stack.gradients()


LOOPS = (
    hooks, optimizer, evaluated_between, saved_on_cpu, hooks_that_hold_what_is_saved,
    hooks_that_hold_what_they_read, checkpointed, a_backward_fails, compiled_autograd,
)  # fmt: skip
"""Beside what `test_memory_arena_property` does in any order."""


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(stack: Small, loop: Callable[[Small], Any]) -> None:
    with trial() as found:
        in_all_ways(stack, lambda: loop(stack), found)
        found.arena.poison = False
        stack.model.zero_grad(set_to_none=True)
        gc.collect()
        conflicts = found.arena.conflicts
        stack.step()  # all is placed again
        assert found.arena.conflicts == conflicts
        assert stack.lies_in(found.arena) == len(stack.weights)


@pytest.mark.parametrize("donated", [False, True])
def test_a_second_backward_gives_what_it_gives_without(stack: Small, donated: bool) -> None:
    """The same gradients, or the same error where saved memory was given away."""
    with torch._functorch.config.patch(donated_buffer=donated):
        small = Small(Stack, 16, 32)

        def loop() -> Any:
            outcome = []
            loss = small.call(small.x)
            for keep in (True, True, False, False):
                try:
                    loss.backward(retain_graph=keep)
                except RuntimeError as error:
                    outcome.append(torch.tensor([ord(c) for c in str(error)]))
            return [*outcome, *(one.clone() for one in small.gradients()), small.step()]

        with trial() as found:
            in_all_ways(small, loop, found)


# --- storages -----------------------------------------------------------------------------


def test_storages_of_gradients_are_their_own(stack: Small, ran: Trial) -> None:
    """They are saved, copied and shared as others are, and what was shared stays as it is."""
    one = stack.weights[1].grad
    value, file = one.clone(), io.BytesIO()
    torch.save(one, file)
    assert file.tell() < one.nbytes + 4096
    assert copy.deepcopy(one).untyped_storage().nbytes() == one.nbytes
    assert one.untyped_storage().nbytes() == one.nbytes
    one.share_memory_()
    shared = torch.UntypedStorage._new_shared_filename_cpu(  # as another process has it
        *one.untyped_storage()._share_filename_cpu_()
    )
    del one
    for k in range(3):
        stack.step(k + 2)
        assert torch.equal(torch.empty(0).set_(shared)[: value.numel()], value.flatten())
    assert stack.lies_in(ran.arena) == len(stack.weights)


def test_memory_that_is_held_in_other_ways(stack: Small, ran: Trial) -> None:
    """By a storage alone, an array of numpy, and a tensor that has taken over another's memory."""
    first, second, third = stack.gradients()[:3]
    values = [one.clone() for one in (first, second, third)]
    storage, array = first.untyped_storage(), second.numpy()
    taken = torch.empty(0)
    taken.data = third
    del first, second, third
    for k in range(3):
        stack.step(k + 2)
        same = torch.empty(0).set_(storage).view(values[0].shape)
        assert all(map(torch.equal, (same, torch.from_numpy(array), taken), values))
    assert ran.arena.conflicts > 0


# --- graphs -------------------------------------------------------------------------------


def test_running_statistics() -> None:
    """BatchNorm's buffers, which a graph is given and writes, are the user's."""
    small = Small(Convolutions, 4, 3, 16, 16)
    state = copy.deepcopy(small.model.state_dict())

    def loop() -> Any:
        small.model.load_state_dict(state)
        losses = [small.step(k) for k in range(1, 4)]
        return losses, small.gradients(), [one.clone() for one in small.model.buffers()]

    with trial() as found:
        in_all_ways(small, loop, found)


def wide() -> Net:
    """Its size is given."""
    return Net(
        lambda net, x: net.down(torch.tanh(net.up(x)).relu()).square().mean(),
        up=nn.Linear(16, 64),
        down=nn.Linear(64, 16),
    )


def test_one_graph_for_many_sizes() -> None:
    """It is laid out for 32 rows, and fewer lie in the same places."""
    small = Small(wide, 32, 16, dynamic=True)
    torch._dynamo.mark_dynamic(small.x, 0)
    sizes = [torch.randn(rows, 16) for rows in (32, 8, 17, 31)]

    def loop(inputs: list[Tensor]) -> Any:
        found = []
        for x in inputs:
            small.model.zero_grad(set_to_none=True)
            loss = small.call(x)
            loss.backward()
            found += [loss.detach(), *(one.clone() for one in small.gradients())]
        return found

    with trial() as found:
        in_all_ways(small, lambda: loop(sizes), found)
        assert found.arena.differences == 0
        assert small.lies_in(found.arena) == len(small.weights)


def test_blocks_one_by_one_and_two_models(stack: Small) -> None:
    """Runs of one code have places of their own, and another model lies in the same arena."""
    other = Small(lambda: Stack(2, 16), 8, 16)
    torch.manual_seed(0)
    chain = Stack(3, 16)
    for block in chain.blocks:
        block.compile(backend="fxremat", options=OPTIONS)
    weights = [*stack.weights, *other.weights, *chain.parameters()]
    together = nn.ParameterList(weights)

    def step() -> Any:
        for weight in weights:
            weight.grad = None
        losses = [stack.call(stack.x), other.call(other.x), chain(other.x)]
        sum(losses).backward()
        return [one.detach() for one in losses], [weight.grad for weight in weights]

    step()
    step()
    with trial() as found:
        both = Small.__new__(Small)
        both.model, both.weights = together, weights
        in_all_ways(both, step, found, step)
        assert len(found.placed) >= 4
        assert both.lies_in(found.arena) == len(weights)
        assert found.arena.conflicts == 0


# --- ops that do not do as they say -------------------------------------------------------

LIBRARY: Any = torch.library.Library("arena_tests", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("odd(Tensor x, str how) -> Tensor")
HELD: list[Tensor] = []


def _odd(x: Tensor, how: str) -> Tensor:
    if how == "keeps":
        HELD.append(x)
    if FAILS and how == "fails":
        raise ValueError("odd")
    return x if how == "returns" else x * 2


FAILS: list[bool] = []
LIBRARY.impl("odd", _odd, "CompositeExplicitAutograd")
torch.library.register_fake("arena_tests::odd", lambda x, how: torch.empty_like(x), lib=LIBRARY)
torch.library.register_autograd(
    "arena_tests::odd",
    lambda ctx, gradient: (torch.ops.arena_tests.odd(gradient, ctx.how), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "how", inputs[1]),
    lib=LIBRARY,
)


class Odd(nn.Module):
    """An op that does not do as it says, between others that have buffers of the same size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        shown = []
        for layer in self.layers:
            x = torch.ops.arena_tests.odd(torch.tanh(layer(x)), self.how).sin()
            shown.append(torch.ops.arena_tests.odd(x, self.how))
        return x.square().mean(), shown[1]


@pytest.mark.parametrize("how", ["returns", "keeps", "fails"])
def test_ops_that_do_not_do_as_they_say(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They return or keep what they are given, so that it lives against the plan; or they fail."""
    strict = "error_on_custom_op_aliasing"  # torch warns of such an op, and refuses it under CI=1
    if hasattr(torch._functorch.config, strict):
        monkeypatch.setattr(torch._functorch.config, strict, False)
    small = Small(lambda: Odd(how), 8, 16)

    def step(scale: float = 1.0) -> Any:
        small.model.zero_grad(set_to_none=True)
        loss, shown = small.call(small.x * scale)
        loss.backward()
        return loss.detach(), shown.detach()

    def loop() -> Any:
        HELD.clear()
        found = [step(k) for k in range(1, 4)]
        if how == "fails":
            FAILS.append(True)
            with pytest.raises(ValueError, match="odd"):
                step()
            FAILS.clear()
        return found, HELD[:], step(5), small.gradients()

    step()
    with trial() as found:
        in_all_ways(small, loop, found, step)
        FAILS.clear()
        HELD.clear()
