"""The torch-free nouns: problem, schedule, timeline, check, plan.

Nothing in this package imports torch or any other part of fxremat.
"""
