"""What trainers need to train within a budget, where it takes more than one line of their own."""
