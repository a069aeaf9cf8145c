"""Reward functions: what they are given, what they may return, and how they are called."""
