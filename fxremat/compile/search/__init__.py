"""The search for the best candidate: what is tried, and what comes of it."""
