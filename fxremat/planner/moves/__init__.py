"""Plans in which values or weights move to host memory and come back."""
