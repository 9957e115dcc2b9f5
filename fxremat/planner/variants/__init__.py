"""Plans in which operators take other variants."""
