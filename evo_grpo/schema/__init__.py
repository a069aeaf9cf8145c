"""Declares settings, and the hyperparameters of agents with their ranges, without torch."""
