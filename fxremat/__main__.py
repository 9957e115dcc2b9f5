"""``python -m fxremat``: the planner and the tracer on the command line."""

from __future__ import annotations

import sys

from fxremat.cli import main

if __name__ == "__main__":
    sys.exit(main())
