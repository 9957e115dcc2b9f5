"""`metrics`: planned and measured numbers as one flat dict for a logger.

    for name, value in fxremat.metrics().items():
        writer.add_scalar(name, value, step)  # TensorBoard
    wandb.log(fxremat.metrics(), step=step)

Measured numbers have the names that torchtitan gives them, so that runs of both share charts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxremat.compile.session import reports as all_reports
from fxremat.memory.measured_peak import DeviceLike, MeasuredPeak
from fxremat.report.report import Report, added_time
from fxremat.sizes import GIB


def metrics(
    measured: MeasuredPeak | None = None,
    *,
    reports: Sequence[Report] | None = None,
    device: DeviceLike = None,
    reset: bool = False,
) -> dict[str, float]:
    """Numbers about memory, and about all graphs that were compiled since the last reset.

    On CUDA the peak is the allocator's on ``device``, or on the current one, since its counters
    were last reset; with ``reset=True`` they are reset after that. Elsewhere there is a peak only
    if ``measured`` is the result of `measure_peak`. ``reports`` replaces those of `reports`, for
    example by the graphs of an `explain`.
    """
    planned = _planned(all_reports() if reports is None else reports)
    if measured is not None:
        return {**_measured(measured), **planned}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {**_allocator(device, reset), **planned}
    return planned


def _measured(measured: MeasuredPeak) -> dict[str, float]:
    found = {"memory/max_active(GiB)": measured.peak_bytes / GIB}
    if measured.reserved_bytes is not None:
        found["memory/max_reserved(GiB)"] = measured.reserved_bytes / GIB
    return found


def _allocator(device: DeviceLike, reset: bool) -> dict[str, float]:
    """The counters of CUDA's allocator."""
    counted = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    active, reserved = counted["active_bytes.all.peak"], counted["reserved_bytes.all.peak"]
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/max_active(GiB)": active / GIB,
        "memory/max_active(%)": 100 * active / total,
        "memory/max_reserved(GiB)": reserved / GIB,
        "memory/max_reserved(%)": 100 * reserved / total,
        "memory/num_alloc_retries": counted["num_alloc_retries"],
        "memory/num_ooms": counted["num_ooms"],
    }


def _planned(reports: Sequence[Report]) -> dict[str, float]:
    """Predictions: the highest peak of all graphs, and other bytes of all graphs together."""
    if not reports:
        return {}
    found = {
        "fxremat/graphs": float(len(reports)),
        "fxremat/predicted_peak(GiB)": max(g.predicted_peak_bytes for g in reports) / GIB,
        "fxremat/store_all_peak(GiB)": max(g.store_all_peak_bytes for g in reports) / GIB,
        "fxremat/time_overhead(%)": 100 * added_time(reports),
        "fxremat/saved(GiB)": sum(g.saved_bytes for g in reports) / GIB,
        "fxremat/recomputed(GiB)": sum(g.recomputed_bytes for g in reports) / GIB,
        "fxremat/moved(GiB)": sum(g.moved_bytes for g in reports) / GIB,
        "fxremat/planning(s)": sum(g.own_seconds for g in reports),
    }
    reserved = [g.predicted_reserved_bytes for g in reports]
    if any(reserved):
        found["fxremat/predicted_reserved(GiB)"] = max(n for n in reserved if n is not None) / GIB
    limited = [(g, g.budget_bytes) for g in reports if g.budget_bytes]
    if limited:
        found["fxremat/budget(GiB)"] = max(budget for _, budget in limited) / GIB
        used = max(g.counted_peak_bytes / budget for g, budget in limited)
        found["fxremat/budget_used(%)"] = 100 * used
    return found
