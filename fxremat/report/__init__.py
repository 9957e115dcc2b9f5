"""What the user sees: the report of each compiled graph, and `explain`."""
