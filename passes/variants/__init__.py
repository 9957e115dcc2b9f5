"""Operator variants: rules that find sites in a joint graph, and what they put there."""
