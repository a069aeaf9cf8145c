"""Selects agents by fitness, and varies hyperparameters, to plan the next round."""
