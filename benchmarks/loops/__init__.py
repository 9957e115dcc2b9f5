"""Training loops replayed without a GPU."""
