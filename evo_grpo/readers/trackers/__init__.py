"""Trackers that follow a run: a module for each kind, and any tracker of accelerate."""
