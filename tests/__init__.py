"""Tests: one file per module or pass, golden texts in `golden/`, strategies for hypothesis."""
