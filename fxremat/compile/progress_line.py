"""One line on the terminal that tells what planning does, rewritten in place.

Where standard error is no terminal nothing is written. Of several ranks on a machine one writes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

CLEAR = "\r\x1b[K"


def _is_seen() -> bool:
    """Whether somebody looks, and no other rank writes there."""
    if sys.stderr is None or not sys.stderr.isatty():  # a program without a console has none
        return False
    return os.environ.get("LOCAL_RANK", "0") == "0"


@dataclass
class ProgressLine:
    """What is shown now is cleared before anything else is written."""

    is_shown: bool = False

    def show(self, text: str) -> None:
        """Write the text over what was shown before."""
        if _is_seen():
            sys.stderr.write(f"{CLEAR}fxremat: {text}")
            sys.stderr.flush()
            self.is_shown = True

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self.is_shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self.is_shown = False
