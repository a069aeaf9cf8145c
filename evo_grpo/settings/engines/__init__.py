"""Declares each rollout engine: its settings, checks and memory."""
