"""H-Rockmate: a graph is cut into clusters, which are planned apart and put together."""
