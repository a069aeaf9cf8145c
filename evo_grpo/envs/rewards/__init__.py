"""Reward functions: checks of their arguments and results, and calls of them."""
