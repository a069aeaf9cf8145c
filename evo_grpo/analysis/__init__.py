"""Functions for a finished run: export, sample, evaluate, verify, compare and replay."""
