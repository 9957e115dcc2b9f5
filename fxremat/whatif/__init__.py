"""Cards that are not here, what fits on them, and sizes as formulas."""
