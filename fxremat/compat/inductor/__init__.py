"""Inductor: its passes and its scheduler, the code that it generates, and how that is run."""
