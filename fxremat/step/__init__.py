"""All graphs of a step under one budget.

A graph that is alone in its step is not traced twice. If others follow, it keeps as little as it
can; once all have run, the step is planned as one. Nothing here keeps a tensor alive or changes
one. Whoever runs forwards under checkpointing, or without gradients, holds nothing between them.
"""
