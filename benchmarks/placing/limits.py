"""What bounds the search for small arenas."""

from __future__ import annotations

EFFORT = 200_000
"""Of the search for one part of time, where the caller says nothing: some seconds. One for each
place that is tried, and one for so many looks as take the same time:"""
LOOKS_PER_EFFORT = 24
"""A look is at one segment of a region, one section of a valley when its choices are worked out, or
one section of a buffer that is put."""
GOAL_PART = 0.75
"""Of the effort, for the goal itself; the rest goes to arenas between the goal and the best."""
BETWEEN_PARTS = 8
"""Arenas that are tried between the two."""

TRIES_PER_BUFFER = 2.0
"""Of the first search: one dive without a wrong turn tries each buffer once."""
TRIES_GROWTH = 1.05
"""From one search to the next: wrong turns at the top are not repaired by longer searches."""
JITTER = 3.0
"""Ranks of later searches: a buffer counts up to this much more than it is worth."""
SEARCH_SECTIONS = 4_000_000
"""Sections of all buffers together; where there are more, a place takes too long to try."""

EXACT_BUFFERS = 10
"""So few are placed by the integer programme where the search proves nothing."""
EXACT_NODES = 20_000
