"""Reward functions: their arguments, their return values, and their calls."""
