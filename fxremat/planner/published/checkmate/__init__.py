"""Checkmate: the whole schedule as an integer programme."""
