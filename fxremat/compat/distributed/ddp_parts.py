"""The parts into which Dynamo splits a graph for DDP, before the first of them is compiled.

Each part ends where a bucket of gradients is full, so that it can be sent while the backward of the
parts before runs. Dynamo compiles them one after the other, and tells a backend of one at a time.
"""

from __future__ import annotations

import operator
import sys
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.joint_graph import copy_module

Part = tuple[fx.GraphModule, list[Any]]


def parts_split_for_ddp() -> list[Part]:
    """The parts of the graph that is split now, in order, each with its inputs without memory.

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
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not own:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]


def _fake(value: Any, mode: Any) -> Any:
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

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
