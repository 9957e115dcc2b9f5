"""The verdict before code generation: Inductor's own kernels, replayed by our timeline.

The forward and backward modules are lowered as far as Inductor's scheduler; the two lists of
kernels become one problem, in which what the forward saves is what the backward reads. Its
replay gives the peak that the generated code will have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat import compat
from fxremat.core.problem import Op, Phase, Problem, Value
from fxremat.core.timeline import Timeline, replay
from fxremat.passes.joint_graph import is_tensor
from fxremat.passes.memory_estimation import TANGENTS, nbytes


@dataclass(frozen=True)
class Rehearsal:
    """The kernels of one training step as a timeline.

    ``origin`` names the FX node of a value, ``origins`` those of a kernel, ``scratch`` gives the
    workspace of a library call by its FX node, in the layout that Inductor chose.
    """

    timeline: Timeline
    origin: dict[str, str]
    origins: dict[str, tuple[str, ...]]
    scratch: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak, resident ones included."""
        return self.timeline.peak_bytes


@dataclass
class _Step:
    """Collects the values and ops of one training step."""

    device: str
    bytes: dict[str, int]
    ops: list[Op]
    origin: dict[str, str]
    written: set[str]
    workspace: Callable[[Any, Any, Any], int]
    scratch: dict[str, int]
    origins: dict[str, tuple[str, ...]]

    def input(self, node: fx.Node) -> str:
        """An input of a graph as a value named after its placeholder."""
        tensor = node.meta["val"]
        on_device = tensor.device.type == self.device
        self.bytes[node.name] = nbytes(tensor) if on_device else 0
        self.origin[node.name] = node.name
        self.written.add(node.name)
        return node.name

    def kernels(self, lowered: compat.Lowered, prefix: str, names: dict[str, str]) -> None:
        """Append a graph's kernels; ``names`` maps its inputs to values already there."""
        phase: Phase = "forward" if prefix == "f_" else "backward"

        def name(buffer: str) -> str:
            return names.get(buffer, prefix + buffer)

        for kernel in lowered.kernels:
            writes = [name(b) for b in kernel.writes if b not in names]
            fresh = [w for w in writes if w not in self.written]
            again = [w for w in writes if w in self.written]
            known = [name(b) for b in kernel.reads if name(b) in self.written]
            for value in fresh:
                buffer = value.removeprefix(prefix)
                self.bytes[value] = lowered.bytes_of.get(buffer, 0)
                self.origin[value] = lowered.origin_of.get(buffer, kernel.origin or kernel.name)
            self.written.update(fresh)
            reads = tuple(dict.fromkeys([*known, *again]))
            pairs = tuple((name(r), name(w)) for r, w in kernel.inplace)
            self.origins[prefix + kernel.name] = kernel.origins
            scratch = self.workspace(*kernel.call) if kernel.call else 0
            if kernel.call:
                self.scratch[kernel.origin] = scratch
            self.ops.append(
                Op(
                    name=prefix + kernel.name,
                    reads=tuple(r for r in reads if r not in fresh),
                    writes=tuple(fresh),
                    time_us=0.0,
                    workspace_bytes=scratch,
                    phase=phase,
                    inplace=tuple((r, w) for r, w in pairs if r in reads and w in fresh),
                )
            )


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder" and is_tensor(n)]


def rehearse(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    device: str,
    workspace: Callable[[Any, Any, Any], int],
) -> Rehearsal:
    """Lower both graphs of a training step and replay their kernels one after the other.

    ``workspace`` gives the scratch bytes of a library call (op, args, kwargs).
    """
    lowered = compat.lower(forward, is_backward=False)
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    saved = {
        node.name: index
        for index, node in enumerate(results)
        if index >= num_fwd_outputs and isinstance(node, fx.Node) and is_tensor(node)
    }
    strides = {name: s for name, i in saved.items() if (s := lowered.strides[i]) is not None}
    lowered_backward = compat.lower(backward, is_backward=True, input_strides=strides)

    step = _Step(device, {}, [], {}, set(), workspace, {}, {})
    primals = {n.name: step.input(n) for n in _placeholders(forward)}
    step.kernels(lowered, "f_", primals)
    tangents = [step.input(n) for n in _placeholders(backward) if compat.is_tangent(n)]
    step.ops.append(Op(TANGENTS, (), tuple(tangents), 0.0, 0, "backward", False))
    names = dict(primals) | {t: t for t in tangents}
    for name, index in saved.items():
        buffer = lowered.outputs[index]
        if buffer is not None:
            names[name] = primals.get(buffer, "f_" + buffer)
    step.kernels(lowered_backward, "b_", names)

    kept = [primals.get(b, "f_" + b) for b in lowered.outputs[:num_fwd_outputs] if b is not None]
    kept += [names.get(b, "b_" + b) for b in lowered_backward.outputs if b is not None]
    problem = Problem(
        name="kernels",
        values=tuple(Value(k, v) for k, v in step.bytes.items()),
        ops=tuple(step.ops),
        resident=tuple(primals.values()),
        outputs=tuple(dict.fromkeys([*(k for k in kept if k in step.written), *tangents])),
    )
    return Rehearsal(replay(problem, problem.base_steps()), step.origin, step.origins, step.scratch)
