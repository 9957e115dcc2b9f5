"""Where in the user's code a node of the joint graph comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a report is read, and drawn, without torch
    from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class SourceLocation:
    """The innermost module and the line that a node comes from; "" and 0 where they are not known.

    ``value`` is the value of the problem that the node holds. ``copy`` says why it is another copy
    of that value: "again" where it is recomputed, "moved" where it comes back from the host.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    value: str = ""
    copy: str = ""

    def __str__(self) -> str:
        source = f"{self.file}:{self.line}" if self.file else ""
        return ", ".join(filter(None, (self.module, source)))


def module_of(node: fx.Node) -> str:
    """The innermost module that the node was traced in, as the user would write it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    text = str(names[-1]) if names else ""
    text = re.sub(r"L\['self'\]\.?", "", text)
    text = re.sub(r"_modules\['([^']+)'\]", r"\1", text)
    return text.replace("__", ".") if text.startswith("L__self__") else text


def location_of(node: fx.Node) -> SourceLocation:
    """The module, and the innermost line of a file that is not torch's own."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if "/torch/" not in f["file"]] or frames
    module = module_of(node)
    if not own:
        return SourceLocation(module)
    return SourceLocation(module, own[-1]["file"].rsplit("/", 1)[-1], int(own[-1]["line"]))


def describe(node: fx.Node) -> str:
    """A node with its module and source line: ``addmm_3 [layers.1.mlp, model.py:88]``."""
    if node.op == "placeholder":
        return f"{node.name} [graph input]"
    location = str(location_of(node))
    return f"{node.name} [{location}]" if location else node.name
