"""Plain PyTorch networks: every one maps (inputs, targets) to its training loss."""
