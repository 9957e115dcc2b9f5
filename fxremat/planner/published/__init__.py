"""Solvers of published systems, each loaded only where `fxremat.planner.solvers` names it."""
