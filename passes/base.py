"""What every pass from graph to graph has: options, a contract, and one call."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxremat.errors import VerificationFailed


class Changed(PassResult):
    """What a pass gives: the graph, whether it differs, and ``data`` for the passes that follow."""

    data: Any

    def __new__(cls, graph_module: fx.GraphModule, modified: bool, data: Any = None) -> Changed:
        """``data`` is None for a pass that gives nothing but the graph."""
        made = super().__new__(cls, graph_module, modified)
        assert isinstance(made, cls)
        made.data = data
        return made


def in_place(module: fx.GraphModule, changed: bool) -> Changed:
    """What a pass gives that rewrites the graph itself."""
    if changed:
        module.recompile()
    return Changed(module, changed)


@dataclass(frozen=True)
class Pass(PassBase):
    """A pass; the fields of a subclass are its options.

    The runner decides whether ``requires`` and ``ensures`` are called; ``call`` works without
    them. Both raise `VerificationFailed`, which names the pass. Calling the pass itself runs all
    three, as `torch.fx` does.
    """

    name: ClassVar[str]

    def requires(self, module: fx.GraphModule) -> None:
        """Check what has to be true of the graph before the pass."""

    @abstractmethod
    def call(self, module: fx.GraphModule) -> Changed:
        """Do the work; a pass that works in place gives the same module."""

    def ensures(self, module: fx.GraphModule) -> None:
        """Check what is true of the graph after the pass."""

    def demand(self, condition: bool, otherwise: str) -> None:
        """Raise `VerificationFailed` unless the condition holds."""
        if not condition:
            raise VerificationFailed(f"pass {self.name}", otherwise)
