"""Samples answers of an adapter, and measures its mean reward on a split of a task."""
