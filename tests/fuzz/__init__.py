"""Random training steps, on which every rule for variants is tried."""
