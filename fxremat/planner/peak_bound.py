"""A lower bound on the peak of every schedule whose first runs come in base order.

At the first run of op ``i`` these are live:

* the resident values, and the outputs written by earlier ops;
* what the op reads and writes, less what it may take over in place, and its workspace;
* inputs, and values of earlier ops that are not repeatable, if op ``i`` or a later one reads them:
  that read is still to come, and nothing can bring the value back.

The bound is the largest such sum. With another order of the first runs fewer outputs might be live
at the worst op, so the bound is proven for base order only.
"""

from __future__ import annotations

from fxremat.planner.indexed_problem import INPUT, IndexedProblem


def peak_bound(model: IndexedProblem) -> int:
    """The largest number of bytes that must be live together at some first run."""
    last = [max(read, op, 0) for read, op in zip(model.last_reads, model.writer, strict=True)]
    pinned = _pinned_bytes(model, last)
    floor = model.problem.resident_bytes
    return max((floor + pinned[i] + _own(model, i, last) for i in range(model.n)), default=floor)


def _span(model: IndexedProblem, value: int, last: int) -> tuple[int, int] | None:
    """First and last stage at which the value is certainly live; None if none is certain."""
    op = model.writer[value]
    if model.is_output[value]:
        return max(op, 0), model.n - 1
    if op == INPUT:
        return 0, last
    if not model.repeatable[op]:
        return op, last
    return None


def _pinned_bytes(model: IndexedProblem, last: list[int]) -> list[int]:
    change = [0] * (model.n + 1)
    for value, size in enumerate(model.bytes):
        span = _span(model, value, last[value])
        if span is not None:
            change[span[0]] += size
            change[span[1] + 1] -= size
    out, total = [], 0
    for step in change[:-1]:
        total += step
        out.append(total)
    return out


def _own(model: IndexedProblem, op: int, last: list[int]) -> int:
    """Bytes of the op itself that `_pinned_bytes` does not hold already."""
    size = model.workspace[op]
    for value in (*model.reads[op], *model.writes[op]):
        span = _span(model, value, last[value])
        if span is None or not span[0] <= op <= span[1]:
            size += model.bytes[value]
    # A pair may be taken over in place only if its read can die here.
    for read, write in model.inplace[op]:
        if model.evictable(read) or last[read] <= op:
            size -= min(model.bytes[read], model.bytes[write])
    return size
