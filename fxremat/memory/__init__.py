"""The allocator's model, the memory of the graphs, and peaks that are measured."""
