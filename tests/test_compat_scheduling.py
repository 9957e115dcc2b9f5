"""What of Inductor is used: its scheduling, passes after the gradient, and placement."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import scheduler
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.compat import measuring, tensors
from fxremat.compat.configuration import POST_GRAD_PASS, SCHEDULER_PASS, inductor_config
from fxremat.compat.inductor import generated_code, post_grad, scheduling
from fxremat.compat.inductor.generated_code import generate
from tests.compat_graphs import ATEN, forward_code, half, shared
from tests.graphs import Net, batch

# --- scheduling ---------------------------------------------------------------------------


def loops_apart() -> Net:
    """Two loops that have nothing in common."""
    return Net(lambda net, x: (x.exp(), net.w.sin()), w=nn.Parameter(torch.ones(100)))


def test_run_in_functions() -> None:
    """Functions end where it is said, and what a loop allocates and frees is told."""
    seen: list[list[scheduling.Footprint]] = []

    def functions(ends: set[int]) -> int:
        def last_of(loops: list[scheduling.Footprint]) -> set[int]:
            seen.append(loops)
            return ends

        def divide(nodes: list[Any]) -> list[Any]:
            scheduling.run_in_functions(nodes, last_of)
            return nodes

        code = forward_code(loops_apart(), batch(32, 64), **{SCHEDULER_PASS: divide})
        return code.count("async_compile.cpp_pybinding(")

    assert [functions(set()), functions({0})] == [1, 2]
    loops = [loop for loops in seen for loop in loops]
    assert {loop.allocated for loop in loops} == {32 * 64 * 4, 100 * 4}


def test_scheduled_and_run_after() -> None:
    """What kernels are, and an order that no data asks for."""
    seen: list[list[scheduling.Scheduled]] = []
    names: list[str] = []

    def backwards(nodes: list[Any]) -> list[Any]:
        seen.append([scheduling.scheduled(node) for node in nodes])
        names.extend(scheduling.names_being_scheduled())
        scheduling.run_after(nodes, {len(nodes) - 1: [0]})
        return nodes

    forward_code(shared(), batch(32, 64), **{SCHEDULER_PASS: backwards})
    (kernels,) = seen
    assert [k.is_call for k in kernels] == [False, True, True, False]
    assert [k.is_loop for k in kernels] == [True, False, False, True]
    assert {k.written for k in kernels} == {32 * 64 * 4}
    assert kernels[0].read == 32 * 64 * 4
    assert any(name.startswith("mm") for name in names)


def layers() -> Net:
    """Layers with library calls between loops that all read one table."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            x = x + layer(net.norm(x) * net.table).relu()
        x = torch.cat([x[:16] * net.table, x[16:]])
        return torch.zeros(8, 64).index_put((x.sum(1).long() % 8,), x, accumulate=True)

    parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    return Net(forward, layers=parts, norm=nn.LayerNorm(64), table=torch.rand(64))


def test_only_loops_that_are_never_fused_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the code is the same byte for byte."""
    inductor: Any = scheduler.Scheduler
    asked, can_fuse = list[tuple[bool, bool]](), inductor.can_fuse

    def asks(self: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> bool:
        apart = scheduling._are_apart(self, first, second)
        asked.append((apart, can_fuse(self, first, second, *args, **kwargs)))
        return asked[-1][1]

    def code_of(model: nn.Module) -> str:
        numbered, _, code = forward_code(model, batch(32, 64)).partition("\n")
        assert numbered.startswith("# AOT ID")
        return code

    for model in (layers(), shared()):
        near = code_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(inductor, "can_fuse", asks)
            patch.setattr(generated_code, "far_loops_apart", nullcontext)
            assert code_of(model) == near
    assert inductor.can_fuse is can_fuse
    assert {apart for apart, fused in asked if fused} == {False}
    assert sum(apart for apart, _ in asked) > 10


@pytest.mark.parametrize("partitions", [False, True])
def test_code_allocates_at_places(partitions: bool) -> None:
    """The code says so itself, of the function that is called from outside."""
    why: list[str | None] = []

    def place(nodes: list[Any]) -> list[Any]:
        why.append(scheduling.allocate_at_places())
        return nodes

    def code(**options: Any) -> str:
        return forward_code(loops_apart(), batch(32, 64), **{SCHEDULER_PASS: place}, **options)

    call = "Runner.call" if partitions else "call"
    written = code(graph_partition=partitions)
    assert f"{call} = forward_at_places({call})" in written
    assert "import empty_strided_cpu, empty_strided_cuda, forward_at_places" in written
    assert "at_places" not in code(**{"triton.cudagraphs": True})
    assert why[0] is None
    assert "CUDA graph" in str(why[-1])


# --- post grad ----------------------------------------------------------------------------


def test_write_results() -> None:
    """A result that would be computed in each of its readers is written instead."""

    def mark(graph: fx.Graph) -> None:
        post_grad.write_results(graph, [n for n in graph.nodes if n.target is ATEN.abs.default])

    plain = forward_code(shared(), batch(32, 64))
    written = forward_code(shared(), batch(32, 64), **{POST_GRAD_PASS: mark})
    counts = [code.count("= empty_strided_cpu((32, 64)") for code in (plain, written)]
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize("read_twice", [False, True])
def test_what_a_convolution_reads_as_an_image_is_written_as_one(read_twice: bool) -> None:
    """The mark stands behind the view, if nothing else reads the groups of channels."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        groups = x.sin()
        image = torch.conv2d(groups.view(2, 8, 6, 6), weight)
        return (image, groups.cos()) if read_twice else image

    module = make_fx(step, tracing_mode="fake")(torch.ones(2, 2, 4, 36), torch.ones(4, 8, 3, 3))
    (sin,) = (n for n in module.graph.nodes if n.target is ATEN.sin.default)
    post_grad.write_results(module.graph, [sin])
    (mark,) = (n for n in module.graph.nodes if n.target is torch.ops.fxremat.written.default)
    assert mark.meta["val"].shape == ((2, 2, 4, 36) if read_twice else (2, 8, 6, 6))
    assert post_grad.unmarked(mark) is sin


def masked() -> Net:
    """A mask whose two readers stand on either side of a library call."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        return ((torch.where(mask, x, -1.0) @ net.w) @ net.w) + mask  # type: ignore[no-any-return]

    return Net(forward, w=nn.Parameter(torch.ones(64, 64)))


def test_a_written_mask_is_stored_as_bytes_and_read_as_it_was() -> None:
    def mark(graph: fx.Graph) -> None:
        post_grad.write_results(graph, [n for n in graph.nodes if n.target is ATEN.gt.Scalar])

    x = torch.randn(32, 64)
    code = forward_code(masked(), x, **{POST_GRAD_PASS: mark})
    assert "(32, 64), (64, 1), torch.uint8)" in code
    torch._dynamo.reset()
    with inductor_config.patch({POST_GRAD_PASS: mark, "force_disable_caches": True}):
        compiled = torch.compile(masked())(x)
    torch.testing.assert_close(compiled, masked()(x))


def test_inputs_are_returned_as_they_are() -> None:
    """What a convolution's backward reads of the graph's inputs is no copy with channels last."""

    def strides(marked: bool, forward: fx.GraphModule) -> dict[str, bool]:
        def mark(graph: fx.Graph) -> None:
            if marked:
                post_grad.return_inputs_as_they_are(graph)

        with torch._inductor.config.patch(post_grad_custom_post_pass=mark):
            code = generate(forward, is_backward=False, seen_outputs=1)
        results: Any = forward.graph.output_node().args[0]
        return {
            node.name: stride == node.meta["val"].stride()
            for node, stride in zip(results, code.strides, strict=True)
            if isinstance(node, fx.Node) and node.meta["val"].dim() == 4
        }

    def step(forward: fx.GraphModule, _: fx.GraphModule) -> list[dict[str, bool]]:
        kept = [strides(marked, forward) for marked in (False, True)]
        text = forward.code
        post_grad.leave_layouts(forward)
        assert forward.code != text  # Inductor's caches know a graph by its text
        return [*kept, strides(True, forward)]

    pair = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    loose, tight, left = half(pair, step, torch.randn(2, 4, 16, 16))
    assert left == loose
    inputs = [name for name in loose if name.startswith("primals")]
    assert inputs
    assert not all(loose[name] for name in inputs)
    assert all(tight[name] for name in inputs)
    seen = next(name for name in loose if not name.startswith("primals"))
    assert loose[seen]  # the user's result keeps its strides either way
    assert tight[seen]


def test_the_order_of_channels_that_inductor_prefers() -> None:
    """On CPUs with mkldnn channels go last wherever there is a convolution."""
    image, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    convolution = make_fx(torch.conv2d, tracing_mode="fake")(image, weight)
    assert post_grad.prefers_channels_last(convolution)
    with torch._inductor.config.patch(layout_optimization=False):
        assert not post_grad.prefers_channels_last(convolution)
    assert not post_grad.prefers_channels_last(make_fx(torch.sin, tracing_mode="fake")(image))


@pytest.mark.parametrize(("channels", "copied"), [(3, True), (32, False)])
def test_images_are_copied_where_gradients_would_be(channels: int, copied: bool) -> None:
    """The smaller of the two; values stay."""
    image, gradient = torch.randn(2, channels, 8, 8), torch.randn(2, 16, 8, 8)
    gradient = gradient.to(memory_format=torch.channels_last)
    weight, how = torch.randn(16, channels, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def of_weight(gradient: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        mask = [False, True, False]
        backward: Any = ATEN.convolution_backward.default
        found: torch.Tensor = backward(gradient, image, weight, None, *how, mask)[1]
        return found

    module = make_fx(of_weight, tracing_mode="fake", _allow_non_fake_inputs=True)(gradient, image)
    with tensors.fake_mode_of(module.graph):
        post_grad.copy_images(module.graph)
    module.recompile()
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.convolution_backward.default)
    read = node.args[1].meta["val"]
    assert read.is_contiguous(memory_format=torch.channels_last) == copied
    torch.testing.assert_close(module(gradient, image), of_weight(gradient, image))


# --- measuring ----------------------------------------------------------------------------


def test_profiler_memory_events() -> None:
    assert not measuring.profiler_runs()
    with torch.profiler.profile(profile_memory=True) as prof:
        assert measuring.profiler_runs()
        with pytest.raises(RuntimeError, match="after its with block"):
            measuring.profiler_memory_events(prof)
        tensor = torch.empty(1000)
        del tensor
    assert not measuring.profiler_runs()
    events = measuring.profiler_memory_events(prof)
    assert [(size, device) for _, size, device in events] == [(4000, "CPU"), (-4000, "CPU")]
    assert events[0][0] <= events[1][0]


def _most_of(call: Callable[[], object]) -> int | None:
    recording = measuring.HostRecording()
    call()
    return recording.stop()


def _allocates(kib: int) -> torch.Tensor:
    return torch.empty(kib, 1024, dtype=torch.uint8)


def test_a_recording_sees_every_block_however_short() -> None:
    """And what a library call of torch's frees before it returns."""
    kept = [_allocates(512)]

    def step() -> None:
        _allocates(64)
        kept.append(_allocates(32))
        kept[:1] = []  # of before: its size is known only if that was recorded
        _allocates(16)

    assert _most_of(step) == 64 * 1024

    def next_step() -> None:
        kept[:] = []  # of the step before: 32 KiB less
        kept.append(_allocates(40))

    assert _most_of(next_step) == (40 - 32) * 1024


def test_a_recording_gives_way_to_a_profiler() -> None:
    recording = measuring.HostRecording()
    with torch.profiler.profile() as prof:
        _allocates(1).fill_(1)
        with pytest.raises(RuntimeError, match="a profiler or a backward runs"):
            measuring.HostRecording()
    assert [each.key for each in prof.key_averages() if each.key == "aten::fill_"]
    assert recording.stop() is None
    assert _most_of(lambda: _allocates(3)) == 3 * 1024


def test_a_recording_ends_when_the_backward_returns() -> None:
    """Which gives each of its nodes the profiler that ran when it began."""
    said, weight = list[object](), torch.ones(3, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        said.extend((recording.stop(), measuring.HostRecording.is_possible()))

    loss: Any = weight.square().sum()
    loss.register_hook(hook)
    recording = measuring.HostRecording()
    loss.backward()
    assert said == [None, False]
    assert measuring.HostRecording.is_possible()
    assert _most_of(lambda: _allocates(9)) == 9 * 1024


def test_a_recording_that_another_thread_stops_does_not_go_on_for_ever() -> None:
    recording = measuring.HostRecording()
    with ThreadPoolExecutor() as other:
        assert other.submit(recording.stop).result() is None
    assert measuring.HostRecording.is_possible()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert _most_of(lambda: _allocates(7)) == 7 * 1024


# --- placement ----------------------------------------------------------------------------


HOST = torch.device("cpu")
BLOCK_BYTES = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.int64])
def test_a_tensor_over_bytes_of_a_block(dtype: torch.dtype) -> None:
    """Its storage is its own, of exactly these bytes; it keeps the block alive."""
    with torch.inference_mode():
        block = tensors.new_block(BLOCK_BYTES, HOST)
        one = tensors.tensor_over(block, 1024, 2048, dtype)
    assert not one.is_inference()
    assert one.untyped_storage().nbytes() == 1024
    assert one.data_ptr() == block.data_ptr() + 1024
    block[1024:2048].fill_(1)
    uses = tensors.storage_uses(tensors.storage_number(block.untyped_storage()))
    del block
    one.fill_(1)
    assert one.sum() == one.numel()
    assert uses > 1


def test_what_lies_there_is_a_tensor_like_any_other() -> None:
    """It has its own version, and is saved, copied and shared by itself."""
    block = tensors.new_block(BLOCK_BYTES, HOST)
    base = tensors.tensor_over(block, 0, 1024, torch.float32)
    one: Any
    one, other = (tensors.reinterpret(base, (16, 16), (16, 1), 0) for _ in range(2))
    one.fill_(3)
    assert (one._version, other._version, base._version) == (1, 0, 0)
    file = io.BytesIO()
    torch.save(one, file)
    assert file.tell() < 4096
    assert copy.deepcopy(one).untyped_storage().nbytes() == 1024
    assert torch.equal(pickle.loads(pickle.dumps(one)), one)
    one.share_memory_()
    assert base.data_ptr() != block.data_ptr()
    assert one.sum() == 3 * 256


def test_uses_of_a_storage() -> None:
    """They tell whoever holds what lies there, views and copies of the tensor among them."""
    base = tensors.tensor_over(tensors.new_block(1024, HOST), 0, 1024, torch.float32)
    storage = base.untyped_storage()
    number = tensors.storage_number(storage)
    idle = tensors.storage_uses(number)
    one = tensors.reinterpret(base, (256,), (1,), 0)
    held = [one, one[:4], one.detach(), one.numpy()]
    del one
    while held:
        assert tensors.storage_uses(number) > idle
        held.pop()
    assert tensors.storage_uses(number) == idle
    # The object of this storage is the one that is known.
    tensors.reinterpret(base, (256,), (1,), 0).untyped_storage()
    assert tensors.storage_uses(number) == idle


def test_what_generated_code_allocates_with() -> None:
    made = tensors.EMPTY["cpu"]((2, 3), (4, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (4, 1), torch.float16)
    assert "cuda" in tensors.EMPTY
