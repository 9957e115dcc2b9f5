"""What is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Kind = TypeVar("Kind", bound=Warning)


@contextmanager
def warned(kind: type[Kind]) -> Iterator[list[Kind]]:
    """The warnings of a kind that come inside, newest last; they are there at the end."""
    found: list[Kind] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [each.message for each in caught if isinstance(each.message, kind)]
