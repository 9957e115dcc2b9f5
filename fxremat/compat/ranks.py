"""The job that this process is a rank of: where ranks leave word for each other, and who has to
compile the same graph."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.utils import to_fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxremat.compat.joint_graph import copy_module
from fxremat.compat.tensors import is_dtensor

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_GATHERS = frozenset({"all_gather_into_tensor", "all_gather_into_tensor_coalesced"})
_MOVES = _GATHERS | {"all_to_all_single", "broadcast"}
_SUMS_TO_PARTS = frozenset({"reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"})
_SUMS_TO_ALL = frozenset({"all_reduce", "all_reduce_coalesced"})


def is_a_rank() -> bool:
    """Whether this process is one of several that torch.distributed has brought together."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def job_store() -> Any:
    """The key-value store that the ranks have met at, with names of our own; `is_a_rank`."""
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d
    return group.PrefixStore("fxremat", group._get_default_store())


def has_within(store: Any, key: str, seconds: float) -> bool:
    """Whether a key comes within so many seconds; `ConnectionError` if the store is lost."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except Exception as error:
        text = str(error).lower()
        if isinstance(error, TimeoutError) or "timeout" in text or "timed out" in text:
            return False
        raise ConnectionError(str(error)) from error
    return True


def ranks_together(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """The ranks that have to run the same graph at the same time: it has collectives among them.

    Those of the device meshes of its inputs, and of its collectives; none where it has neither.
    """
    if not is_a_rank():
        return ()
    meshes = [one.device_mesh.mesh for one in inputs if is_dtensor(one)]
    found: set[int] = {rank for mesh in meshes for rank in mesh.flatten().tolist()}
    found.update(*map(_ranks_of, {name for node in gm.graph.nodes for name in _groups(node)}))
    return tuple(sorted(found)) if len(found) > 1 else ()


def is_collective(node: fx.Node) -> bool:
    """Whether a node has ranks talk to each other, or waits for that."""
    return _name(node.target) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective: it gives that one's result, in the same memory."""
    return _name(node.target) == "wait_tensor"


def moves_between_ranks(node: fx.Node) -> bool:
    """Whether a collective gives what the ranks gave it, and computes nothing."""
    return _name(node.target) in _MOVES


def sums_over_ranks(node: fx.Node) -> bool:
    """Whether a collective adds up, or the like, what the ranks gave it, into new memory."""
    return _name(node.target) in _SUMS_TO_PARTS | _SUMS_TO_ALL


def sums_for_all_ranks(node: fx.Node) -> bool:
    """Whether a collective sums, and each rank gets the whole of it."""
    return _name(node.target) in _SUMS_TO_ALL


def number_of_ranks(node: fx.Node) -> int | None:
    """How many take part in a collective; None where the node does not say it."""
    arguments = _arguments(node)
    told = arguments.get("group_size")
    if isinstance(told, int):
        return told
    parts = arguments.get("input_split_sizes")
    if isinstance(parts, (tuple, list)):
        return len(parts)
    return next((len(_ranks_of(name)) for name in _groups(node)), None)


def gathers(target: object) -> bool:
    """Whether an operator gives each rank what all of them have."""
    return _name(target) in _GATHERS


def sums_into_parts(target: object) -> bool:
    """Whether an operator sums over ranks, and gives each of them a part."""
    return _name(target) in _SUMS_TO_PARTS


def _name(target: object) -> str | None:
    """The name of a collective, without its namespace; None of what is none."""
    if getattr(target, "namespace", None) not in _COLLECTIVES:
        return None
    schema: Any = getattr(target, "_schema", None)
    return "" if schema is None else str(schema.name.partition("::")[2])


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema: Any = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _groups(node: fx.Node) -> list[str]:
    """Names of process groups among the arguments of a collective."""
    name = _arguments(node).get("group_name") if is_collective(node) else None
    return [name] if isinstance(name, str) else []


def _ranks_of(group_name: str) -> list[int]:
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d
    ranks: list[int] = group.get_process_group_ranks(group._resolve_process_group(group_name))
    return ranks


@dataclass(frozen=True)
class Shards:
    """Of the parameters that FSDP2 shards at a module, in bytes.

    ``part`` is this rank's, ``gathered`` is all of them. Their gradients are ``sent`` to be
    reduced. Between the forward and the backward ``kept`` stay: all where they are not given back
    after the forward, a part of these where they are given to fewer ranks.
    """

    part: int = 0
    gathered: int = 0
    sent: int = 0
    kept: int = 0

    def __add__(self, other: Shards) -> Shards:
        return Shards(*map(operator.add, astuple(self), astuple(other)))


def parts_given_back(model: torch.nn.Module) -> tuple[dict[str, int], int]:
    """This rank's parts of parameters that FSDP2 gathers for their module alone; bytes by name.

    Besides, the bytes of all other parts: of parameters that stay gathered from the forward on, as
    those of the outermost module do.
    """
    names, found, others = {id(x): name for name, x in model.named_parameters()}, {}, 0
    for outermost, group in _groups_of_fsdp(model):
        given_back = not outermost and group.post_forward_mesh_info is not None
        for one in group.fsdp_params:
            part = one._sharded_param_data.nbytes
            name = names.get(id(one.sharded_param))
            if given_back and name is not None:
                found[name] = part
            else:
                others += part
    return found, others


def shared_over_ranks(model: torch.nn.Module) -> list[str]:
    """Names of parameters that are DTensors when their module runs, as in tensor parallel."""
    shards = (one for _, group in _groups_of_fsdp(model) for one in group.fsdp_params)
    gathered = {id(one.sharded_param) for one in shards if not one.is_dtensor}
    named = model.named_parameters()
    return [name for name, x in named if is_dtensor(x) and id(x) not in gathered]


def _groups_of_fsdp(model: torch.nn.Module) -> list[tuple[bool, Any]]:
    """What FSDP2 gathers at once, and whether it is that of the outermost module."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return [(one is modules[0], group) for one in modules for group in _groups_at(one)]


def _groups_at(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [one for one in groups if one is not None]


def shards_of(module: Any) -> Shards:
    """What FSDP2 shards at this module, and not further inside."""
    found = Shards()
    for group in _groups_at(module):
        later = group.post_forward_mesh_info
        for one in group.fsdp_params:
            policy, own, numel = one.mp_policy, one._sharded_param_data, one._orig_size.numel()
            width = (policy.param_dtype or own.dtype).itemsize
            sent = policy.reduce_dtype.itemsize if policy.reduce_dtype else width
            kept = numel * width
            if later is not None:
                kept = 0 if later == group.mesh_info else kept // later.shard_mesh_size
            found += Shards(own.nbytes, numel * width, numel * sent, kept)
    return found


Part = tuple[fx.GraphModule, list[Any]]


def parts_split_for_ddp() -> list[Part]:
    """The parts of the graph that Dynamo splits for DDP now, in order, with inputs without memory.

    Each part ends where a bucket of gradients is full, so that it can be sent while the backward of
    the parts before runs. Dynamo compiles them one after the other, and tells a backend of one at a
    time.

    None where no graph is split, or one of the parts is compiled. Raises whatever a part
    raises that cannot run without memory.
    """
    compiler = _compiler_of_parts()
    if compiler is None:
        return []
    module, values, parts = compiler.module, dict[fx.Node, Any](), list[Part]()
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    if any(str(node.target).startswith("compiled_") for node in calls):
        return []
    mode = compiler.fake_mode
    with mode, mock.patch.object(mode, "allow_non_fake_inputs", True), torch.enable_grad():
        for node in module.graph.nodes:
            args = fx.map_arg(node.args, values.__getitem__)
            if node.op == "placeholder":
                values[node] = _fake(compiler.env[node], mode)
            elif node.op == "call_module":
                part = _with_tuple(getattr(module, str(node.target)))
                parts.append((part, list(args)))
                results = pytree.tree_map_only(torch.Tensor, _leaf, part(*args))
                several = any(user.target is operator.getitem for user in node.users)
                values[node] = results if several else results[0]
            elif node.op == "call_function":
                values[node] = node.target(*args)
            elif node.op == "get_attr":
                values[node] = _fake(getattr(module, str(node.target)), mode)
    return parts


def _compiler_of_parts() -> Any:
    """What compiles parts on the interpreter's stack; None where nothing is split.

    The frame that is asked keeps its locals for a while. Those of ``run_node`` must not be kept:
    one of them tells torch when it ends, by being collected.
    """
    backends = sys.modules.get("torch._dynamo.backends.distributed")
    if backends is None:
        return None
    own = backends.SubmodCompiler.compile_submod.__code__
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code is own)
    frame = next(frames, None)
    return None if frame is None else frame.f_locals["self"]


def _fake(value: Any, mode: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return to_fake_tensor(value, mode) if is_real else value


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _with_tuple(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that returns a tuple, as backends are given it."""
    copy = copy_module(module)
    output = copy.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = (output.args,)
    copy.recompile()
    return copy
