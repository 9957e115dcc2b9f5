"""``optimizer = fxremat.step_in_backward(model, lambda p: torch.optim.AdamW(p, fused=True))``.

Each parameter has an optimizer of its own, which steps when autograd has added up its gradient, and
then drops the gradient: ``loss.backward()`` is the whole step, and gradients need never be in
memory together. That is torch's "optimizer step in backward". For weights in host memory, whose
gradients arrive there one by one, the step runs beside the rest of a compiled backward
(`fxremat.runtime.optimizer_steps` says when); their next copy to the device comes after
it either way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fxremat.errors import InvalidOption
from fxremat.runtime.optimizer_steps import Stepped

__all__ = ["StepInBackward", "step_in_backward"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def step_in_backward(model: nn.Module, make_optimizer: MakeOptimizer) -> StepInBackward:
    """Let the parameters of ``model`` be updated inside of ``loss.backward()``.

    ``make_optimizer`` is called for each parameter with a list of it alone, and gives the
    optimizer that steps for it; any that treats parameters one by one will do. After
    ``loss.backward()`` each parameter that got a gradient has been updated, once, and its ``grad``
    is None; so the training loop is ``model(x).backward()``. What comes back stands for the
    optimizer elsewhere: in learning-rate schedulers, and for saving and loading.

    A step begins before the backward is over for weights in host memory (`fxremat.offload`) in a
    graph compiled by fxremat. On CUDA autograd has to run in the calling thread for that: say
    ``torch.autograd.set_multithreading_enabled(False)`` once. Elsewhere, as for weights that
    several graphs have gradients for, the steps run one after another, each when the gradient is
    whole.

    What needs all gradients at once, or more than one backward for a step, is not possible with
    it: clipping by the norm of all gradients, gradient accumulation, ``GradScaler``, and averaging
    over processes (DDP). A backward inside a backward, as ``checkpoint(use_reentrant=True)`` has
    it, counts as one of its own.

    An error in a step comes out of ``backward()`` as it is. That parameter keeps its gradient, and
    of the others each has been updated or not.

    InvalidOption (a ValueError) for a model without parameters, and for a ``make_optimizer`` whose
    optimizers do not have the parameter they are made for, and no other.
    """
    return StepInBackward(model.parameters(), make_optimizer)


class StepInBackward(Optimizer):
    """The optimizers of all parameters as one, which steps in each backward until `remove`.

    Every parameter has a group of its own in ``param_groups``, in the order of the parameters.
    Saved and loaded states are those of one optimizer for ``model.parameters()``: either can
    resume from the other's. ``step`` and ``zero_grad`` have nothing left to do.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make_optimizer: MakeOptimizer) -> None:
        given = list(parameters)
        if not given:
            raise InvalidOption("model", "one without parameters", "a model with parameters")
        self.optimizers = [_made(make_optimizer, parameter) for parameter in given]
        super().__init__(given, {})
        self._take_groups()
        self._stepped = [
            Stepped(parameter, optimizer.step)
            for parameter, optimizer in zip(given, self.optimizers, strict=True)
        ]
        self._hooks = [_hook(one) for one in self._stepped]
        for one in self._stepped:
            _Steps.of(one.parameter).append(one)

    def _take_groups(self) -> None:
        """Show the groups that the optimizers have now; each step looks into them."""
        self.param_groups = [optimizer.param_groups[0] for optimizer in self.optimizers]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing: it has been done in the backward."""

    def remove(self) -> None:
        """From now on a backward leaves gradients, and steps no more."""
        for hook in self._hooks:
            hook.remove()
        for one in self._stepped:
            _Steps.of(one.parameter).remove(one)
        self._hooks, self._stepped = [], []

    def state_dict(self) -> dict[str, Any]:
        """The state of one optimizer for all parameters; neighbours with equal options are a group.

        The parameters are numbered in their order.
        """
        own = [optimizer.state_dict() for optimizer in self.optimizers]
        groups: list[dict[str, Any]] = []
        for number, one in enumerate(own):
            group = {**one["param_groups"][0], "params": [number]}
            if groups and _options(groups[-1]) == _options(group):
                groups[-1]["params"].append(number)
            else:
                groups.append(group)
        state = {number: one["state"][0] for number, one in enumerate(own) if one["state"]}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, here or of one optimizer for the same parameters."""
        groups = state_dict["param_groups"]
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        options = [_options(group) for group in groups for _ in group["params"]]
        if len(numbers) != len(self.optimizers):
            raise ValueError(
                f"the state is one of {len(numbers)} parameters, not of {len(self.optimizers)}"
            )
        for optimizer, number, own in zip(self.optimizers, numbers, options, strict=True):
            known = state_dict["state"].get(number)
            state = {} if known is None else {0: known}
            optimizer.load_state_dict({"state": state, "param_groups": [{**own, "params": [0]}]})
        self._take_groups()


def _made(make_optimizer: MakeOptimizer, parameter: nn.Parameter) -> Optimizer:
    optimizer = make_optimizer([parameter])
    groups = optimizer.param_groups
    if [id(p) for group in groups for p in group["params"]] != [id(parameter)]:
        expected = "a function that gives an optimizer of the parameters it is called with"
        raise InvalidOption("make_optimizer", make_optimizer, expected)
    return optimizer


class _Steps(list[Stepped]):
    """What steps for a parameter, as an attribute of it, which keeps that alive.

    The hook must not: what steps refers to the parameter, and a cycle through a hook is never
    freed, since Python's garbage collector cannot look into those of torch.
    """

    NAME = "_fxremat_steps"

    @classmethod
    def of(cls, parameter: Any) -> _Steps:
        """That of ``parameter``, made if there is none."""
        found = vars(parameter).get(cls.NAME)
        if not isinstance(found, cls):  # saved and loaded it is something else, and empty
            found = vars(parameter)[cls.NAME] = cls()
        return found

    def __reduce__(self) -> Any:
        """Saved with a parameter: empty, of a type that ``torch.load`` accepts from anyone."""
        return OrderedDict, ()


def _hook(stepped: Stepped) -> RemovableHandle:
    """Let autograd call; a frozen parameter has its hook too, for when it is frozen no more."""
    parameter: Any = stepped.parameter
    owned = ref(stepped)

    def gradient_is_whole(_: Any) -> None:
        one = owned()
        assert one is not None  # the parameter that autograd calls for keeps it
        one.gradient_is_whole()

    wanted = parameter.requires_grad
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return RemovableHandle({})  # it never gets a gradient
    parameter.requires_grad_(True)
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(gradient_is_whole)
    finally:
        parameter.requires_grad_(wanted)
    return handle


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
