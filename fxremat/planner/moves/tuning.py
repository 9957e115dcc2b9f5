"""What bounds the search over transfers."""

from __future__ import annotations

# -- host_weights ------------------------------------------------------------------

HOST_WEIGHTS_STEPS = 6
"""Plans that are made on the way to the best count of weights."""

# -- offload -----------------------------------------------------------------------

OFFLOAD_PRICES = (1.0, 0.3)
"""Tried besides where values live in host memory: the engine is busy without any other."""
OFFLOAD_ROOM = (0, 1, 2)
"""Values of the largest size for which the budget leaves room."""
OFFLOAD_BACKLOG = 1.0
"""A value joins the queue of the engine if that is no longer than the value's own transfer."""

# -- transfers ---------------------------------------------------------------------

TRANSFERS_ROUNDS = 3
"""Times that transfers are placed anew, by the times at which ops really ran."""
