"""Readers that write a run's log to a tracker, one module per kind; and trackers of accelerate."""
