"""``fxremat.loss_only(model)``: in training a model returns its loss, and not its logits beside it.

A model that returns ``(loss, logits)`` keeps the logits until the caller drops them, and its
backward gets a gradient for them, full of zeros where nobody used them. For a language model these
two are often the largest things of the step. An output that nobody reads should not be returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

__all__ = ["LossOnly", "loss_only"]


def loss_only(model: nn.Module, keep: Sequence[str] = ()) -> LossOnly:
    """Let ``model`` return nothing but its loss while it is trained.

    To be called before the model is compiled, which is when it first runs. In training mode with
    gradients enabled, of a mapping (as Hugging Face models give) only ``loss`` is left, and what
    ``keep`` names; of a tuple or a list only the first, if that is one number. Anything else is
    returned as it is, as is all that is computed in ``model.eval()`` or in ``torch.no_grad()``: so
    metrics of an evaluation get their logits.

    Models of Hugging Face choose their loss when it is first asked for, and some log then, as GPT-2
    does. Inside of a graph that would end it before the loss, and logits would leave it. So they
    choose now.

    ``remove()`` of what is returned ends it, for graphs that are compiled later.
    """
    _choose_losses(model)
    return LossOnly(model, keep)


def _choose_losses(model: nn.Module) -> None:
    for module in model.modules():
        choice = getattr(type(module), "loss_function", None)
        if isinstance(choice, property) and choice.fset is not None:
            module.loss_function = module.loss_function


class LossOnly:
    """A model returns its loss alone until `remove`.

    Its ``forward`` is wrapped: hooks of the module that is compiled run outside of the graph.
    """

    def __init__(self, model: nn.Module, keep: Sequence[str] = ()) -> None:
        self._model = model
        self._before = vars(model).get("forward")
        own: Any = model.forward
        is_method = getattr(own, "__self__", None) is model
        names = ("loss", *keep)

        @wraps(own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # by the function, so that a copy of the model runs itself
            output = own.__func__(module, *args, **kwargs) if is_method else own(*args, **kwargs)
            if not (module.training and torch.is_grad_enabled()):
                return output
            return _left_of(output, names)

        model.forward = MethodType(forward, model)

    def remove(self) -> None:
        """From now on the model returns what it did before."""
        if self._before is None:
            vars(self._model).pop("forward", None)
        else:
            self._model.forward = self._before


def _left_of(output: Any, names: tuple[str, ...]) -> Any:
    """The loss alone, in what it came in."""
    if isinstance(output, Mapping):
        if output.get("loss") is None:
            return output
        kind: Any = type(output)
        return kind(**{name: output[name] for name in names if name in output})
    if isinstance(output, (tuple, list)) and output and _is_number(output[0]):
        return output[:1]
    return output


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
