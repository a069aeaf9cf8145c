"""Declares settings, and an agent's hyperparameters with their ranges; no torch."""
