"""Hypothesis strategies: small random problems, and schedules that are possible for them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fxremat.core.problem import Change, Op, Phase, Problem, Value, Variant, validate

SIZES = st.integers(0, 64)
TIMES = st.integers(0, 16).map(float)
PHASES: tuple[Phase, ...] = ("forward", "backward")


@st.composite
def ops(draw: st.DrawFn, index: int, there: list[str], phase: Phase, repeatable: bool) -> Op:
    """An op that reads some of what is there and writes one or two new values."""
    few = min(3, len(there))
    reads = draw(st.lists(st.sampled_from(there), max_size=few, unique=True)) if there else []
    writes = [f"v{index}_{part}" for part in range(draw(st.sampled_from((1, 1, 1, 2))))]
    pairs = [(read, write) for read in reads for write in writes]
    inplace = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    return Op(
        name=f"op{index}",
        reads=tuple(reads),
        writes=tuple(writes),
        time_us=draw(TIMES),
        workspace_bytes=draw(st.sampled_from((0, 0, 0, 8, 32))),
        phase=draw(st.sampled_from((phase, phase, "any"))),
        repeatable=repeatable or draw(st.sampled_from((True, True, True, False))),
        inplace=tuple(inplace),
    )


@st.composite
def problems(
    draw: st.DrawFn, min_ops: int = 1, max_ops: int = 8, all_repeatable: bool = False
) -> Problem:
    """A valid problem with inputs, resident values, outputs, workspaces and in-place pairs."""
    inputs = [f"in{i}" for i in range(draw(st.integers(0, 2)))]
    resident = [f"res{i}" for i in range(draw(st.integers(0, 2)))]
    count = draw(st.integers(min_ops, max_ops))
    first_backward = draw(st.integers(0, count))
    there, made = inputs + resident, []
    for index in range(count):
        op = draw(ops(index, there, PHASES[index >= first_backward], all_repeatable))
        made.append(op)
        there = [*there, *op.writes]
    outputs = draw(st.lists(st.sampled_from(there), max_size=3, unique=True))
    if made:
        outputs = sorted({*outputs, made[-1].writes[0]})
    values = tuple(Value(name, draw(SIZES)) for name in there)
    return validate(
        Problem("random", values, tuple(made), tuple(inputs), tuple(resident), tuple(outputs))
    )


@st.composite
def schedules(draw: st.DrawFn, problem: Problem, max_repeats: int = 8) -> tuple[str, ...]:
    """A possible schedule: base order, with repeatable ops run again after their first run."""
    steps = list(problem.base_steps())
    again = [op.name for op in problem.ops if op.repeatable]
    for _ in range(draw(st.integers(0, max_repeats)) if again else 0):
        name = draw(st.sampled_from(again))
        steps.insert(draw(st.integers(steps.index(name) + 1, len(steps))), name)
    return tuple(steps)


@st.composite
def scheduled_problems(draw: st.DrawFn) -> tuple[Problem, tuple[str, ...]]:
    """A problem and a possible schedule of it."""
    problem = draw(problems())
    return problem, draw(schedules(problem))


@st.composite
def problems_with_variants(draw: st.DrawFn, max_ops: int = 8) -> Problem:
    """A problem some of whose ops have another form, which reads or takes something else.

    Each variant rewrites one value: what an earlier op may read writes a stand-in for it, which
    some of its readers or the outputs take.
    """
    problem = draw(problems(min_ops=2, max_ops=max_ops))
    values, found = list(problem.values), list[Variant]()
    for index, op in enumerate(problem.ops):
        if not draw(st.booleans()):
            continue
        before = [*problem.inputs, *problem.resident]
        before += [w for earlier in problem.ops[:index] for w in earlier.writes]
        old = op.writes[0]
        new = f"{old}_new"
        reads = draw(st.lists(st.sampled_from(before or [""]), max_size=min(3, len(before))))
        form = Op(
            f"{op.name}_new",
            tuple(dict.fromkeys(reads)),
            (new,),
            draw(TIMES),
            draw(st.sampled_from((0, 0, 8))),
            op.phase,
        )
        readers = [later for later in problem.ops[index + 1 :] if old in later.reads]
        outputs = ((old, new),) if old in problem.outputs else ()
        changes = tuple(Change(r.name, (old,), (new,), draw(TIMES)) for r in readers)
        if changes or outputs:
            values.append(Value(new, problem.bytes_of[old]))
            found.append(Variant(f"other_{op.name}", (form,), changes, outputs))
    return validate(replace(problem, values=tuple(values), variants=tuple(found)))
