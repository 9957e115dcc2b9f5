"""How many random examples a property is tried on: few in each run, many where asked for."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FEW = 30
"""Where a test does not say."""
MANY_TIMES = 30
"""The long profile's examples, for each of the short one."""
SHORT, LONG = "short", "long"

settings.register_profile(SHORT, max_examples=FEW, deadline=None, derandomize=True, database=None)
settings.register_profile(LONG, max_examples=FEW * MANY_TIMES, deadline=None, print_blob=True)


def examples(number: int, **others: Any) -> settings:
    """So many random examples, and many times as many in the long profile; ``others`` as usual."""
    times = settings().max_examples // FEW
    return settings(max_examples=number * times, **others)
