"""Benchmarks: training models, one runner, results as JSON and pictures."""
