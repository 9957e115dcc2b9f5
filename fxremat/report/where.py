"""Where in the user's code a node of the joint graph comes from."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def module_of(node: fx.Node) -> str:
    """The innermost module that the node was traced in, as the user would write it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    text = str(names[-1]) if names else ""
    text = re.sub(r"L\['self'\]\.?", "", text)
    text = re.sub(r"_modules\['([^']+)'\]", r"\1", text)
    return text.replace("__", ".") if text.startswith("L__self__") else text


def source_line(node: fx.Node) -> str:
    """``file.py:line`` of the call that made the node; empty where it is not known."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if "/torch/" not in f["file"]] or frames
    if not own:
        return ""
    return f"{own[-1]['file'].rsplit('/', 1)[-1]}:{own[-1]['line']}"


def describe(node: fx.Node) -> str:
    """A node with its module and source line: ``addmm_3 [layers.1.mlp, model.py:88]``."""
    if node.op == "placeholder":
        return f"{node.name} [graph input]"
    places = ", ".join(filter(None, (module_of(node), source_line(node))))
    return f"{node.name} [{places}]" if places else node.name
