"""What is done with a finished run: export, sample, evaluate, verify, compare and replay it."""
