"""Trackers as readers of a run's log, one module per kind; and trackers of accelerate."""
