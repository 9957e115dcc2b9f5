"""What changes a model before it is compiled: host weights, accumulation, optimizer steps."""
