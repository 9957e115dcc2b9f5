"""Solvers of published systems, to select by name: Rotor, Rockmate, POFO, Moccasin, POET."""
