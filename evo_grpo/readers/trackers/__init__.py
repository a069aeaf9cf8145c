"""Readers that write a run's log to trackers, a module for each kind, and `evo_grpo.Tracker`."""
