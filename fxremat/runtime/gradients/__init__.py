"""What becomes of a gradient inside a compiled backward: it is added up, or its optimizer steps."""
