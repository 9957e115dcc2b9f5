"""Solvers for chains of blocks: Rotor, Rockmate, POFO."""
