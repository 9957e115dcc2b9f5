"""The step as a page: one file of HTML that shows the memory of a step, without a network."""
