"""Writes an HTML page with figures of a run, finished or not, or of several runs side by side."""
