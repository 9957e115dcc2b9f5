"""``fxremat.accumulate_in_backward(model)``: several backwards to a step, in less memory.

A compiled backward gives all its gradients at its end, and autograd then adds them to those that
are there already: for a moment all gradients are in memory twice. With this, each is added to
``parameter.grad`` as soon as it is computed, and its memory is free from then on
(`fxremat.runtime.accumulation` says when).
"""

from __future__ import annotations

from torch import nn

from fxremat.errors import InvalidOption
from fxremat.runtime import accumulation

__all__ = ["AccumulateInBackward", "accumulate_in_backward"]


def accumulate_in_backward(model: nn.Module) -> AccumulateInBackward:
    """Let gradients of ``model`` be added to ``parameter.grad`` inside of ``loss.backward()``.

    To be called before the model is compiled, which is when it first runs. The training loop and
    all results stay the same, bit for bit; ``parameter.grad`` stays the same tensor, too, until it
    is set to None. Each graph of the model is planned for a backward in which every ``grad`` is
    there already: their bytes are counted from the beginning, and do not belong into ``reserve``.

    Where something else might see the difference, autograd adds the gradient at the end as ever,
    and a warning says so once, as that takes memory that no plan has counted: for parameters that
    several graphs or other operations of one backward have gradients for, those with hooks of
    their own, with ``create_graph=True``, in anomaly mode, with two backwards at a time, and where
    ``grad`` has another dtype or shares its memory, and for a compiled part of a model that
    ``torch.utils.checkpoint`` runs again. ``torch.autograd.grad`` gives gradients and
    adds none. Gradients of parameters in host memory are added there, as ever.

    After an error in the middle of a backward some parameters have their new gradient added and
    others have not, as with any error in autograd: begin again with ``zero_grad()``.

    Parameters are followed to the graph as they are: a parameter that is changed in place between
    forward and backward is an error, also where only its gradient is computed.

    InvalidOption (a ValueError) for a model without parameters.
    """
    return AccumulateInBackward(model)


class AccumulateInBackward:
    """Gradients of a model are added inside of the backward until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        if not self._parameters:
            raise InvalidOption("model", "one without parameters", "a model with parameters")
        accumulation.ask(self._parameters)

    def remove(self) -> None:
        """From now on autograd adds gradients, after the backward; graphs keep their plans."""
        accumulation.withdraw(self._parameters)
        self._parameters = []
