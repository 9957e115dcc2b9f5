"""How much one run of the tests tries: little by default, much with ``HYPOTHESIS_PROFILE=long``."""

import os

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def tries(short: int, long: int) -> int:
    """How many random draws a test makes."""
    return long if LONG else short
