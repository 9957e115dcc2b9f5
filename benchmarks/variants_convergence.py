"""Training in every lossy form, beside exact training: the same batches, weights and optimizer.

Whether a lossy form does harm shows in a loss, not in the error of one gradient. So a small GPT and
a small CNN learn tasks that can be learnt in a few hundred steps, each in every form of every lossy
row. No budget decides: all sites of a row are taken, so that the form is really there; a row that
has no site in a model is said to have none. The graphs run node by node as Inductor would get them.

What differences mean tells a second exact run, on other batches of the same task. Training has
diverged where its final loss, the mean of the last steps, is far above that of exact training. That
is a failure, but for rows whose description says that their errors may be large.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxremat.compat.compilers import trace_as_inductor
from fxremat.compat.joint_graph import extract_forward_backward
from fxremat.passes.joint_graph import JointGraph, Role, is_tensor, root
from fxremat.passes.nodes import fake
from fxremat.passes.variants.few_bit import MOST_BITS
from fxremat.passes.variants.insertion import Rule, Site, insert_all, take
from fxremat.passes.variants.lossy_saved import ROWS
from fxremat.passes.variants.saved_values import made_in_forward
from fxremat.passes.variants.table import RULES

from .machine import describe_machine
from .nets.layers import SelfAttention
from .prepared import prepare
from .rows import MIB, format_table
from .variants_curves import draw

WORDS, LENGTH, WIDTH, BATCH = 64, 32, 64, 16
CLASSES, SIZE, PICTURES = 4, 16, 32
LAST_STEPS = 20
EXACT, OTHER_DATA = "exact", "exact, other batches"
HEAD = ["variant", "sites", "saved MiB", "final loss", "to exact", ""]
MAY_BE_FAR = {
    "scaled_norm_from_output": "it is wrong where a scale is near zero",
    "random_matmul": "the error of its estimates is large",
}
"""Rows whose description warns of large errors."""
FORMS: dict[str, Sequence[str]] = {
    "few_bit_activation": [f"{bits}bit" for bits in range(1, MOST_BITS + 1)],
    "random_matmul": list(ROWS),
}
"""The forms of rows that offer a site in several."""


# -- tasks -----------------------------------------------------------------------------------


class _OverRows(nn.Module):
    """Attention for tokens of all sequences in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(WIDTH, 4, causal=True, spelling="plain")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x.view(-1, LENGTH, WIDTH))
        return y.flatten(0, 1)


class GPT(nn.Module):
    """Two layers over tokens, a row for each; attention in plain ops."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(_block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = (self.tokens(tokens) + self.places).flatten(0, 1)
        for block in self.blocks:
            for part in block:  # type: ignore[attr-defined]
                x = x + part(x)
        return F.cross_entropy(self.head(self.norm(x)), targets.flatten())


def _block() -> nn.ModuleList:
    hidden = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.ModuleList(
        [
            nn.Sequential(nn.LayerNorm(WIDTH), _OverRows()),
            nn.Sequential(nn.LayerNorm(WIDTH), *hidden),
        ]
    )


class CNN(nn.Module):
    """Two convolutions with BatchNorm, ReLU and a pool, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
            for i, o in ((3, 16), (16, 32))
        ]
        head = nn.Linear(32 * (SIZE // 4) ** 2, CLASSES)
        self.layers = nn.Sequential(*stages[0], *stages[1], nn.Flatten(), head)

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(pictures), classes)


Batch = tuple[Tensor, Tensor]


def progressions(generator: torch.Generator) -> Batch:
    """Counting on in steps of 1 to 8 from anywhere: all but the second number can be told."""
    start = torch.randint(0, WORDS, (BATCH, 1), generator=generator)
    step = torch.randint(1, 9, (BATCH, 1), generator=generator)
    numbers = (start + step * torch.arange(LENGTH + 1)) % WORDS
    return numbers[:, :-1], numbers[:, 1:]


def shifted_patterns(generator: torch.Generator) -> Batch:
    """A pattern of each class, moved and under noise."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    classes = torch.randint(0, CLASSES, (PICTURES,), generator=generator)
    by = torch.randint(0, SIZE, (PICTURES, 2), generator=generator).tolist()
    moved = [patterns[c].roll(shift, (1, 2)) for c, shift in zip(classes, by, strict=True)]
    noise = torch.randn(PICTURES, 3, SIZE, SIZE, generator=generator)
    return torch.stack(moved) + noise, classes


@dataclass(frozen=True)
class Task:
    """A model, and where its batches come from."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


TASKS = {"gpt": Task(GPT, progressions), "cnn": Task(CNN, shifted_patterns)}


# -- forms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A lossy row in one of its forms; without a row, what the model is trained with otherwise."""

    name: str
    rule: Rule | None = None
    form: str = ""
    data: int = 0

    def chosen(self, joint: JointGraph) -> list[Site]:
        """All sites in this form; of those that exclude one another the first."""
        if self.rule is None:
            return []
        sites = [its for its in self.rule.find(joint) if its.name.endswith(self.form)]
        taken, chosen = set[fx.Node](), list[Site]()
        for site, form in zip(sites, insert_all(joint, sites).inserted, strict=True):
            if taken.isdisjoint(form.stand_ins):
                chosen.append(site)
                taken.update(form.stand_ins)
        return chosen


def variants() -> Iterator[Variant]:
    """Exact training twice, and every form of every lossy row."""
    yield Variant(EXACT)
    yield Variant(OTHER_DATA, data=1)
    for rule in RULES:
        if rule.lossy:
            for form in FORMS.get(rule.name, [""]):
                yield Variant(f"{rule.name} {form}".strip(), rule, form)


def crossing(joint: JointGraph) -> list[fx.Node]:
    """What the forward has to save, where the backward computes all that it can."""
    late = {
        node
        for node in joint.module.graph.nodes
        if node.op == "call_function"
        and joint.role[node] is not Role.FORWARD
        and not made_in_forward(joint, node)
    }
    early = (n for n in joint.module.graph.nodes if n.op != "output" and n not in joint.tangents)
    return [n for n in early if n not in late and any(user in late for user in n.users)]


def saved_bytes(saved: Sequence[fx.Node]) -> int:
    """Of what the forward makes, each storage once."""
    roots = {root(node) for node in saved if is_tensor(node)}
    return sum(fake(n).numel() * fake(n).dtype.itemsize for n in roots if n.op != "placeholder")


@dataclass
class Taken:
    """A partition function that takes all sites of a variant, and keeps what it saw."""

    variant: Variant
    sites: tuple[str, ...] = ()
    saved: int = 0

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called with the joint graph."""
        before = prepare(module, num_fwd_outputs, fused=True)
        chosen = self.variant.chosen(before)
        joint = take(before, chosen)
        nodes = crossing(joint)
        self.sites, self.saved = tuple(site.name for site in chosen), saved_bytes(nodes)
        return extract_forward_backward(
            joint.module, nodes, num_fwd_outputs=num_fwd_outputs, static_inputs=()
        )

    def compiled(self, model: nn.Module) -> Callable[..., Tensor]:
        """The model, run node by node in these forms."""

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return trace_as_inductor(gm, inputs, {}, self)

        torch.compiler.reset()
        return torch.compile(model, backend=backend)


# -- training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A model trained in one form; ``difference`` is of the final loss to that of exact."""

    model: str
    variant: str
    rule: str | None
    sites: tuple[str, ...]
    saved_bytes: int
    losses: list[float]
    final: float
    difference: float
    diverged: bool

    @property
    def excuse(self) -> str | None:
        """Why it may diverge, if it may."""
        return MAY_BE_FAR.get(self.rule or "")

    @property
    def failed(self) -> bool:
        """Whether it diverged and should not have."""
        return self.diverged and self.excuse is None

    @property
    def no_site(self) -> str:
        """In place of figures."""
        return f"{self.model}: {self.variant} has no site"

    def cells(self) -> list[str]:
        """A line of the table."""
        verdict = "diverged" if self.diverged else ""
        if self.diverged and self.excuse is not None:
            verdict = f"diverged, as it may: {self.excuse}"
        saved = f"{self.saved_bytes / MIB:.2f}"
        figures = [saved, f"{self.final:.4f}", f"{self.difference:+.4f}"]
        return [f"{self.model}: {self.variant}", str(len(self.sites) or ""), *figures, verdict]


def is_far(final: float, exact: float) -> bool:
    """Whether a final loss is much worse, or no number."""
    return not final <= 1.1 * exact + 0.05


def train(task: Task, variant: Variant, steps: int, seed: int = 0) -> tuple[Taken, list[float]]:
    """The losses of training from scratch; none where a row has no site in the model."""
    torch.manual_seed(seed)
    model = copy.deepcopy(task.model()).train()
    taken = Taken(variant)
    call = taken.compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed + variant.data)
    losses = []
    for _ in range(steps):
        loss = call(*task.batch(generator))
        if variant.rule is not None and not taken.sites:
            return taken, []
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return taken, losses


def runs_of(name: str, steps: int, chosen: Sequence[Variant]) -> Iterator[Run]:
    """One model, exact first, then in every form that has a site."""
    exact: float | None = None
    for variant in chosen:
        taken, losses = train(TASKS[name], variant, steps)
        final = fmean(losses[-LAST_STEPS:]) if losses else math.nan
        exact = final if exact is None else exact
        rule = None if variant.rule is None else variant.rule.name
        yield Run(
            name, variant.name, rule, taken.sites, taken.saved, losses, final, final - exact,
            bool(losses) and variant.data == 0 and is_far(final, exact),
        )  # fmt: skip


def table(runs: Sequence[Run]) -> str:
    """A line for each run, and who has no site."""
    lines = [HEAD, *(one.cells() for one in runs if one.losses)]
    without = [one.no_site for one in runs if not one.losses]
    return "\n".join([format_table(lines), *without])


def to_json(runs: Sequence[Run], steps: int) -> dict[str, Any]:
    """All runs; losses to five digits."""
    rows = []
    for one in runs:
        figures = {"losses": [round(loss, 5) for loss in one.losses], "failed": one.failed}
        if not one.losses:  # JSON has no NaN
            figures |= {"final": None, "difference": None}
        rows.append({**asdict(one), **figures, "excuse": one.excuse})
    return {"machine": describe_machine("cpu", torch.get_num_threads()), "steps": steps,
            "last_steps": LAST_STEPS, "runs": rows}  # fmt: skip


def curves(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Losses by model and variant."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in runs:
        if one.losses:
            found.setdefault(one.model, {})[one.variant] = one.losses
    return found


def run(given: argparse.Namespace) -> int:
    """Train, print, write, draw."""
    torch.set_num_threads(1)
    runs: list[Run] = []
    for name in TASKS:
        for one in runs_of(name, given.steps, list(variants())):
            runs.append(one)
            line = "  ".join(one.cells()) if one.losses else one.no_site
            print(line, file=sys.stderr, flush=True)
    print(table(runs))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(to_json(runs, given.steps)) + "\n")
        draw(curves(runs), given.out.with_suffix(".svg"))
    return 1 if any(one.failed for one in runs) else 0
