"""``python -m fxremat``: the program ``fxremat``, where no script is installed."""

from __future__ import annotations

import sys

from fxremat.cli import main

if __name__ == "__main__":
    sys.exit(main())
