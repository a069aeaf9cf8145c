"""Selections: which agents survive a round, and which are copied; one file per selection."""
