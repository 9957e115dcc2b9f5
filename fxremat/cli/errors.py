"""What the command line refuses."""

from __future__ import annotations


class UsageError(Exception):
    """Something given on the command line is wrong; the message is one line."""
