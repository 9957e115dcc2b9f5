"""What Dynamo and the interpreter's stack know of the graph that is being compiled."""

from __future__ import annotations

import gc
import operator
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from operator import attrgetter
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
import torch._dynamo.config as _config
from torch import fx, nn
from torch._dynamo import OptimizedModule, eval_frame, pgo
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, get_compilation_metrics, get_optimize_ddp_mode
from torch._guards import CompileContext

Given = ParamSpec("Given")
Result = TypeVar("Result")

SLOTS = 34_000
"""Of 8 bytes. A chunk of CPython is a power of two, and has room for 1,000 more slots: 512 KiB, of
which 31,000 slots stay free, some hundred frames."""


def _enter(function: Callable[..., Any], given: Any, named: Any) -> Any:
    return function(*given, **named)


_enter.__code__ = _enter.__code__.replace(co_stacksize=SLOTS)


def with_stack_room(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function; what it calls has room on the interpreter's stack.

    CPython keeps frames in chunks of memory. A call that does not fit into the chunk takes a new
    one from the system, and returning gives it back. Compilers call deeply, so that a loop deep
    inside may do that at every call: planning then takes three times as long, half of it in the
    system. A frame that asks for many slots takes one large chunk, and what it calls finds the rest
    of it free.
    """

    @wraps(function)
    def entered(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        result: Result = _enter(function, args, kwargs)
        return result

    return entered


def calling_modules() -> dict[nn.Module, tuple[Any, ...]]:
    """The modules whose call is running, the outermost first, with what each was given."""
    found: dict[nn.Module, tuple[Any, ...]] = {}
    for frame, _ in walk_stack(sys._getframe(1)):
        names = frame.f_locals if frame.f_code.co_name in _CALLS else {}
        caller = names.get("self")
        if isinstance(caller, nn.Module) and not isinstance(caller, fx.GraphModule):
            given = *names.get("args", ()), *names.get("kwargs", {}).values()
            found.pop(caller, None)
            found[caller] = given
    return dict(reversed(found.items()))


_CALLS = ("_call_impl", "_wrapped_call_impl")


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The modules inside of ``model`` that are compiled by themselves, each as it was before."""
    found = []
    for module in model.modules():
        if isinstance(module, OptimizedModule):
            found.append(module._orig_mod)
        elif module._compiled_call_impl is not None:
            found.append(module)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class GivenUp:
    """A function that Dynamo runs as it is: its name, file and line, and the reason."""

    where: str
    reason: str


def frames_given_up() -> list[GivenUp]:
    """The functions that Dynamo could not compile, among the last that it was asked to.

    Not those whose compiler raised an error: the user has seen that.
    """
    found: dict[GivenUp, None] = {}
    for each in get_compilation_metrics():
        if each.fail_type in (None, "BackendCompilerFailed"):
            continue
        where = f"{each.co_name}, {os.path.basename(each.co_filename or '')}"
        line = each.fail_user_frame_lineno or each.co_firstlineno
        reason = (each.fail_reason or each.fail_type or "").strip().split("\n")[0]
        found[GivenUp(f"{where}:{line}", reason)] = None
    return list(found)


def options_given_to(backend: Callable[..., Any]) -> list[Mapping[str, Any]]:
    """The options of everything that is compiled by this backend, or would be; slow."""
    wrapper = torch._TorchCompileWrapper
    found = [one for one in gc.get_objects() if type(one) is wrapper]
    return [one.kwargs.get("options", {}) for one in found if one.compiler_fn is backend]


def kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    """The class, and all that are derived from it."""
    yield kind
    for each in kind.__subclasses__():
        yield from kinds_of(each)


def modules_compiled_by(
    backend: Callable[..., Any], running: Sequence[nn.Module] = ()
) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    """All modules that this backend compiles, whole or in place, and the options of each; slow.

    What a compilation that failed has left over is not among them: where others than those that
    are ``running`` are found, garbage is collected first.
    """
    found = _compiled_by(backend)
    if any(one not in running for one, _ in found) and gc.collect():
        found = _compiled_by(backend)
    return found


def _compiled_by(backend: Callable[..., Any]) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    found = ((module, _given_to(backend, context)) for module, context in _compiled_modules())
    return [(module, options) for module, options in found if options is not None]


def _compiled_modules() -> Iterator[tuple[nn.Module, Any]]:
    """Every module that is compiled, and what `torch.compile` has made its call with."""
    kinds = set(kinds_of(nn.Module))
    for one in [one for one in gc.get_objects() if type(one) in kinds]:
        if isinstance(one, OptimizedModule):
            yield unwrapped(one), one.dynamo_ctx
        elif context := _context_of(vars(one).get("_compiled_call_impl")):
            yield one, context


def _given_to(backend: Callable[..., Any], context: Any) -> Mapping[str, Any] | None:
    """The options with which this backend compiles; None where another one does."""
    wrapper = innermost_backend(context.callback)
    if not isinstance(wrapper, torch._TorchCompileWrapper) or wrapper.compiler_fn is not backend:
        return None
    options: Mapping[str, Any] = wrapper.kwargs.get("options", {})
    return options


def functions_compiled_by(backend: Callable[..., Any]) -> list[Mapping[str, Any]]:
    """The options of each function that this backend compiles and that may be given results; slow.

    Not of those that run now, and not of calls of modules.
    """
    gc.collect()
    others = [context for _, context in _compiled_modules()]
    others += [f.f_locals.get("self") for f, _ in walk_stack(sys._getframe(1)) if _is_wrapper(f)]
    apart, found = set(map(id, others)), list[Mapping[str, Any]]()
    for one in [one for one in gc.get_objects() if type(one) is FunctionType]:
        original: Any = getattr(one, "_torchdynamo_orig_callable", None)
        context = None if original is None else _context_of(one)
        if context is None or id(context) in apart or not _takes_arguments(original):
            continue
        if (options := _given_to(backend, context)) is not None:
            found.append(options)
    return found


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        return bool(signature(function).parameters)
    except ValueError:  # a builtin may not say it
        return True


def _is_wrapper(frame: FrameType) -> bool:
    """Whether a frame is that of what `torch.compile` returns, or has put in place of a call."""
    return frame.f_code.co_name == "compile_wrapper"


def _context_of(compiled: Any) -> Any:
    """What `torch.compile` has made this function with; None if it has not."""
    cells = getattr(compiled, "__closure__", None) or ()
    names = compiled.__code__.co_freevars if cells else ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True)).get("self")


def compile_parts(model: nn.Module, parts: Iterable[nn.Module], **how: Any) -> None:
    """Compile these modules inside of ``model`` anew, where they stand and as they are wrapped."""
    wrapped = [one for one in model.modules() if isinstance(one, OptimizedModule)]
    for part in parts:
        around = [one for one in wrapped if one._orig_mod is part]
        for one in around:
            _compile_wrapped(one, **how)
        if not around:
            part.compile(**how)


def compile_in_training(model: nn.Module, how: Callable[[Any], dict[str, Any]]) -> None:
    """Compile a module in place, for training: in evaluation it runs as it is.

    Training is in training mode with gradients enabled. So what is generated word by word, or
    evaluated in other sizes, is not compiled for each of them. ``how`` gives the arguments of
    `torch.compile` when the module is first trained, for what it is called with.
    """
    own: Any = model._call_impl
    compiled: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(own, **how((args, kwargs))))
        return compiled[0](*args, **kwargs)

    model._compiled_call_impl = call


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped; itself if it is none of these."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


@contextmanager
def compiled_in_place(
    model: nn.Module, parts: Iterable[nn.Module], backend: Callable[..., Any]
) -> Iterator[None]:
    """Inside, the ``backend`` compiles these parts; what wraps them in ``model`` is taken off.

    But for modules of torch itself: Dynamo looks into those only where they are wrapped.
    """
    tables: list[Any] = [module._modules for module in model.modules()]
    wrapped = [x for table in tables for x in table.values() if isinstance(x, OptimizedModule)]
    kept = [
        one for one in wrapped if type(one._orig_mod).forward.__module__.startswith("torch.nn.")
    ]
    inside = {one._orig_mod for one in kept}
    with ExitStack() as stack:
        for table in tables:
            bare = {name: unwrapped(x) for name, x in table.items() if x in wrapped}
            if others := {name: x for name, x in bare.items() if x not in inside}:
                stack.enter_context(mock.patch.dict(table, others))
        for one in kept:
            how: dict[str, Any] = {"dynamo_ctx": one.dynamo_ctx, "forward": one.forward}
            stack.enter_context(mock.patch.multiple(one, **how))
            _compile_wrapped(one, backend=backend)
        for part in parts:
            call = part._compiled_call_impl
            stack.enter_context(mock.patch.object(part, "_compiled_call_impl", call))
            if part not in inside:
                part.compile(backend=backend)
        yield


def _compile_wrapped(wrapped: Any, **how: Any) -> None:
    """Compile anew what `torch.compile` has wrapped."""
    anew: Any = torch.compile(wrapped._orig_mod, **how)
    wrapped.dynamo_ctx, wrapped.forward = anew.dynamo_ctx, anew.forward


def more_follow(gm: fx.GraphModule) -> bool:
    """Whether other graphs come after this one in the function that Dynamo compiles.

    It ended the graph because it could not go on, or splits it so that gradients are sent early.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False)) or splits_for_ddp()


def is_whole_call(caller: CodeType) -> bool:
    """Whether the graph that calls us is all that the code has called, as far as it is compiled.

    Then one compiled function lies between, and nothing else but Dynamo and the way in which a
    module calls its ``forward``: no hook that is not traced, and no function that would go on with
    the results.
    """
    own: Any = nn.Module
    ways = own._call_impl.__code__, own._wrapped_call_impl.__code__
    between = 0
    for frame, _ in walk_stack(sys._getframe(2)):
        code = frame.f_code
        if code is caller:
            return between == 1
        is_way = any(code is way for way in ways)  # not each code has a hash: Dynamo makes some
        between += not is_way and code.co_filename != eval_frame.__file__
    return False


def checkpointed_regions(gm: fx.GraphModule) -> int:
    """How many calls of a Dynamo graph, and of its subgraphs, run again in the backward."""
    region: Any = torch.ops.higher_order.tag_activation_checkpoint
    return sum(node.target is region for node in _all_nodes(gm))


def _all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Those of a graph, and of its subgraphs."""
    graphs = [one.graph for one in gm.modules() if isinstance(one, fx.GraphModule)]
    return (node for graph in graphs for node in graph.nodes)


def is_for_dynamo(error: Exception) -> bool:
    """Whether Dynamo waits for this error, as to trace anew, and it is no fault of a compiler's."""
    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def takes_gradients(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph takes gradients itself, by `torch.func.grad` or `torch.func.vjp`."""
    names = (getattr(node.target, "__name__", "") for node in _all_nodes(gm))
    return "_grad_increment_nesting" in names


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with the bodies of `torch.compiler.nested_compile_region` in place of their calls.

    A region has one code, and so one plan, however often it is called; a plan for all that runs
    chooses anew each time. The graph itself where there are none.
    """
    region: Any = torch.ops.higher_order.invoke_subgraph
    calls = [node for node in gm.graph.nodes if node.target is region]
    if not calls:
        return gm
    for call in calls:
        holder: Any = call.args[0]
        body: Any = gm.get_submodule(str(holder.target))
        _inline(gm, call, inline_regions(body), call.args[2:])
    for node in [node for node in gm.graph.nodes if node.op == "get_attr" and not node.users]:
        gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    return gm


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, given: Any) -> None:
    """What a call gives is computed where it stands."""
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with gm.graph.inserting_before(call):
        results: Any = gm.graph.graph_copy(body.graph, copies)
    for node in body.graph.find_nodes(op="get_attr"):
        name = f"inlined_{copies[node].name}"  # no two nodes of a graph have one name
        setattr(gm, name, attrgetter(str(node.target))(body))
        copies[node].target = name
    for user in list(call.users):
        assert user.target is operator.getitem  # a region gives a tuple
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def current_compilation() -> tuple[int, int | None]:
    """Numbers of the frame that Dynamo is compiling, and of this compilation of it; -1 and None
    outside.

    Compilations of one frame replace each other. One compilation has several graphs where DDP
    splits its own (`splits_for_ddp`). Numbers grow in the order in which frames are first seen.
    """
    identifier = CompileContext.current_compile_id()
    frame = getattr(identifier, "frame_id", None)
    if frame is None:
        return -1, None
    number, wrapped = int(frame) * _MOST_WRAPPED, _wrapped_callable()
    if wrapped is not None:
        number += _places_of_wrapped.setdefault(_kind_of(wrapped), len(_places_of_wrapped))
    return number, int(getattr(identifier, "frame_compile_id", 0) or 0)


_MOST_WRAPPED = 2**40
_places_of_wrapped: dict[Any, int] = {}


def _wrapped_callable() -> Any:
    """What is compiled, where Dynamo compiles a function of its own that only calls it; else None.

    It does so for functions of torch, and from torch 2.14 on for modules of torch that are compiled
    in place. All of them have one frame, and do not replace each other.
    """
    translator: Any = InstructionTranslator.current_tx()
    if translator.f_code is not wrap_inline(len).__code__:
        return None
    return translator.f_locals.get("fn")


def _kind_of(wrapped: Any) -> Any:
    """Equal for functions of one code, and for modules of one class with equal shapes."""
    owner = getattr(wrapped, "__self__", wrapped)
    if isinstance(owner, nn.Module):
        return type(owner), tuple(tuple(weight.shape) for weight in owner.parameters())
    return getattr(wrapped, "__code__", wrapped)


def compilations() -> int:
    """How many graphs Dynamo has given to a compiler."""
    return int(counters["stats"]["unique_graphs"])


def splits_for_ddp() -> bool:
    """Whether Dynamo splits the graphs that it compiles now, so that gradients are sent early."""
    if not torch.distributed.is_available() or get_optimize_ddp_mode() != "ddp_optimizer":
        return False
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    return parallel._get_active_ddp_module() is not None


@contextmanager
def fresh_dynamo_caches() -> Iterator[None]:
    """Compilations inside are not counted against the recompile limit outside.

    Nor are sizes that are seen inside: else Dynamo would take those outside for ones that vary.
    """
    nothing_seen: Any = defaultdict(pgo.CodeState)
    with mock.patch.object(pgo, "_CODE_STATE", nothing_seen), _config.patch(recompile_limit=64):
        yield


def leave_out_logs(functions: Iterable[Callable[..., Any]]) -> None:
    """Have Dynamo leave out calls of these functions, which log something, from now on."""
    _config.ignore_logging_functions.update(functions)


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Have Dynamo trace a dimension as a symbol; it fails where the model fixes the size."""
    torch._dynamo.mark_dynamic(tensor, dimension)
